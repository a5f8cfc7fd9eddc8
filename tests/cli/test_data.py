"""`lightrl data`: sets, counts, lengths, and prompts as the model sees them."""

import json
import os
import shutil
import subprocess

import pytest

from lightrl.cli import main
from tests.support.cli import DEADLINE_S, QUICKSTART, arguments


def lightrl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def test_it_shows_each_set_with_prompts_as_text_and_tokens(capsys):
    assert lightrl("data", QUICKSTART, "-n", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["train", str(QUICKSTART.parent / "train.jsonl")]
    assert lines[1:4] == [
        "prompts     256, 100.0% of the prompts drawn",
        "tokens      5 to 5, mean 5.0",
        "columns     prompt, answer",
    ]
    assert lines[4].endswith("train.jsonl, line 1)")
    assert lines[5:7] == ['  text      "39%3="', '  tokens    5: "3" "9" "%" "3" "="']
    assert "prompts     96, for evaluation, each x 1, greedy, at most 105 tokens" in lines


def test_as_json_it_says_what_is_left_out(capsys, tmp_path):
    rows = [{"prompt": "1%2=", "answer": "0"}, {"prompt": "1%2=3%4="}, {"prompt": "5%6="}]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    overrides = (f"data.path={tmp_path / 'few.jsonl'}", "data.too_long=drop", "eval.path=")
    assert lightrl("data", QUICKSTART, "--json", *overrides, "data.max_prompt_length=5") == 0
    [report] = json.loads(capsys.readouterr().out)
    assert (report["num_rows"], report["num_kept"], report["num_dropped"]) == (3, 2, 1)
    assert (report["longest_dropped"], report["num_unanswered"]) == (8, 1)
    assert [p["where"].rpartition(", ")[2] for p in report["prompts"]] == ["line 1", "line 3"]
    assert report["prompts"][0]["tokens"] == ["1", "%", "2", "="]


def test_what_is_wrong_is_one_line(capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1%2="}\n{"prompt": ""}\n')
    assert lightrl("data", QUICKSTART, f"data.path={tmp_path / 'bad.jsonl'}") != 0
    assert capsys.readouterr().err.splitlines()[-1].endswith("line 2: the prompt is empty")


def test_answers_that_are_nan_are_counted_as_none(capsys, tmp_path):
    (tmp_path / "nan.jsonl").write_text('{"prompt": "1%2=", "answer": NaN}\n{"prompt": "3%4="}\n')
    assert lightrl("data", QUICKSTART, f"data.path={tmp_path / 'nan.jsonl'}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines if line.startswith("answers")] == [
        ["answers", "2 prompts have none"]
    ]


ENVIRONMENT = """
class SingleTurnEnv:
    def get_dataset(self):
        return [{"prompt": f"{k}%2=", "answer": str(k)} for k in range(10, 50)]

    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    class rubric:
        class_objects = {}

    rubric.funcs, rubric.weights = [right], [1.0]

def load_environment(name):
    return SingleTurnEnv()
"""


def test_an_environment_is_no_file_that_is_missing(capsys, tmp_path, monkeypatch):
    (tmp_path / "verifiers.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    overrides = ("data.path=verifiers:sums", "eval.path=", "reward.functions=verifiers:sums")
    assert lightrl("up", QUICKSTART, "--dry-run", *overrides) == 0
    out = capsys.readouterr().out
    assert "verifiers:sums (not counted)" in out
    assert "response '10' gets 1 (right 1), an empty one gets 0 (right 0)" in out


def said_in_ascii(tmp_path, *words: object) -> str:
    """By a process whose output has no other characters."""
    done = subprocess.run(
        arguments(*map(str, words)),
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert b"Traceback" not in done.stderr
    return done.stdout.decode("ascii")


def test_what_an_encoding_lacks_is_spelled(tmp_path):
    """Those that neither `data` nor `check` prints itself, too: \\u0394 is in the model's name."""
    model = tmp_path / "\u0394"
    shutil.copytree(QUICKSTART.parent / "model", model)
    (tmp_path / "d\u00e9.jsonl").write_text('{"prompt": "1%2=", "answer": "\u00e9\U0001f600"}\n')
    config = (
        QUICKSTART,
        f"model.path={model}",
        f"data.path={tmp_path}/d\u00e9.jsonl",
        "eval.path=",
    )
    said = said_in_ascii(tmp_path, "data", *config)
    assert '  answer    "\\u00e9\\ud83d\\ude00"' in said.splitlines()
    [report] = json.loads(said_in_ascii(tmp_path, "data", *config, "--json"))
    assert report["prompts"][0]["answer"] == "\u00e9\U0001f600"
    assert "\\u00e9" in said_in_ascii(tmp_path, "check", *config)
    assert "\\u0394" in said_in_ascii(tmp_path, "up", *config, "--dry-run")


def test_what_is_hardly_meant_of_prompts_is_noted_before_a_run(capsys, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(QUICKSTART.parent / "model", model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = (QUICKSTART, f"model.path={model}", "eval.path=", "data.system_prompt=1+1=")
    for command, begin in (
        (("data", *config), "note        train: "),
        (("check", *config), "warn  data           train: "),
        (("up", *config, "--dry-run"), "note        train: "),
    ):
        assert lightrl(*command) == 0
        lines = capsys.readouterr().out.splitlines()
        for what in ("data.system_prompt", "the model's chat template"):
            assert [x for x in lines if x.startswith(f"{begin}{what} does nothing to plain-text")]
