"""The command line as a user meets it: quick, plain, and with one clear line for each mistake."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.config import load_config

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
HEAVY = ("torch", "vllm", "transformers", "zmq", "pydantic", "numpy", "rich")


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lightrl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def complaint(capsys, *arguments: object) -> str:
    """The one line that a mistake gets."""
    assert lightrl(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("lightrl: ")
    return line.removeprefix("lightrl: ")


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom lightrl.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert not e.code\n"
        f"print('LOADED', [m for m in {HEAVY} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "join" in result.stdout
    assert "  daemon" not in result.stdout  # hidden: only `lightrl up` starts it
    assert result.stdout.splitlines()[-1] == "LOADED []"


def test_dry_run_spells_out_the_batch_arithmetic_and_starts_nothing(capsys, tmp_path):
    assert lightrl("up", QUICKSTART, "--dry-run", "rollout.group_size=4", "train.steps=25") == 0
    out = capsys.readouterr().out
    assert "group_size = 4" in out
    assert "32 prompts x 4 responses = 128 responses, one optimizer step" in out
    assert "at most 128 x 105 = 13,440 generated tokens" in out
    assert "25 steps = 800 prompts = 3.125 epochs of 256; 3,200 responses" in out
    assert "96 prompts x 1, greedy, every 10 steps: 4 times" in out  # 0, 10, 20, 25
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_a_config_that_loads_to_the_same_from_elsewhere(capsys, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "11%8=", "answer": "03"}\n')
    lightrl("up", QUICKSTART, "--dry-run", "train.optim.lr=3e-5", "data.path=mine.jsonl")
    resolved, _, _ = capsys.readouterr().out.rpartition("\nrun  ")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "again.toml").write_text(resolved)
    again = load_config(tmp_path / "sub" / "again.toml")
    assert again == load_config(QUICKSTART, ["train.optim.lr=3e-5", "data.path=mine.jsonl"])
    assert again.data.path == str(tmp_path / "mine.jsonl")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.path=nowhere", ("model.path = nowhere", "no such directory")),
        ("data.path=none.jsonl", ("data.path = ", "/none.jsonl: no such file")),
        ("data.path=empty.jsonl", ("data.path = ", "/empty.jsonl: the file is empty")),
        ("eval.path=none.jsonl", ("eval.path = ", "/none.jsonl: no such file")),
        ("reward.functions=none.py:f", ("none.py:f", "no such file")),
        ("reward.functions=broken.py:f", ("broken.py:1", "syntax")),
        ("reward.functions=other.py:f", ("other.py:f", "it defines g")),
        ("train.steps=many", ("train.steps = 'many'", "integer")),
        ("train.stepz=3", ("train.stepz", "did you mean train.steps?")),
        ("run.bind=nonsense", ("nonsense", "tcp://10.0.0.1:5600")),
        ("run.name=taken", ("runs/taken exists", "choose another run.name or remove it")),
    ],
)
def test_bad_config_is_one_line_that_names_the_key(capsys, tmp_path, override, parts):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.py").write_text("def f(x: pass\n")
    (tmp_path / "other.py").write_text("def g(sample): return 1.0\n")
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    line = complaint(capsys, "up", QUICKSTART, override)
    assert all(part in line for part in parts), line
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["taken"]


def test_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint(capsys, "up", QUICKSTART, f"run.bind=tcp://127.0.0.1:{port}")
    assert line.startswith(f"run.bind = tcp://127.0.0.1:{port}: port {port} is in use; choose another one")


def test_join_to_a_dead_address(capsys):
    with socket.create_server(("127.0.0.1", 0)) as was:
        port = was.getsockname()[1]
    line = complaint(capsys, "up", "--join", f"127.0.0.1:{port}")
    assert line.startswith(f"tcp://127.0.0.1:{port}: nobody answers (connection refused)")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("up", "none.toml"), "none.toml: no such config file"),
        (("up", "a.toml", "b.toml"), "one CONFIG is possible, not 2: a.toml b.toml"),
        (("up", "run.seed=1"), "run.seed=1: there is no CONFIG to override; name a TOML file"),
        (("up", "--join", "nonsense"), "tcp://nonsense: not an address; one looks like tcp://10.0.0.1:5600"),
        (("status",), "no run here yet; give an address (tcp://HOST:PORT) or a run directory"),
        (("status", "gone"), "gone: no such run; give an address (tcp://HOST:PORT) or a run directory"),
        (("down", "gone"), "gone: no such run; give an address (tcp://HOST:PORT) or a run directory"),
        (("top",), "lightrl top needs a terminal; lightrl status prints plain lines"),
    ],
)
def test_other_mistakes(capsys, arguments, text):
    assert complaint(capsys, *arguments) == text


@pytest.mark.parametrize(
    "arguments",
    [
        ("up",),
        ("up", "--dry-run"),
        ("up", "--role", "fish", "--join", "a:1"),
        ("up", "--role", "trainer"),
        ("up", "--role", "coordinator"),
        ("drain",),
        ("nonsense",),
    ],
)
def test_wrong_usage_ends_with_status_2(capsys, arguments):
    assert lightrl(*arguments) == 2
    assert "Error: " in capsys.readouterr().err


def test_config_reference_names_every_key(capsys):
    assert lightrl("config") == 0
    out = capsys.readouterr().out
    assert "rollout.group_size" in out
    assert "train.optim.lr" in out


def test_check_passes_here_and_fails_for_a_missing_file(capsys):
    assert lightrl("check", QUICKSTART) == 0
    out = capsys.readouterr().out
    assert "ok    torch" in out
    assert "model, data and reward files are there" in out
    assert lightrl("check", QUICKSTART, "data.path=none.jsonl") == 1
    assert "fail  config" in capsys.readouterr().out


def test_status_of_a_finished_run_comes_from_its_directory(capsys, tmp_path):
    from lightrl.messages import NodeRow, Snapshot
    from lightrl.wire import to_json

    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("one")
    (run_dir / "address").write_text("tcp://127.0.0.1:1\n")
    node = NodeRow("rollout-0", ("rollout",), "gone", "box", 42, "cpu", 3, 0, 64, 0.0, 0.0, 1.0)
    (run_dir / "snapshot.json").write_bytes(to_json(Snapshot("one", "x", "finished", 3, 3, 3, 61.0, (node,))))
    for target in ((), ("one",), (run_dir,)):
        assert lightrl("status", *target) == 0
        out = capsys.readouterr().out
        assert "one · finished · 1:01" in out
        assert "rollout-0  rollout  gone   42   3" in out
    assert lightrl("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["pid"] == 42
    assert "this run is over" in complaint(capsys, "down")
