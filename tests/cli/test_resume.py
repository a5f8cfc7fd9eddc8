"""`lightrl resume`: what it refuses, in one line and with nothing changed; runs that go on after a
kill."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from functools import reduce
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.config.run_file import load_config
from lightrl.errors import LightRLError
from lightrl.keys import join_key, read_key
from lightrl.launch.resume import FIXED, MAY_CHANGE, newest_checkpoint, prepare
from lightrl.messages.snapshot import Snapshot
from lightrl.metrics import sinks
from lightrl.trainer.checkpoint.checksums import with_checksums
from lightrl.trainer.checkpoint.on_disk import SavedStep, point
from lightrl.wire import to_json
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    SMALL,
    Victims,
    all_end,
    arguments,
    descendants,
    joining,
    linux_only,
    run,
    running,
    started,
    summary,
    until,
    wait_for_ready,
)
from tests.support.journals import left_behind

pytestmark = pytest.mark.usefixtures("warm_runs")
FROM_0 = "from the checkpoint of step 0; what came later is set aside as *.rewound"
ENDLESS = ("train.steps=100000", *EMULATED)


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        main(["resume", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (1, "")
    [line] = captured.err.splitlines()
    return line.removeprefix("lightrl: ")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.group_size=3", "rollout.group_size"),
        ("train.optim.name=adamw8bit", "train.optim.name"),
        ("checkpoint.initial_load_path=other", "checkpoint.initial_load_path"),
        ("run.seed=7", "run.seed"),
        ("data.path=other.jsonl", "data.path"),
        ("run.name=other", "run.name"),
        ("round.race=clock", "round.race"),
        ("journal.enabled=false", "journal.enabled"),
    ],
)
def test_what_was_promised_cannot_change(capsys, tmp_path, override, key):
    run_dir = left_behind(tmp_path / "runs" / "one")
    before = contents(run_dir)
    may = (
        "train.steps, checkpoint.*, node.*, journal.*, logging.*, run.bind, rollout.nodes, "
        "rollout.slots"
    )
    line = refusal(capsys, "one", override)
    assert line.startswith(f"{key}: cannot change on a resume; these can: {may}")
    assert contents(run_dir) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("one", "train.stepz=3"), "train.stepz: unknown key; did you mean train.steps?"),
        (("one", "train.steps=many"), "train.steps = 'many': input should be a valid integer"),
        (("none",), "none: no such run; give a run's name or directory"),
        (
            ("tcp://127.0.0.1:1",),
            "tcp://127.0.0.1:1: is an address; resume a run by its directory or name",
        ),
        (("one", "two"), "one RUN is possible, not 2: one two"),
        (("one", "--slots", "3"), "--slots is for one rollout daemon"),
        (("one", "--from-checkpoint"), "runs/one: has no undamaged checkpoint"),
    ],
)
def test_mistakes(capsys, tmp_path, arguments, text):
    before = contents(left_behind(tmp_path / "runs" / "one"))
    assert refusal(capsys, *arguments).startswith(text)
    assert contents(tmp_path / "runs" / "one") == before


def test_a_finished_run_can_only_be_extended(capsys, tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one", "train.steps=1")
    (run_dir / "snapshot.json").write_bytes(
        to_json(Snapshot("one", str(run_dir), "finished", 1, 1, 1, 9.0))
    )
    again = "lightrl resume runs/one train.steps=N, with N above 1"
    assert refusal(capsys, "one") == f"runs/one: finished; to extend it: {again}"
    assert prepare("one", ["train.steps=3"]).train.steps == 3
    assert load_config(run_dir / "config.toml").train.steps == 3


def test_to_extend_a_finished_run_takes_more_steps_than_it_has_done(capsys, tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one", "train.steps=2")
    last = Snapshot("one", str(run_dir), "finished", 2, 2, 2, 9.0)
    (run_dir / "snapshot.json").write_bytes(to_json(last))
    for options in ((), ("--from-checkpoint",)):
        said = refusal(capsys, "one", "train.steps=1", *options)
        assert said.endswith("train.steps=N, with N above 2")


def test_steps_that_are_done_stay_done(capsys, tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step":2}\n')
    assert refusal(capsys, "one", "train.steps=1") == "train.steps = 1: 2 steps are done already"


@pytest.mark.parametrize(
    "override",
    [
        "train.max_tokens_per_gpu=4096",
        "train.activation_checkpointing=true",
        "train.offload=all",
        "train.sync=last",
        "train.optim.lr=0.25",
        "train.optim.schedule=cosine",
        "train.optim.weight_decay=0.5",
    ],
)
def test_what_makes_other_bits_of_a_step_may_change_where_all_steps_are_saved(
    capsys, tmp_path, override
):
    run_dir = left_behind(tmp_path / "runs" / "one")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step":2}\n')
    key, _, value = override.partition("=")
    shown = f"{key} = {repr(value) if value in ('all', 'last', 'cosine') else value}"
    line = refusal(capsys, "one", override)
    assert line.startswith(f"{shown}: the steps")
    assert line.endswith("come out different; --from-checkpoint forgets them")
    path = run_dir / "checkpoints" / "step_2"
    path.mkdir(parents=True)
    (path / "trainer.json").write_bytes(to_json(SavedStep(2, 2, "")))
    point(run_dir / "checkpoints", path)
    capsys.readouterr()
    changed = prepare("one", [override]).train
    names = key.split(".")[1:]
    assert str(reduce(getattr, names, changed)).lower() == value
    line = f"from step 3 on: {shown}; those before stay as they are\n"
    assert capsys.readouterr().out == (line if "optim" in names else "")
    prepare("one", [override])  # nothing changes any more
    assert capsys.readouterr().out == ""


def test_another_rate_from_a_checkpoint_on(capsys, tmp_path):
    """The steps since then are forgotten; they would not be what they were. That counts from the
    moment at which a version is known, though no figures of its step are."""
    run_dir = left_behind(tmp_path / "runs" / "one")
    (run_dir / "metrics.jsonl").write_text('{"step":0}\n')
    path = run_dir / "checkpoints" / "step_0"
    path.mkdir(parents=True)
    (path / "trainer.json").write_bytes(to_json(SavedStep(0, 0, "")))
    line = refusal(capsys, "one", "train.optim.lr=0.25")
    assert line.startswith("train.optim.lr = 0.25: the steps after 0, of which there is no")
    config = prepare("one", ["train.optim.lr=0.25"], from_checkpoint=True)
    assert config.train.optim.lr == 0.25
    assert capsys.readouterr().out.splitlines() == [
        f"{FROM_0} in runs/one/journal",
        "from step 1 on: train.optim.lr = 0.25; those before stay as they are",
    ]


def test_a_run_without_a_journal(capsys, tmp_path):
    shutil.rmtree(left_behind(tmp_path / "runs" / "one", "journal.enabled=false") / "journal")
    line = refusal(capsys, "one")
    assert line == "runs/one: has no journal to resume from (journal.enabled = false)"


def test_a_journal_that_a_process_still_has_open(capsys, tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one")
    with (run_dir / "journal" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = refusal(capsys, "one")
    assert (
        line == "runs/one: its coordinator is still shutting down, or hangs; try again in a moment"
    )


def test_an_address_that_another_program_has_taken(capsys, tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (run_dir / "address").write_text(address)
        line = refusal(capsys, "one")
        assert line.startswith(
            f"{address}: taken by another program now; run.bind=tcp://HOST:PORT lets"
        )
        prepare("one", ["run.bind=tcp://127.0.0.1:0"])  # it is not looked for there any more
    assert not (run_dir / "address").exists()


def test_what_may_change_is_kept_for_the_next_time(tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one")
    (run_dir / "key").unlink()
    moved = str(shutil.move(run_dir, tmp_path / "elsewhere"))
    values = (
        "train.steps=7",
        "rollout.nodes=3",
        "rollout.slots=9",
        "rollout.engine_args={t0_ms=2.0}",
    )
    config = prepare(
        moved, [*values, "checkpoint.interval=5", "node.grace_s=3", "journal.flush_ms=9"]
    )
    assert config.run_dir == tmp_path / "elsewhere"
    assert (config.train.steps, config.rollout.nodes, config.rollout.slots) == (7, 3, 9)
    for name in ("key", "join"):  # of a run that began before there were two, too
        assert (tmp_path / "elsewhere" / name).stat().st_mode & 0o777 == 0o600
    assert read_key(tmp_path / "elsewhere" / "join") == join_key(
        read_key(tmp_path / "elsewhere" / "key")
    )
    assert prepare(moved) == config
    assert {v.partition("=")[0] for v in values} <= set(MAY_CHANGE)


def test_the_readme_names_all_that_may_change():
    readme = (QUICKSTART.parents[2] / "lightrl/journal/README.md").read_text()
    told = readme.split("may change on a resume:")[1].split("Anything else")[0]
    keys = {key.removesuffix("*") for key in re.findall(r"`([^`]+)`", told)}
    assert keys - set(FIXED) == set(MAY_CHANGE)


def test_from_the_checkpoint_the_journal_is_cut_back(tmp_path, capsys):
    run_dir = left_behind(tmp_path / "runs" / "one")
    before = None
    for step in (0, 1):
        name = f"step_{step}"
        assert newest_checkpoint(run_dir) == before
        (run_dir / "checkpoints" / name).mkdir(parents=True)
        (run_dir / "checkpoints" / "latest").write_text(f"{name}\n")
        assert newest_checkpoint(run_dir) == before  # not whole
        (run_dir / "checkpoints" / name / "trainer.json").write_bytes(
            to_json(SavedStep(step, step, ""))
        )
        before = step
    assert newest_checkpoint(run_dir) == 1
    (run_dir / "checkpoints" / "latest").write_text("step_0\n")
    prepare("one", from_checkpoint=True)
    said = capsys.readouterr().out
    assert said == f"{FROM_0} in runs/one/journal and runs/one/checkpoints\n"
    assert list((run_dir / "journal").glob("*.rewound"))
    with pytest.raises(SystemExit):
        main(["replay", "one", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["steps_done"], told["version"]) == (0, None)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == [
        "latest",
        "step_0",
        "step_1.rewound",
    ]


def test_from_the_newest_checkpoint_that_is_not_damaged(tmp_path, capsys):
    run_dir = left_behind(tmp_path / "runs" / "one")
    checkpoints = run_dir / "checkpoints"
    for step in (0, 1):
        path = checkpoints / f"step_{step}"
        (path / "state").mkdir(parents=True)
        (path / "state" / "weights").write_bytes(bytes(99))
        (path / "trainer.json").write_bytes(
            to_json(with_checksums(SavedStep(step, step, ""), path))
        )
        point(checkpoints, path)
    damaged(checkpoints / "step_1" / "state" / "weights")
    prepare("one", from_checkpoint=True)
    line, end = capsys.readouterr().out.splitlines()
    assert (
        "step_1: state/weights: damaged; moved aside as step_1.damaged, going back to step_0"
        in line
    )
    assert end == f"{FROM_0} in runs/one/journal"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step_0", "step_1.damaged"]
    assert newest_checkpoint(run_dir) == 0


def damaged(file: Path) -> None:
    """One bit of it flips."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@linux_only
