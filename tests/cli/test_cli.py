"""The command line as a user meets it: quick, plain, and with one clear line for each mistake."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.client.address import listening
from lightrl.client.find_run import final_snapshot
from lightrl.config.run_file import load_config
from lightrl.coordinator import run_files
from lightrl.errors import ProtocolError
from lightrl.keys import new_key, reachable, write_key
from lightrl.launch.report import exported_model, status_lines
from lightrl.messages.message import Message
from lightrl.messages.snapshot import CostRow, NodeRow, Snapshot, StepForecast, Watch
from lightrl.system.addresses import host_and_port
from lightrl.transport.router import Router
from lightrl.wire import to_json
from tests.support.tiers import NEEDS_TORCHAO

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
KEY = new_key()
pytestmark = pytest.mark.usefixtures("warm_runs")  # reward workers are forked
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
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "join" in result.stdout
    assert "  daemon" not in result.stdout  # hidden: only `lightrl up` starts it
    assert result.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("lightrl.launch.run", ("numpy", "lightrl.journal.read", "lightrl.coordinator.daemon")),
        ("lightrl.client.find_run", ("numpy", "lightrl.replay.log")),
        ("lightrl.daemon.main, lightrl.daemon.worker", ("numpy", "lightrl.coordinator.daemon")),
        ("lightrl.daemon.main, lightrl.coordinator.daemon", ("lightrl.daemon.worker",)),
    ],
)
def test_a_process_loads_what_its_role_needs(modules, absent):
    """A run is four processes and their children: what one loads in vain, a start waits for."""
    code = f"import sys, {modules}; print([m for m in {absent} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout == b"[]\n"


def test_dry_run_spells_out_the_batch_arithmetic_and_starts_nothing(capsys, tmp_path):
    assert lightrl("up", QUICKSTART, "--dry-run", "rollout.group_size=4", "train.steps=25") == 0
    out = capsys.readouterr().out
    assert "group_size = 4" in out
    assert "32 prompts x 4 responses = 128 responses, one optimizer step" in out
    assert "at most 128 x 105 = 13,440 generated tokens" in out
    assert "25 steps = 800 prompts = 3.125 epochs of 256; 3,200 responses" in out
    assert "eval.jsonl (96 prompts) x 1, greedy, at most " in out
    assert "every 10 steps: 4 times" in out  # 0, 10, 20, 25
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            "",
            """no tail batching; length bias: none: every round waits for its longest response
            staleness   synchronous
            speculation from earlier epochs, at most 16 tokens at a time
            a step's 256 run concurrently""",
        ),
        (
            "round.tail_batching=both",
            """both: a short round launches 40 prompts x 10 responses = 400, \
keeps the first 32 x 8 by tokens
            8 prompts are put off each time: about 4 short rounds + 1 long (32 x 8, waits for all)
            length bias: the shorter responses of each prompt are trained
            a short round's 400 take 2 turns or more""",
        ),
        (
            "train.mini_batches=4",
            """4 optimizer steps of 8 prompts
            mini-batches of random groups: about 1/4 of the backward pass overlaps""",
        ),
        (
            "train.mini_batches=4 train.mini_batch_order=arrival",
            "mini-batches in the order of arrival: the longest responses are trained last",
        ),
        (
            "round.tail_batching=prompts round.eta=1.125 round.race=clock run.deterministic=true",
            """36 prompts x 8 responses = 288, keeps the first 32 x 8 by clock
            about 8 short rounds + 1 long
            length bias: shorter: responses that are put off restart
            staleness   synchronous: every trained token is sampled by the newest version
            speculation off, for run.deterministic
            note        run.deterministic does not cover round.race = 'clock': which responses""",
        ),
        (
            "round.tail_batching=prompts round.deferred=continue run.deterministic=true",
            """length bias: none: responses that are put off are continued, not replaced
            staleness   synchronous, but responses that are put off have older tokens; \
importance weights of at most 2 (algorithm.tis_bounds)
            note        run.deterministic does not cover round.deferred = 'continue'""",
        ),
        (
            "round.deferred=restart round.eta=1.5 rollout.top_p=0.9 rollout.top_k=20",
            """temperature 1, top_p 0.9, top_k 20
            note        rollout.top_p, top_k: tokens that they leave out are never sampled
            note        round.deferred = 'restart' cannot act: there are no short rounds
            note        round.eta = 1.5 cannot act: there are no short rounds""",
        ),
        (
            "round.tail_batching=both round.eta=[1,1.5] async.max_staleness=1",
            """32 prompts x 12 responses = 384
            staleness   asynchronous: up to 1 more rounds start before a step is trained
            at most that many versions old (older ones in responses that are put off)
            importance weights of at most 2 (algorithm.tis_bounds)""",
        ),
        (
            "round.tail_batching=prompts train.prompts_per_step=250 rollout.slots=3",
            """note        data.path holds fewer prompts (256) than a short round launches (312)
            note        the 6 slots here are fewer than the 8 responses of one prompt""",
        ),
        (
            "rollout.engine=emulated train.engine=emulated",
            "training    emulated: nothing is trained and no model is written",
        ),
        (
            "algorithm.name=dapo",
            """ratios to the weights before the step are clipped to 0.8 ... 1.28; \
importance weights of at most 2, \
none where trainer and engines compute in float32""",
        ),
        (
            "algorithm.name=gspo algorithm.tis_bounds=off",
            """the step are clipped to 0.9997 ... 1.0004; no importance weights
            note        algorithm.name = 'gspo': its clipping cannot act: a step is one update""",
        ),
        (
            "algorithm.name=cispo algorithm.clip_dual=3 train.mini_batches=4",
            "note        algorithm.clip_dual cannot act: cispo clips the weight of a token",
        ),
        (
            "algorithm.clip_dual=3 algorithm.tis_bounds=[0.5,2]",
            """clipped to 0.8 ... 1.2, the loss of a negative advantage at 3 times it; \
importance weights of 0.5 to 2
            note        algorithm.clip_dual cannot act: a step is one update""",
        ),
        (
            "algorithm.name=cispo async.max_staleness=1 algorithm.clip_high=3",
            """before the step are clipped above 4; importance weights of at most 2
            note        algorithm.clip_high cannot act: a step is one update""",
        ),
        (
            "train.prompts_per_step=4 train.max_tokens_per_gpu=4096",
            "note        train.max_tokens_per_gpu = 4,096: a step has at most 3,616 tokens and "
            "fills no micro-batch on every rank",
        ),
        (
            "train.optim.min_lr_ratio=0.1",
            "note        train.optim.min_lr_ratio cannot act: train.optim.schedule = 'constant'",
        ),
        (
            "train.optim.schedule=cosine train.optim.warmup_steps=100",
            "note        train.optim.schedule = 'cosine' cannot act: all of train.steps = 100 are "
            "train.optim.warmup_steps",
        ),
        pytest.param(
            "train.optim.name=adamw8bit train.optim.schedule=linear train.optim.lr=1e-5 "
            "train.optim.warmup_steps=5 train.optim.min_lr_ratio=0.1",
            "lr 1e-05 after 5 steps of warm-up, linear to 1e-06, adamw8bit, 1 rank",
            marks=NEEDS_TORCHAO,
        ),
    ],
)
def test_dry_run_tells_what_rounds_launch_and_what_that_does_to_lengths(capsys, overrides, lines):
    is_refused = "holds fewer prompts" in lines
    assert lightrl("up", QUICKSTART, "--dry-run", *overrides.split()) == is_refused
    out, error = capsys.readouterr()
    for line in lines.splitlines():
        assert line.strip() in out
    assert not is_refused or "256 prompts are fewer than train.prompts_per_step = 250" in error


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
        (
            "train.max_tokens_per_gpu=112",
            (
                "train.max_tokens_per_gpu = 112: is less than one sequence, "
                "data.max_prompt_length + rollout.max_response_length = 8 + 105",
            ),
        ),
        ("rollout.group_size=1", ("rollout.group_size = 1", "compares the responses")),
        ("run.bind=nonsense", ("nonsense", "tcp://10.0.0.1:5600")),
        (
            "run.bind=tcp://[::1]:5600",
            ("tcp://[::1]:5600: IPv6 is not supported", "tcp://10.0.0.1:5600"),
        ),
        ("run.name=latest", ("run.name = 'latest'", "choose another name")),
        ("run.name=taken", ("runs/taken exists; choose another run.name or remove it",)),
        (
            "run.name=before",
            ("runs/before exists; resume it with `lightrl resume runs/before`, choose",),
        ),
    ],
)
def test_bad_config_is_one_line_that_names_the_key(capsys, tmp_path, override, parts):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.py").write_text("def f(x: pass\n")
    (tmp_path / "other.py").write_text("import ast\ndef g(sample): return 1.0\n")
    for name in ("taken", "before"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "before" / "config.toml").touch()
    line = complaint(capsys, "up", QUICKSTART, override)
    assert all(part in line for part in parts), line
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["before", "taken"]


@pytest.mark.parametrize("role", [(), ("--role", "coordinator")])
@pytest.mark.parametrize("folder", ["file", "/proc"])
def test_a_run_directory_that_cannot_be_made(capsys, tmp_path, role, folder):
    (tmp_path / "file").touch()
    assert lightrl("up", QUICKSTART, f"run.dir={folder}", *role) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"lightrl: run.dir = '{folder}', run.name = 'quickstart': cannot make this directory: "
    )


