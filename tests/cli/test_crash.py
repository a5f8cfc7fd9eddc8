"""Daemons killed without a warning under `lightrl up`: they come back, and the run finishes."""

import contextlib
import os
import re
import resource
import signal
from collections.abc import Iterator

import pytest

from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    Victims,
    linux_only,
    run,
    running,
    step,
    summary,
    until,
    wait_for_step,
)
from tests.support.paths import python_path

pytestmark = [linux_only, pytest.mark.usefixtures("warm_runs")]
ENDLESS = ("train.steps=100000", *EMULATED)
# What the machine does to a daemon of that name as soon as it starts: as if its memory never
# sufficed.
NO_LUCK = """
import os, sys
if "rollout-0" in sys.orig_argv:
    os.kill(os.getpid(), 9)
"""


def test_whoever_is_killed_comes_back_and_the_run_goes_on(tmp_path):
    with running(tmp_path, *ENDLESS, "checkpoint.interval=2") as process:
        until(process, " reward ")
        for name in ("rollout-0", "trainer-0", "head"):
            Victims(process).kill(name)
            until(
                process,
                f"{name} was killed by SIGKILL (log: runs/one/logs/{name}.log); starting it again",
            )
            wait_for_step(tmp_path, step(tmp_path) + 3)
        run(tmp_path, "down")
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert "stopped at step" in out
    result = summary(tmp_path)
    assert result["trained_responses"] == 4 * result["steps"]  # none twice, none lost


@pytest.mark.e2e
def test_a_run_whose_daemons_are_all_killed_at_once_finishes(tmp_path):
    slowly = "rollout.engine_args={train_step_ms=200}"  # it must not be over before all are killed
    with running(tmp_path, "train.steps=12", *EMULATED, slowly, "checkpoint.interval=2") as process:
        until(process, " reward ")
        for name in ("head", "trainer-0", "rollout-0"):
            Victims(process).kill(name)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert out.count("was killed by SIGKILL") == 3
    result = summary(tmp_path)
    assert (result["state"], result["steps"], result["trained_responses"]) == ("finished", 12, 48)


@pytest.mark.e2e
def test_a_daemon_that_never_lives_is_given_up_after_five_more_attempts(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_LUCK)
    with running(tmp_path, *ENDLESS, PYTHONPATH=python_path(tmp_path)) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert (
        out.count(
            "rollout-0 was killed by SIGKILL (log: runs/one/logs/rollout-0.log); starting it again"
        )
        == 5
    )
    last = out.splitlines()[-1]
    assert last.startswith("lightrl: rollout-0 was killed by SIGKILL")
    assert last.endswith("6 times without a step done")


@pytest.mark.e2e
def test_a_daemon_that_gives_a_reason_is_not_started_again(tmp_path):
    with running(tmp_path, *ENDLESS, "rollout.engine_args={no_such=1}") as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "starting it again" not in out
    # The engine and the rank refuse it, whoever is first.
    ended = r"lightrl: (rollout|trainer)-0 failed: "
    reason = ended + r".*engine_args\.no_such = 1: known are "
    assert re.match(reason, out.splitlines()[-1])


@pytest.mark.e2e
def test_a_coordinator_that_keeps_no_journal_is_not_started_again(tmp_path):
    # Nobody is left to whom the others could send what they still hold.
    with running(tmp_path, *ENDLESS, "journal.enabled=false", "node.grace_s=1") as process:
        until(process, " reward ")
        Victims(process).kill("head")
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "starting it again" not in out
    assert out.splitlines()[-1].startswith("lightrl: head was killed by SIGKILL")


@contextlib.contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """That process cannot open another one."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest = min(set(range(len(used) + 1)) - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.e2e
def test_a_daemon_that_lacks_descriptors_is_started_when_there_are_some_again(tmp_path):
    lacking = "rollout-0 cannot be started: Too many open files; trying again"
    with running(tmp_path, *ENDLESS) as process:
        until(process, " reward ")
        with without_descriptors(process.pid):
            killed = Victims(process).kill("rollout-0")
            until(process, lacking)
        killed = Victims(process).pid("rollout-0", besides=killed)
        wait_for_step(tmp_path, step(tmp_path) + 3)
        with without_descriptors(process.pid):
            os.kill(killed, signal.SIGKILL)
            until(process, lacking)
            process.send_signal(signal.SIGINT)  # who waits for a descriptor can be stopped
            until(process, "stopping")
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "Traceback" not in out
    assert "stopped at step" in out