def test_a_run_killed_with_all_its_daemons_goes_on_where_it_was(tmp_path):
    with running(tmp_path, *ENDLESS, "checkpoint.interval=2") as process:
        until(process, " reward ")
        below = descendants(process.pid)
        victims = Victims(process)
        pids = [process.pid, *(victims.pid(name) for name in ("head", "trainer-0", "rollout-0"))]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert all_end(below)
    status = json.loads(run(tmp_path, "status", "one", "--json"))
    assert status["state"] == "interrupted"
    done = status["step"]
    assert f"{done} steps" in run(tmp_path, "replay", "one")
    with running(tmp_path, f"train.steps={done + 4}", resume=True) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    result = summary(tmp_path)
    assert (result["state"], result["steps"]) == ("finished", done + 4)
    assert result["trained_responses"] == 4 * (done + 4)  # none twice, none lost
    with running(tmp_path, resume=True) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert out.startswith("lightrl: runs/one: finished; ")

    # The last checkpoint is damaged: the steps since the one before it are trained again from the
    # journal.
    newest, done = newest_checkpoint(tmp_path / "runs" / "one"), done + 4
    assert newest == done
    checkpoints = tmp_path / "runs" / "one" / "checkpoints"
    damaged(checkpoints / f"step_{newest}" / "state" / "digest")
    with running(tmp_path, f"train.steps={done + 1}", resume=True) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    result = summary(tmp_path)
    assert (result["state"], result["steps"]) == ("finished", done + 1)
    assert result["trained_responses"] == 4 * (done + 1)
    log = (tmp_path / "runs" / "one" / "logs" / "trainer-0.log").read_text()
    assert f"moved aside as step_{newest}.damaged" in log
    assert not list(checkpoints.glob("*.damaged"))  # there is one of a later step now