def test_a_directory_in_the_place_of_the_link_to_the_latest_run(capsys, tmp_path):
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    line = complaint(capsys, "up", QUICKSTART)
    assert line.startswith("run.dir = runs: runs/latest exists but is not a link to a run")


def test_the_join_line_names_an_address_of_this_machine():
    host, port = host_and_port(reachable("tcp://0.0.0.0:5600"))
    assert (host != "0.0.0.0", port) == (True, 5600)
    socket.create_server((host, 0)).close()  # it is ours
    assert reachable("tcp://*:5600") == f"tcp://{host}:5600"
    assert reachable("tcp://127.0.0.1:5600") == "tcp://127.0.0.1:5600"


def test_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint(capsys, "up", QUICKSTART, f"run.bind=tcp://127.0.0.1:{port}")
    assert line.startswith(
        f"run.bind = tcp://127.0.0.1:{port}: port {port} is in use; choose another one"
    )


def test_port_for_weights_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint(
            capsys, "up", QUICKSTART, f"node.weights_port={port}", "run.bind=tcp://127.0.0.1:*"
        )
    assert line.startswith(
        f"node.weights_port = {port}: port {port} is in use; choose another one, or 0"
    )
    line = complaint(
        capsys, "up", QUICKSTART, f"node.weights_port={port}", f"run.bind=127.0.0.1:{port}"
    )
    assert (
        line
        == f"node.weights_port = {port}: is the port of run.bind; choose another one, or 0 for any"
    )


