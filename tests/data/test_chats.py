"""Prompts that nobody meant: what becomes of messages in parts or as JSON, of tools, and what is
noted of prompts and keys that do nothing."""

import json
from datetime import date
from typing import Any

import pytest

from lightrl.config.schema import Config
from lightrl.errors import DataError
from lightrl.launch.checks.initial import settled
from lightrl.model_files import load_tokenizer
from lightrl.rewards.base import Columns
from lightrl.rewards.signatures import conversation
from tests.data.conftest import (
    TEMPLATE,
    USER,
    jsonl,
    load_prompts,
    make_model,
    prompt_set,
    settings,
)
from tests.support.daemons import make_config

# Writes what it is given: a list becomes Python's repr of it.
WRITES = (
    "{% if tools %}{{ tools | tojson }}|{% endif %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def writes(tmp_path) -> Any:
    return load_tokenizer(make_model(tmp_path / "model", with_bos=False, chat_template=WRITES))


def text_of(tmp_path, tokenizer, row: dict[str, Any], **keys: Any) -> str:
    [prompt] = load_prompts(jsonl(tmp_path, row), settings(**keys), tokenizer)
    return prompt.text


def notes(tmp_path, tokenizer, *rows: dict[str, Any], **keys: Any) -> list[str]:
    one = prompt_set(jsonl(tmp_path, *rows), settings(**keys), tokenizer)
    list(one.scan())
    assert all(note.startswith("train: ") and "\n" not in note for note in one.notes())
    return one.notes()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}], "hi\nyou"),
        ([{"type": "input_text", "text": "hi"}], "hi"),
        (["hi", {"type": "text", "text": "you"}], "hi\nyou"),
        ([{"text": "hi"}], "hi"),
        ([{"type": None, "text": "hi", "image": None}], "hi"),
        ({"type": "text", "text": "hi"}, "hi"),
    ],
)
def test_text_parts_are_joined(tmp_path, writes, content, text):
    row = {"prompt": [{"role": "user", "content": content}]}
    assert text_of(tmp_path, writes, row) == f"user:{text}|assistant:"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ([{"type": "image"}, {"type": "text", "text": "hi"}], "image"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "input_audio", "input_audio": {}}, "hi"], "input_audio"),
        ([{"type": "text", "text": None}], "text"),
        ([{"type": "text", "text": "hi"}, 5], "int"),
        ([["hi"]], "list"),
        (7, "int"),
        (True, "bool"),
    ],
)
def test_parts_that_are_no_text_are_refused(tmp_path, writes, content, kind):
    with pytest.raises(DataError, match=f"line 1: .* a part of the type '{kind}'"):
        text_of(tmp_path, writes, {"prompt": [{"role": "user", "content": content}]})


def test_content_without_any_part_is_an_empty_prompt(tmp_path, writes):
    with pytest.raises(DataError, match="line 1: the prompt is empty"):
        text_of(tmp_path, writes, {"prompt": [{"role": "user", "content": []}]})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "prompt", [json.dumps(USER), json.dumps(USER, indent=1), json.dumps(USER[0])]
)
def test_messages_as_json_are_messages(tmp_path, writes, kind, prompt):
    path = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        jsonl(tmp_path, {"prompt": prompt})
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([{"prompt": prompt}]), path)
    [loaded] = load_prompts(str(path), settings(), writes)
    assert loaded.text == "user:hi|assistant:"
    assert conversation(loaded.text, loaded.row, Columns(frozenset({"prompt"}))) == USER


@pytest.mark.parametrize(
    "prompt",
    [
        str(USER),  # as pandas writes it
        json.dumps(USER)[:-5],
        json.dumps([*USER, {"content": "and?"}]),
        json.dumps([{"from": "human", "value": "hi"}]),
        str([{"from": "system", "value": "be brief"}]),
    ],
)
def test_other_text_that_begins_as_messages_is_refused(tmp_path, writes, prompt):
    with pytest.raises(DataError, match="line 1: the prompt is the text of chat messages, but not"):
        text_of(tmp_path, writes, {"prompt": prompt})


@pytest.mark.parametrize(
    "prompt", ["[1, 2] reversed?", '{"a": 1}', "[{", '[{"name": "role"}]', '[{"from": "Rome"}]']
)
def test_other_text_in_brackets_stays_text(tmp_path, writes, prompt):
    assert text_of(tmp_path, writes, {"prompt": prompt}) == prompt


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_the_template_gets_the_tools_of_a_row(tmp_path, writes, tools):
    text = text_of(tmp_path, writes, {"prompt": USER, "tools": tools})
    assert json.loads(text.partition("|")[0]) == [TOOL]


