"""How paths, names and files may be written: `~`, variables, numbers, byte order marks."""

import os
from pathlib import Path
from typing import Any

import pytest

from lightrl.cli import main
from lightrl.config.run_file import load_config, to_toml
from lightrl.errors import ConfigError

PLAIN = 'model.path = "org/name"\ndata.path = "org/rows"\n'


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", str(tmp_path / "files"))
    monkeypatch.delenv("NOBODY", raising=False)


def loaded(tmp_path: Path, text: str = "", *overrides: str) -> Any:
    (tmp_path / "run.toml").write_text(PLAIN + text if "model" not in text else text)
    return load_config(tmp_path / "run.toml", overrides)


FORMS = [("~/a", "home/a"), ("$DATA/a", "files/a"), ("${DATA}/b/a", "files/b/a")]


@pytest.mark.parametrize(("given", "meant"), FORMS)
def test_paths_of_the_file_are_expanded(tmp_path, given, meant):
    text = f"""
        run.dir = "{given}"
        checkpoint.dir = "{given}"
        checkpoint.initial_load_path = "{given}"
        eval.path = "{given}"
        model.path = "{given}"
        reward.functions = ["{given}.py:f", "code"]
        reward.timeout_s = 60
        reward.code.packages = "{given}"
        [[data.sets]]
        path = "{given}"
        reward = "{given}.py:g"
    """
    config = loaded(tmp_path, text)
    full = str(tmp_path / meant)
    assert config.run.dir == config.checkpoint.dir == full
    assert config.checkpoint.initial_load_path == config.eval.path == config.model.path == full
    assert config.data.all_sets[0].path == full
    assert config.data.all_sets[0].reward == (f"{full}.py:g",)
    assert config.reward.functions == (f"{full}.py:f", "code")
    assert config.reward.code.packages == (full,)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml") == config


@pytest.mark.parametrize(("given", "meant"), FORMS)
@pytest.mark.parametrize(
    "key", ["run.dir", "checkpoint.dir", "data.path", "eval.path", "model.path"]
)
def test_paths_of_overrides_are_expanded(tmp_path, key, given, meant):
    value: Any = loaded(tmp_path, "", f"{key}={given}")
    for part in key.split("."):
        value = getattr(value, part)
    assert value == str(tmp_path / meant)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("$NOBODY/a", "there is no variable NOBODY in the environment"),
        ("a/${NOBODY}", "there is no variable NOBODY in the environment"),
        ("~nobody-of-this-name/a", "~nobody-of-this-name is not a user here"),
    ],
)
@pytest.mark.parametrize("key", ["data.path", "run.dir"])
def test_what_cannot_be_expanded_is_one_line(tmp_path, key, given, reason):
    with pytest.raises(ConfigError, match=reason.replace("$", r"\$")):
        loaded(tmp_path, "", f"{key}={given}")


def test_a_file_may_be_called_so(tmp_path):
    (tmp_path / "a$DATA.jsonl").touch()
    assert loaded(tmp_path, 'data.path = "a$DATA.jsonl"\nmodel.path = "m/m"').data.path == str(
        tmp_path / "a$DATA.jsonl"
    )


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".jsonl.gz", ".json", ".json.zst", ".csv", ".csv.gz", ".tsv", ".parquet"]
)
def test_names_of_files_are_no_ids_of_the_hub(tmp_path, suffix):
    path = loaded(tmp_path, f'data.path = "data/train{suffix}"\nmodel.path = "m/m"').data.path
    assert path == str(tmp_path / "data" / f"train{suffix}")


def test_words_of_the_command_line_are_expanded(tmp_path, capsys):
    home = tmp_path / "home"
    home.mkdir()
    (home / "run.toml").write_text(PLAIN + "nonsense = 1")
    for word in ("~/run.toml", "$HOME/run.toml"):
        with pytest.raises(SystemExit):
            main(["data", word])
        assert "nonsense: unknown key" in capsys.readouterr().err
    for words, reason in (
        (["status", "tcp://127.0.0.1:9", "--key=~/none"], f"{home}/none"),
        (["status", "tcp://127.0.0.1:9", "--key", "~/none"], f"{home}/none"),
        (["data", "$NOBODY/run.toml"], "there is no variable NOBODY"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        said = capsys.readouterr().err
        assert reason in said
        assert said.startswith("lightrl: ")


@pytest.mark.parametrize("value", ["4711", "20261126", "1e5", "true", "0x10", "1_000", "nan"])
@pytest.mark.parametrize(
    "key",
    ["run.name", "data.system_prompt", "logging.project", "logging.group", "reward.judge.model"],
)
def test_a_number_may_be_text(tmp_path, key, value):
    judge = "reward.functions=judge", "reward.judge.url=http://a", "reward.judge.model=m"
    found: Any = loaded(tmp_path, "", *judge, f"{key}={value}")
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_a_date_may_be_text_and_a_number_one_of_several_texts(tmp_path):
    day = "2026-11-26"
    config = loaded(
        tmp_path,
        "",
        f"run.name={day}",
        "logging.tags=2026",
        "rollout.stop=42",
        f"data.chat_template_kwargs.day={day}",
        "data.chat_template_kwargs.num=3",
        "logging.samples=3",
        "data.date=2026-01-31",
    )
    assert (config.run.name, config.logging.tags, config.rollout.stop) == (day, ("2026",), ("42",))
    assert config.data.chat_template_kwargs == {"day": day, "num": 3}
    assert config.logging.samples == 3
    assert str(config.data.date) == "2026-01-31"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
def test_files_of_other_editors_are_read(tmp_path, encoding):
    text = PLAIN.replace("\n", "\r\n") + 'data.system_prompt = "é"\r\n'
    (tmp_path / "run.toml").write_bytes(text.encode(encoding))
    assert load_config(tmp_path / "run.toml").data.system_prompt == "é"


def test_home_is_that_of_the_user_in_the_end(tmp_path):
    assert loaded(tmp_path, "", "data.path=~/x").data.path == os.path.expanduser("~/x")