def test_join_to_a_dead_address(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as was:
        port = was.getsockname()[1]
    monkeypatch.setenv("LIGHTRL_KEY", KEY)
    line = complaint(capsys, "up", "--join", f"127.0.0.1:{port}")
    assert line.startswith(f"tcp://127.0.0.1:{port}: no answer (connection refused)")


NO_KEY = (
    "this needs a key of the run: pass --key FILE (a copy of RUN_DIR/join to add a node, of "
    "RUN_DIR/key for "
    "anything else), or set LIGHTRL_KEY to its text"
)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("up", "none.toml"), "none.toml: no such config file"),
        (("up", "a.toml", "b.toml"), "one CONFIG is possible, not 2: a.toml b.toml"),
        (("up", "run.seed=1"), "run.seed=1: there is no CONFIG to override; name a TOML file"),
        (
            ("up", "--join", "nonsense"),
            "tcp://nonsense: not an address; one looks like tcp://10.0.0.1:5600",
        ),
        (("up", "--join", "a:1"), NO_KEY),
        (("status", "127.0.0.1:1"), NO_KEY),
        (
            ("up", QUICKSTART, "--key", "k"),
            "--key is for --join: a run that is started makes its own key",
        ),
        (("status",), "no run here yet; give a run's name or directory, or tcp://HOST:PORT"),
        (
            ("status", "gone"),
            "gone: no such run; give a run's name or directory, or tcp://HOST:PORT",
        ),
        (
            ("down", "gone"),
            "gone: no such run; give a run's name or directory, or tcp://HOST:PORT",
        ),
        (("top",), "lightrl top needs a terminal; lightrl status prints plain lines"),
        (
            ("up", "a.toml", "run.seed=1", "--join", "127.0.0.1:1"),
            (
                "--join: a joining node takes its config from the coordinator; leave out a.toml "
                "run.seed=1"
            ),
        ),
        (
            ("up", QUICKSTART, "--slots", "4"),
            (
                "--slots is for one rollout daemon: --join, or --role ...,rollout; else set "
                "rollout.slots"
            ),
        ),
        (
            ("up", "--join", "127.0.0.1:1", "--role", "trainer", "--slots", "4"),
            (
                "--slots is for one rollout daemon: --join, or --role ...,rollout; else set "
                "rollout.slots"
            ),
        ),
        *(
            (
                ("up", *words, "--preemptible"),
                "--preemptible is for one rollout daemon that has to --join a run",
            )
            for words in ((QUICKSTART,), ("--join", "127.0.0.1:1", "--role", "trainer"))
        ),
        *(
            (
                ("up", *words, "--shares", "trainer-0"),
                "--shares is for one rollout daemon that has to --join a run",
            )
            for words in ((QUICKSTART,), ("--join", "127.0.0.1:1", "--role", "trainer"))
        ),
        (
            ("up", "--join", "127.0.0.1:1", "--part", "1"),
            "--part 1: of whose devices? give --shares TRAINER",
        ),
        (
            ("up", "--join", "127.0.0.1:1", "--shares", "t", "--preemptible"),
            "--shares t: a node that may be taken away has its own devices",
        ),
        (
            ("up", QUICKSTART, "--name", "a"),
            "--name is for one daemon: --join or --role; else set run.name",
        ),
        (
            ("up", "--join", "127.0.0.1:1", "--name", "a/b"),
            (
                "--name 'a/b': is not a name: a letter or digit, then letters, digits, . _ -; "
                "at most 64 in all"
            ),
        ),
        (
            ("up", "--join", "127.0.0.1:1", "--name", 65 * "a"),
            f"--name '{65 * 'a'}': is not a name: "
            "a letter or digit, then letters, digits, . _ -; at most 64 in all",
        ),
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
        ("up", "--role", ","),
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
    lines = {line.partition(" ")[0]: " ".join(line.split()) for line in out.splitlines()}
    assert lines["rollout.group_size"] == (
        "rollout.group_size 8 integer > 0 responses sampled for one prompt"
    )
    assert "train.optim.lr" in lines
    assert lines["algorithm.clip_low"].startswith("algorithm.clip_low unset number >= 0 ratio is")