@pytest.mark.e2e
@linux_only
def test_a_run_stopped_by_its_user_goes_on_and_while_it_lives_cannot_be_resumed(tmp_path):
    with running(tmp_path, *ENDLESS) as process:
        until(process, " reward ")
        with running(tmp_path, resume=True) as second:
            out, _ = second.communicate(timeout=DEADLINE_S)
        assert out == "lightrl: runs/one: this run is alive; lightrl top runs/one shows it\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert out.rstrip().endswith("; continue it with: lightrl resume runs/one")
    done = summary(tmp_path)["steps"]
    with running(tmp_path, f"train.steps={done + 2}", resume=True) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert summary(tmp_path)["steps"] == done + 2


def test_refusals_are_errors_of_lightrl():
    with pytest.raises(LightRLError, match="no run here yet"):
        prepare(None)


@pytest.mark.e2e
@linux_only
def test_a_coordinator_in_the_foreground_comes_back_to_a_node_that_kept_generating(tmp_path):
    config = ("run.name=one", *SMALL, *ENDLESS, "rollout.nodes=0", "checkpoint.interval=2")
    roles = ("--role", "coordinator,trainer", "--name", "reserved")
    up = arguments("up", str(QUICKSTART), *config, *roles)
    with subprocess.Popen(up, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            join = joining(until(process, "--join "))
            with started(tmp_path, *join, "--name", "spot") as spot:
                pids = wait_for_ready(tmp_path, "spot")
                until(process, "step 3: ")
                process.kill()
                process.wait(DEADLINE_S)
                last = int(sinks.read(tmp_path / "runs" / "one")[-1]["step"]) + 20
                again = arguments("resume", "one", f"train.steps={last}", *roles)
                done = subprocess.run(
                    again, cwd=tmp_path, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stdout + done.stderr
                assert spot.wait(DEADLINE_S) == 0
                assert spot.pid == pids["spot"]
        finally:
            process.kill()
    assert "resumed at step" in done.stdout
    result = summary(tmp_path)
    assert (result["state"], result["steps"], result["trained_responses"]) == (
        "finished",
        last,
        4 * last,
    )
