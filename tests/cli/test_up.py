"""`lightrl up` with real daemons: to the end, interrupted, its parent killed, with input that one
refuses."""

import os
import pty
import signal
import subprocess

import pytest

from lightrl.config.run_file import load_config
from lightrl.keys import ENVIRONMENT_FILE, JOIN_FILE, KEY_FILE, write_keys
from lightrl.launch.folder import create_run_dir
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    SMALL,
    all_end,
    arguments,
    descendants,
    joining,
    linux_only,
    read_until,
    run,
    running,
    started,
    until,
)

pytestmark = pytest.mark.usefixtures("warm_runs")


@pytest.mark.parametrize(
    ("role", "file", "other"),
    [
        ("rollout", JOIN_FILE, KEY_FILE),
        ("environment", ENVIRONMENT_FILE, KEY_FILE),
        pytest.param("trainer", KEY_FILE, JOIN_FILE, marks=pytest.mark.e2e),
    ],
)
def test_a_daemon_reads_the_key_that_it_needs_and_no_other(tmp_path, role, file, other):
    run_dir = create_run_dir(load_config(QUICKSTART, [f"run.dir={tmp_path}", "run.name=one"]))
    for name in (KEY_FILE, JOIN_FILE, ENVIRONMENT_FILE):
        (run_dir / name).unlink(missing_ok=True)
    write_keys(run_dir)

    def last_words() -> str:
        command = ("daemon", "--name", "n", "--role", role, "--run-dir", str(run_dir))
        nowhere = ("--join", "tcp://127.0.0.1:1")
        said = subprocess.run(
            arguments(*command, *nowhere), capture_output=True, text=True, timeout=DEADLINE_S
        )
        return said.stdout

    (run_dir / other).unlink()
    assert "no answer; is the coordinator running?" in last_words()
    (run_dir / file).unlink()
    assert f"{run_dir / file}: cannot read the key" in last_words()


@linux_only
def test_an_interrupted_run_stops_its_daemons_and_says_so(tmp_path):
    with running(tmp_path, "train.steps=100000", *EMULATED) as process:
        until(process, " reward ")
        below = descendants(process.pid)
        assert len(below) >= 6  # three daemons, an engine, a training rank, a reward worker
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert "stopping ..." in out
        assert "stopped at step" in out
        assert "(interrupted); the run is in " in out
        assert "Traceback" not in out
        assert all_end(below)


@pytest.mark.e2e
def test_a_run_stopped_by_an_operator_is_over_for_all_who_look(tmp_path):
    with running(tmp_path, "train.steps=100000", *EMULATED) as process:
        until(process, " reward ")
        ours, theirs = pty.openpty()
        with started(tmp_path, "top", "one", terminal=theirs) as top:
            said = read_until(ours, b"running")
            assert run(tmp_path, "down", "one").startswith("the run is stopping")
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1, out
            run_dir = tmp_path / "runs" / "one"
            last = out.splitlines()[-1]
            assert last.startswith("stopped at step ")
            how = "continue it with: lightrl resume runs/one"
            assert f" of 100000 (lightrl down); the run is in {run_dir}; {how}" in last
            assert "lightrl: " not in out
            said += read_until(ours, b"the run is over; press q to quit")
            assert b"trying again" not in said
            os.write(ours, b"q")
            assert top.wait(DEADLINE_S) == 0
        os.close(ours)
        os.close(theirs)
    assert "one · stopped" in run(tmp_path, "status", "one")


def test_a_run_of_joined_nodes_only(tmp_path):
    with running(tmp_path, "train.steps=2", *EMULATED, "rollout.nodes=0") as process:
        *said, why = until(process, "other machines cannot join")
        assert 'run.bind is loopback; set run.bind = "tcp://0.0.0.0:*"' in why
        with started(tmp_path, *joining(said)) as far:
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert far.wait(DEADLINE_S) == 0
    assert process.returncode == 0, out
    assert "finished 2 steps" in out


@pytest.mark.e2e
@linux_only
def test_daemons_leave_when_the_process_that_started_them_is_killed(tmp_path):
    with running(tmp_path, "train.steps=100000", *EMULATED) as process:
        until(process, " reward ")
        below = descendants(process.pid)
        process.kill()
        assert all_end(below)


def test_malformed_data_is_one_line_and_leaves_no_run_behind(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "11%8=", "answer": "03"}\n{"prompt": \n')
    with running(tmp_path, "data.path=bad.jsonl") as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    first, line = out.splitlines()
    assert first.startswith("run one in ")
    assert line.startswith("lightrl: ")
    assert "bad.jsonl, line 2: not valid JSON" in line
    assert not (tmp_path / "runs" / "one").exists()


def test_a_daemon_in_the_foreground_leaves_nothing_behind_if_it_refuses_its_input(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": \n')
    (tmp_path / "runs" / "before").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("before")
    command = arguments(
        "up", str(QUICKSTART), "data.path=bad.jsonl", "--role", "coordinator,trainer"
    )
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "bad.jsonl, line 1: not valid JSON" in line
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["before", "latest"]
    assert (tmp_path / "runs" / "latest").resolve().name == "before"


@pytest.mark.e2e
def test_a_coordinator_in_the_foreground_says_how_to_join_it(tmp_path):
    command = arguments("up", str(QUICKSTART), *SMALL, "run.name=one", "--role", "coordinator")
    run_dir = tmp_path / "runs" / "one"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = joining(until(process, "--join "))
            address = (run_dir / "address").read_text().strip()
            assert said == ["up", "--join", address, "--key", "runs/one/join"]
            for name in ("key", "join"):
                assert (run_dir / name).stat().st_mode & 0o777 == 0o600
            assert run(tmp_path, "status", "one")
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 1
        finally:
            process.kill()
    assert (tmp_path / "runs" / "latest").resolve() == run_dir