def test_the_version_is_that_of_the_package(capsys):
    assert lightrl("--version") == 0
    assert capsys.readouterr().out == f"lightrl {metadata.version('lightrl')}\n"


def test_check_passes_here_and_fails_for_a_missing_file(capsys):
    assert lightrl("check", QUICKSTART) == 0
    out = capsys.readouterr().out
    assert "ok    torch" in out
    assert "model, data and reward files are there" in out
    assert "nothing is learnt" not in out
    assert lightrl("check", QUICKSTART, "rollout.engine=emulated", "train.engine=emulated") == 0
    assert "train.engine = emulated: no model is trained" in capsys.readouterr().out
    assert lightrl("check", QUICKSTART, "data.path=none.jsonl") == 1
    assert "fail  config" in capsys.readouterr().out


def test_status_of_a_finished_run_comes_from_its_directory(capsys, tmp_path):
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("one")
    (run_dir / "address").write_text("tcp://127.0.0.1:1\n")
    node = NodeRow("rollout-0", ("rollout",), "gone", "box", 42, "cpu", 3, 0, 64, 0.0, 0.0, 1.0)
    (run_dir / "snapshot.json").write_bytes(
        to_json(Snapshot("one", "x", "finished", 3, 3, 3, 61.0, (node,)))
    )
    for target in ((), ("one",), (run_dir,)):
        assert lightrl("status", *target) == 0
        out = capsys.readouterr().out
        assert "one · finished · 1:01" in out
        assert "rollout-0  rollout  gone   42   3" in out
    assert lightrl("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["pid"] == 42
    assert "this run is over" in complaint(capsys, "down")


@contextlib.contextmanager
def answering(snapshot: Snapshot) -> Iterator[tuple[str, list[Message]]]:
    """A coordinator that only sends `snapshot`: its address, and the other messages it receives."""
    received: list[Message] = []
    address = ""
    listens = threading.Event()

    async def serve() -> None:
        nonlocal address
        router = Router("tcp://127.0.0.1:*", KEY)
        address = router.address
        listens.set()
        with contextlib.closing(router):
            while True:
                for peer, message in await router.receive():
                    if isinstance(message, Watch):
                        router.send(peer, snapshot)
                    elif not isinstance(message, ProtocolError):
                        received.append(message)

    loop = asyncio.new_event_loop()
    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    assert listens.wait(90)
    yield address, received
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


NODES = (
    NodeRow("head", ("coordinator",), "ready", "box", 1, "", None, 0, 0, 0.0, 0.0, 0.0),
    NodeRow("trainer-0", ("trainer",), "ready", "box", 2, "cpu", 3, 0, 0, 0.0, 0.0, 0.0),
    NodeRow("rollout-0", ("rollout",), "ready", "box", 3, "cpu", 3, 0, 64, 0.0, 0.0, 0.0),
)


def made_run(folder: Path, address: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "address").write_text(f"{address}\n")
    write_key(folder / "key", KEY)
    return folder


PRICED = CostRow(
    reserved=2,
    preemptible=3,
    usd=12.345,
    usd_per_step=0.41,
    usd_per_million_tokens=3.1,
    forecast=(StepForecast(1, 14.0, 0.0431), StepForecast(3, 12.25, 0.041)),
    enough=6,
    wanted=4,
)


@pytest.mark.parametrize(
    ("cost", "lines"),
    [
        (
            PRICED,
            [
                "cost      12.35 US$ · 0.41 a step · 3.10 a million tokens",
                "forecast  1 preemptible node: 14.00 s a step, 0.0431 US$",
                "forecast  3 preemptible nodes (now): 12.25 s a step, 0.041 US$",
                "          from 6 on one more saves nothing worth its price; wanted: 4",
            ],
        ),
        (
            CostRow(0, 0, forecast=(StepForecast(0, None, None),), enough=1),
            [
                "forecast  0 preemptible nodes (now): never ends",
                "          from 1 on one more saves nothing",
            ],
        ),
        (
            CostRow(2, 0),
            ["forecast  none before a step is done"],
        ),
    ],
)
def test_status_says_what_other_nodes_would_save(capsys, tmp_path, cost, lines):
    where = str(tmp_path / "runs" / "one")
    snapshot = Snapshot("one", where, "running", 1, 3, 1, 1.0, NODES, cost=cost)
    with answering(snapshot) as (address, _):
        made_run(tmp_path / "runs" / "one", address)
        assert lightrl("status", "one") == 0
        said = capsys.readouterr().out.splitlines()
        assert [line for line in said if line.startswith(("cost", "forecast", "   "))] == lines
        assert lightrl("status", "one", "--json") == 0
        known = json.loads(capsys.readouterr().out)["cost"]
        assert (known["enough"], len(known["forecast"])) == (cost.enough, len(cost.forecast))


def test_a_run_that_is_over_has_a_cost_and_no_forecast():
    over = Snapshot("one", "x", "finished", 3, 3, 3, 61.0, cost=PRICED)
    assert [line[:8] for line in status_lines(over)[3:5]] == ["cost    ", ""]
    left = Snapshot("one", "x", "interrupted", 3, 9, 3, 61.0, cost=CostRow(0, 0))
    assert not [line for line in status_lines(left) if line.startswith("forecast")]


@pytest.mark.parametrize("command", [("status",), ("down",), ("drain", "rollout-0")])
def test_another_run_at_a_stale_address_is_left_alone(capsys, tmp_path, command):
    other = Snapshot("other", str(tmp_path / "runs" / "other"), "running", 1, 3, 1, 1.0, NODES)
    with answering(other) as (address, received):
        made_run(tmp_path / "runs" / "one", address)
        line = complaint(capsys, *command, "one")
        assert line == f"runs/one: its coordinator is gone (another run answers at {address})"
        assert received == []


def test_a_run_whose_coordinator_was_killed(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as was:
        address = f"tcp://127.0.0.1:{was.getsockname()[1]}"
    made_run(tmp_path / "runs" / "one", address)
    line = complaint(capsys, "down", "one")
    assert line == f"runs/one: its coordinator is gone (no answer from {address})"


def test_only_rollout_nodes_can_be_drained(capsys, tmp_path):
    snapshot = Snapshot("one", str(tmp_path / "runs" / "one"), "running", 1, 3, 1, 1.0, NODES)
    with answering(snapshot) as (address, received):
        run_dir = made_run(tmp_path / "runs" / "one", address)
        for target in ((address, "--key", run_dir / "key"), (run_dir,)):
            line = complaint(capsys, "drain", "head", *target)
            assert line == "head is the coordinator; use lightrl down to stop the run"
            line = complaint(capsys, "drain", "trainer-0", *target)
            assert line == "trainer-0 is the trainer; use lightrl down to stop the run"
        assert "nodes are head, trainer-0, rollout-0" in complaint(capsys, "drain", "x", run_dir)
        assert received == []
        assert lightrl("drain", "rollout-0", run_dir) == 0
        assert capsys.readouterr().out == "rollout-0 is leaving\n"
        assert [type(m).__name__ for m in received] == ["Drain"]


def test_files_that_a_run_takes_away_at_its_end(tmp_path):
    assert listening(tmp_path) is None
    assert final_snapshot(tmp_path) is None
    (tmp_path / "address").touch()
    assert listening(tmp_path) is None  # not written yet


def test_whether_a_run_is_over_is_told_by_no_clock(tmp_path):
    (tmp_path / "snapshot.json").write_bytes(
        to_json(Snapshot("one", "x", "finished", 3, 3, 3, 61.0))
    )
    (tmp_path / "address").touch()  # its coordinator was killed before it could take it away
    for ended, listened in ((1, 2), (2, 1)):
        os.utime(tmp_path / "snapshot.json", (ended, ended))
        os.utime(tmp_path / "address", (listened, listened))
        last = final_snapshot(tmp_path)
        assert last is not None
        assert last.state == "finished"
    run_files.reopen(tmp_path)
    assert final_snapshot(tmp_path) is None


def test_the_newest_model_is_that_of_the_last_step(tmp_path):
    for step, written in ((9, 3), (10, 1)):
        model = tmp_path / "checkpoints" / f"step_{step}" / "hf"
        model.mkdir(parents=True)
        (model / "config.json").touch()
        (model / "model.safetensors").touch()
        os.utime(model, (written, written))
    model = exported_model(tmp_path)
    assert model is not None
    assert model.parent.name == "step_10"
