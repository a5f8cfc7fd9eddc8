"""What strangers have written into data, models and messages, on its way to the terminal of a
user."""

import asyncio
import json
import os
import pty
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightrl.errors import ConfigError
from lightrl.keys import new_key, write_key
from lightrl.messages.nodes import Hello, Welcome
from lightrl.messages.snapshot import Snapshot
from lightrl.model_files import load_tokenizer
from lightrl.system.output import plain
from lightrl.transport.router import Router
from tests.cli.test_cli import answering, complaint, lightrl, made_run
from tests.support.cli import DEADLINE_S, QUICKSTART, arguments

pytestmark = pytest.mark.usefixtures("warm_runs")

MODEL = QUICKSTART.parent / "model"
EVIL = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202e"
SHOWN = plain(EVIL)


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def copied_model(folder: Path, **changes: Any) -> Path:
    """The quickstart's model with other entries in its config.json."""
    shutil.copytree(MODEL, folder)
    table = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**table, **changes}))
    return folder


def foreground(tmp_path: Path, row: dict[str, Any], *overrides: str) -> str:
    """The error of a coordinator that refuses a data set of this row."""
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    command = arguments(
        "up", str(QUICKSTART), "data.path=data.jsonl", *overrides, "--role", "coordinator"
    )
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def test_column_names_with_escapes_are_shown_and_not_sent(tmp_path):
    said = foreground(tmp_path, {EVIL: "1"})
    assert said.startswith("lightrl: ")
    assert said.endswith(f"line 1: no 'prompt' (data.prompt_key); its keys are {SHOWN}\n")


def test_a_chat_template_that_quotes_escapes_is_one_plain_line(tmp_path):
    folder = copied_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception(messages[0]['content']) }}")
    row = {"prompt": [{"role": "user", "content": f"{EVIL}\nmore"}]}
    said = foreground(tmp_path, row, f"model.path={folder}")
    assert said.startswith("lightrl: ")
    assert said.endswith(f"line 1: the chat template refuses the prompt: {SHOWN}\n")


def test_a_model_directory_with_escapes_in_it_is_one_plain_line(capsys, tmp_path):
    folder = copied_model(tmp_path / EVIL, model_type=EVIL, auto_map={"AutoConfig": "own.Own"})
    line = complaint(capsys, "up", QUICKSTART, f"model.path={folder}")
    assert line.isprintable()
    assert "auto_map" in line
    (folder / "config.json").write_text("{" + EVIL)
    assert "config.json is not JSON" in complaint(capsys, "up", QUICKSTART, f"model.path={folder}")


def test_a_refusal_with_escapes_is_one_plain_line(tmp_path):
    write_key(tmp_path / "key", key := new_key())

    async def refuse(router: Router) -> None:
        while True:
            for peer, message in await router.receive():
                if isinstance(message, Hello):
                    router.send(peer, Welcome("r", refused=f"go away\n{EVIL}"))

    async def scenario() -> str:
        router = Router("tcp://127.0.0.1:*", key)
        pipe = asyncio.subprocess.PIPE
        refusing = asyncio.create_task(refuse(router))
        process = await asyncio.create_subprocess_exec(
            *arguments("up", "--join", router.address, "--key", "key"),
            cwd=tmp_path,
            stdout=pipe,
            stderr=pipe,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
            refusing.cancel()
            router.close()
        return said.decode()

    assert (
        asyncio.run(scenario()) == f"lightrl: the coordinator refuses this node: go away {SHOWN}\n"
    )


def test_status_shows_escapes_as_text_and_json_stays_json(capsys, tmp_path):
    with answering(Snapshot(EVIL, str(tmp_path / "runs" / "one"), "running", 1, 3, 1, 1.0)) as (
        address,
        _,
    ):
        made_run(tmp_path / "runs" / "one", address)
        assert lightrl("status", "one") == 0
        assert f"run       {SHOWN} · running" in capsys.readouterr().out
        assert lightrl("status", "one", "--json") == 0
        out = capsys.readouterr().out
        assert json.loads(out)["run"] == EVIL
        assert out.rstrip("\n").isprintable()


# Code in a model directory

OWN = "import pathlib\npathlib.Path({mark!r}).touch()\n"


def with_code(folder: Path, model_type: str) -> Path:
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    copied_model(folder, model_type=model_type, auto_map=names)
    (folder / "own.py").write_text(OWN.format(mark=str(folder / "has run")))
    return folder


def test_a_model_directory_with_code_of_its_own_is_one_line_at_once(tmp_path):
    """Nobody is asked whether to run it, although stdin is a terminal."""
    folder = with_code(tmp_path / "model", "own")
    ours, theirs = pty.openpty()
    command = arguments("up", str(QUICKSTART), f"model.path={folder}", "--role", "coordinator")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"lightrl: model.path = '{folder}': its model_type 'own' is defined by Python code in the "
        "directory (auto_map), which LightRL does not run; use one that transformers has\n"
    )
    assert not (folder / "has run").exists()


@pytest.fixture
def nobody_to_ask(monkeypatch):
    def asked(*_: object) -> str:
        raise AssertionError("transformers asks whether to run the code of a model")

    monkeypatch.setattr("builtins.input", asked)


@pytest.mark.usefixtures("nobody_to_ask")
def test_no_loader_asks_for_or_runs_code_of_a_model(tmp_path):
    import torch

    from lightrl.engine.model_dir import read_config
    from lightrl.errors import EngineError, RewardError, TrainerError
    from lightrl.rewards.worker import load_decoder
    from lightrl.trainer.model.policy import load_policy

    folder = with_code(tmp_path / "model", "own")
    for name in ("tokenizer.json", "special_tokens_map.json", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    own = {
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
        "tokenizer_class": "OwnTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(EngineError, match="custom code"):
        read_config(folder)
    with pytest.raises(TrainerError, match="custom code"):
        load_policy(folder, torch.device("cpu"))
    with pytest.raises(RewardError, match="custom code"):
        load_decoder(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(folder))
    assert not (folder / "has run").exists()


@pytest.mark.usefixtures("nobody_to_ask")
def test_a_kind_of_model_that_transformers_has_is_taken_from_there(tmp_path):
    folder = with_code(tmp_path / "model", "qwen2")
    from lightrl.engine.model_dir import build_model, read_config

    config = read_config(folder)
    assert type(build_model(config, config.dtype, "meta")).__module__.startswith("transformers.")
    assert load_tokenizer(str(folder)).eos_token_id is not None
    assert not (folder / "has run").exists()


def test_an_engine_cannot_be_told_to_run_code_of_a_model(capsys):
    line = complaint(capsys, "up", QUICKSTART, "rollout.engine_args={trust_remote_code = true}")
    assert line.startswith(
        "rollout.engine_args: trust_remote_code: no code of a model directory is run"
    )
