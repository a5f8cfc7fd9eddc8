"""Rows for environments: made or read, with or without a prompt, never templated."""

import json
from array import array

import pytest

from lightrl.config.data import TrainSet
from lightrl.config.environment import Environment
from lightrl.data.check import check_small
from lightrl.data.prompts import PromptSet, load_prompts
from lightrl.errors import DataError
from tests.data.conftest import jsonl, settings

GAME = Environment(source="game.py:Game")
TOOLS = Environment(tools=("tools.py:search",))
HI = {"role": "user", "content": "hi"}


def rows_for(environment, path, tokenizer, prompt_key="prompt", **data):
    one = TrainSet(path=path, name="train", prompt_key=prompt_key, answer_key="answer")
    return PromptSet(one, settings(**data), tokenizer, environment=environment)


def test_rows_that_are_made_have_an_index_and_an_id(plain):
    made = rows_for(GAME, "tasks:3-6", plain)
    found = load_prompts(made)
    assert [p.row for p in found] == [{"index": k} for k in range(3, 7)]
    assert [p.id for p in found] == [f"train/{k}" for k in range(3, 7)]
    assert {(p.text, p.token_ids.tobytes()) for p in found} == {("", b"")}
    assert made.prepare([2]) == [found[2]]
    assert (made.id_of(2), made.rows.where(2)) == ("train/5", "task 5")
    assert check_small([made]) == []
    assert (made.dropped_line(), made.notes()) == ("", [])
    assert made.digest != rows_for(GAME, "tasks:2-5", plain).digest
    with pytest.raises(DataError, match="tasks:9: rows that are made look like tasks:0-999"):
        rows_for(GAME, "tasks:9", plain)


def test_a_class_gets_rows_as_they_are(tmp_path, plain):
    """Without a prompt, or with one longer than any limit; text stays text."""
    rows = [{"n": 1}, {"n": 2, "prompt": "x" * 99}, {"n": 1}, {"n": 3, "prompt": None}]
    found = load_prompts(rows_for(GAME, jsonl(tmp_path, *rows), plain, max_prompt_length=4))
    assert [p.row for p in found] == rows
    assert [p.token_ids for p in found] == [array("i")] * 4
    ids = [p.id for p in found]
    assert len(set(ids)) == 4
    assert ids[2] == f"{ids[0]}-2"


def test_rows_without_a_prompt_have_the_same_ids_in_parquet(tmp_path, plain):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"n": 1}, {"n": 2}, {"n": 1}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    ways = (jsonl(tmp_path, *rows), str(tmp_path / "train.parquet"))
    by_file = [[p.id for p in load_prompts(rows_for(GAME, path, plain))] for path in ways]
    assert by_file[0] == by_file[1]


@pytest.mark.parametrize("prompt", ["hi", [HI], json.dumps([HI])], ids=["text", "chat", "json"])
def test_tools_get_the_prompt_as_messages(tmp_path, plain, prompt):
    path = jsonl(tmp_path, {"q": prompt, "id": "a", "answer": 7})
    [found] = load_prompts(rows_for(TOOLS, path, plain, "q", system_prompt="Be brief."))
    system = {"role": "system", "content": "Be brief."}
    assert found.row == {"q": prompt, "id": "a", "answer": 7, "prompt": [system, HI]}
    assert found.id == "train/a"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"n": 1}, r"no 'prompt' \(data.prompt_key\); its keys are n"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [{"text": "hi"}]}, "a chat message looks like"),
    ],
)
def test_tools_without_a_prompt_are_refused_with_file_and_line(tmp_path, plain, row, reason):
    rows = rows_for(TOOLS, jsonl(tmp_path, {"prompt": "hi"}, row), plain)
    with pytest.raises(DataError, match=f"line 2: {reason}"):
        load_prompts(rows)