def test_tools_of_parquet_have_no_keys_of_other_tools(tmp_path, writes):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    other = {"type": "function", "function": {"name": "sub", "description": "-"}}
    rows = [{"prompt": USER, "tools": [TOOL]}, {"prompt": USER, "tools": [other]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    one = prompt_set(str(tmp_path / "train.parquet"), settings(), writes)
    for texts in ([p.text for p in one.scan()], [p.text for p in one.prepare([0, 1])]):
        assert [json.loads(t.partition("|")[0]) for t in texts] == [[TOOL], [other]]


@pytest.mark.parametrize("tools", [["add", "sub"], "hammer", 5])
def test_tools_that_are_no_descriptions_are_noted(tmp_path, writes, tools):
    [note] = notes(tmp_path, writes, {"prompt": USER, "tools": tools})
    assert "the column 'tools' does nothing" in note


def test_tools_that_a_template_or_text_has_no_place_for_are_noted(tmp_path, chat, writes):
    [note] = notes(tmp_path, chat, {"prompt": USER, "tools": [TOOL]})
    assert "the column 'tools' does nothing" in note
    assert any(
        "the column 'tools'" in note
        for note in notes(tmp_path, writes, {"prompt": "a", "tools": [TOOL]})
    )
    assert notes(tmp_path, chat, {"prompt": USER, "tools": None}) == []


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "the model's chat template"),
        ({"system_prompt": "be"}, "data.system_prompt"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "data.chat_template_kwargs"),
    ],
)
def test_what_does_nothing_to_plain_text_is_noted(tmp_path, chat, keys, name):
    found = notes(tmp_path, chat, {"prompt": "a"}, **keys)
    assert [
        n for n in found if f"{name} does nothing to plain-text prompts" in n and "as_chat" in n
    ]
    assert notes(tmp_path, chat, {"prompt": "a"}, as_chat=True) == []


@pytest.mark.parametrize("keys", [{"as_chat": True}, {"system_prompt": "be"}])
def test_what_does_nothing_to_chats_is_noted(tmp_path, chat, keys):
    own = {"prompt": [{"role": "system", "content": "own"}, *USER]}
    [note] = notes(tmp_path, chat, own, **keys)
    assert f"data.{next(iter(keys))} does nothing" in note
    assert notes(tmp_path, chat, own, {"prompt": "a"}, as_chat=True) == []
    assert notes(tmp_path, chat, own, {"prompt": USER}, system_prompt="be") == []


def test_text_for_a_model_without_a_template_is_what_is_meant(tmp_path, plain):
    assert notes(tmp_path, plain, {"prompt": "a"}) == []
    [note] = notes(tmp_path, plain, {"prompt": "a"}, system_prompt="be")
    assert "data.system_prompt does nothing" in note


def test_an_argument_that_the_template_does_not_know_is_noted(tmp_path, chat):
    [note] = notes(tmp_path, chat, {"prompt": USER}, chat_template_kwargs={"enable_thinkin": True})
    assert "'enable_thinkin'" in note


def test_a_template_that_begins_no_answer_is_noted(tmp_path, chat):
    assert notes(tmp_path, chat, {"prompt": USER}) == []
    chat.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    [note] = notes(tmp_path, chat, {"prompt": USER})
    assert "add_generation_prompt" in note


@pytest.mark.parametrize(
    "tag", ["<think>\n", "<think>", "<|thinking|>", "[THINK]", "<reasoning>\n\n"]
)
def test_a_template_that_opens_a_thought_is_noted(tmp_path, chat, tag):
    chat.chat_template = TEMPLATE.replace("assistant:", f"assistant:{tag}")
    [note] = notes(tmp_path, chat, {"prompt": USER})
    assert f"ends with {tag.strip()}" in note


@pytest.mark.parametrize("end", ["<think>\n\n</think>\n\n", "<|assistant|>", "<b>"])
def test_other_ends_of_a_prompt_are_not_noted(tmp_path, chat, end):
    chat.chat_template = TEMPLATE.replace("assistant:", f"assistant:{end}")
    assert notes(tmp_path, chat, {"prompt": USER}) == []


DATED = "{{ strftime_now('%d %b %Y') }}|" + TEMPLATE


def test_the_date_that_a_template_writes_stays_that_of_the_run(tmp_path, chat):
    chat.chat_template = DATED
    row = {"prompt": USER}
    assert text_of(tmp_path, chat, row, date="2026-01-31").startswith("31 Jan 2026|")
    assert text_of(tmp_path, chat, row).startswith(f"{date.today():%d %b %Y}|")
    [note] = notes(tmp_path, chat, row, date="2026-01-31")
    assert "2026-01-31" in note


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_run_begins_with_the_date_in_its_config_if_the_template_writes_it(tmp_path, place):
    def begun(template: str, **data: Any) -> Config:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        make_model(folder, with_bos=False, chat_template=None)
        text = json.dumps({"chat_template": template}) if place.endswith("json") else template
        (folder / place).write_text(text)
        return settled(make_config(tmp_path, model={"path": str(folder)}, data=data))

    assert begun(DATED).data.date == date.today()
    assert begun(DATED, date="2026-01-31").data.date == date(2026, 1, 31)
    assert begun(TEMPLATE).data.date is None
