"""Whole runs of real parts whose versions are broadcast, each daemon as if on a machine of its own:
whoever dies, stops, leaves or comes while a version is sent, the result is that of a run on one
machine in which all weights are pulled."""

import functools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightrl.metrics import sinks
from tests.support.cli import DEADLINE_S, running, summary
from tests.support.lines import why_not
from tests.support.machines import Machines, Snapshot, machines

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("warm_runs"),
]

STEPS = 6
VERSION_BYTES = 2_110_976
FAST = 50e6  # bytes/s of each line
SLOW = 1e6  # of the trainer's, while something happens: two nodes are sent a version in 4 s
LIMIT_S = 60.0  # until the others go on, whatever has happened
TIMEOUT_S = 8
RUN = (
    "rollout.group_size=4",
    "rollout.max_response_length=48",
    "train.prompts_per_step=4",
    f"train.steps={STEPS}",
    "run.deterministic=true",
    f"weights.timeout_s={TIMEOUT_S}",
)
APART = (
    *RUN,
    "rollout.engine=torch",
    "rollout.nodes=0",
    "eval.path=",
    "node.heartbeat_s=0.2",
    "node.lease_s=5",
    "node.patience_s=15",
    "node.grace_s=10",
)
# what would differ if one response or one weight did
RESULT = ("steps", "weights_digest", "responses_digest", "trained_responses")


@pytest.fixture(scope="session")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """The result with so many training ranks where nothing is broadcast and nobody disturbs."""

    @functools.cache
    def result(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("pulled")
        return on_one_machine(folder, "weights.broadcast=off", f"train.ranks={ranks}")

    return result


def on_one_machine(folder: Path, *overrides: str) -> dict[str, Any]:
    with running(folder, *RUN, "rollout.nodes=2", *overrides) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return {key: summary(folder)[key] for key in RESULT}


@contextmanager
def a_run(folder: Path, *overrides: str, num: int = 3) -> Iterator[Machines]:
    """Coordinator and trainer on the machine 0, and the nodes a and b, which are ready."""
    with machines(folder, num, FAST, *APART, *overrides) as run:
        run.begin("a", "b")
        yield run


def node(s: Snapshot, name: str) -> dict[str, Any]:
    return next((n for n in s["nodes"] if n["name"] == name), {"state": "gone"})


def receive(s: Snapshot, *names: str) -> bool:
    """All of them are sent a version that is not the first one."""
    return s["step"] >= 1 and all(
        node(s, name)["state"] == "updating" and node(s, name)["weights"] is None for name in names
    )


def goes_on(s: Snapshot) -> bool:
    """A new coordinator may be done before it is asked for the first time."""
    is_served = s["state"] == "running" and node(s, "b")["state"] == "ready"
    return is_served or s["state"] == "finished"


def until_half_has_come(run: Machines) -> None:
    """To a, while b receives, too; the first versions have come to both."""
    run.until(lambda s: s["step"] >= 1, "a step is done")
    run.star.set_rate(0, SLOW, FAST)
    run.until(lambda s: receive(s, "a", "b"), "a and b receive")
    run.until_half(1, VERSION_BYTES)


def broadcast_to(run: Machines) -> list[int]:
    """How many nodes were sent a version, for each step."""
    return [int(r.get("weights/broadcast_nodes", 0)) for r in sinks.read(run.run_dir)]


def result_of(run: Machines) -> dict[str, Any]:
    told = run.finish()
    return {key: told[key] for key in RESULT}


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_versions_but_the_first_come_by_broadcast(pulled, tmp_path: Path, ranks: int):
    with a_run(tmp_path, f"train.ranks={ranks}") as run:
        assert result_of(run) == pulled(ranks)
        assert sum(broadcast_to(run)) >= 2 * (STEPS - 1)
        assert "is over" not in run.log("head")


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_engines_beside_their_trainer_are_sent_versions_where_that_is_asked_for(
    pulled, tmp_path: Path, ranks: int
):
    always = ("weights.broadcast=always", f"train.ranks={ranks}")
    assert on_one_machine(tmp_path, *always) == pulled(ranks)
    assert summary(tmp_path)["weights"]["broadcast_nodes"] >= STEPS - 1


@pytest.mark.e2e
def test_who_comes_while_a_version_is_sent_pulls_it_and_is_sent_the_next_ones(tmp_path: Path):
    with a_run(tmp_path, "train.steps=1000", num=5) as run:
        run.until(lambda s: s["step"] >= 1, "a step is done")
        run.start_node("c", 3)
        run.start_node("spot", 4, "--preemptible")
        run.until(lambda s: node(s, "spot")["state"] == "ready", "spot is ready")
        run.until(lambda s: s["metrics"].get("weights/broadcast_nodes") == 3, "c is a member")
        at = run.until(lambda s: True, "now")["step"]
        run.until(lambda s: s["step"] > at + 2, "three more steps are done")
        steps = sinks.read(run.run_dir)[at:]
        # whoever is late is counted with the next step
        assert sum(broadcast_to(run)[at:]) <= 3 * len(steps) + 1
        assert max(r["weights/pull_s"] for r in steps) > 0  # by spot
        assert "is over" not in run.log("head")


def engine_killed(run: Machines) -> None:
    os.kill(run.child("a"), signal.SIGKILL)


def engine_stopped(run: Machines) -> None:
    os.kill(run.child("a"), signal.SIGSTOP)


def daemon_killed(run: Machines) -> None:
    run.processes["a"].kill()


def daemon_stopped(run: Machines) -> None:
    os.kill(run.processes["a"].pid, signal.SIGSTOP)


def line_cut(run: Machines) -> None:
    run.star.cut(1)


def drained(run: Machines) -> None:
    run.processes["a"].terminate()
    assert run.processes["a"].wait(DEADLINE_S) == 0


def rank_killed(run: Machines) -> None:
    os.kill(run.child("trainer"), signal.SIGKILL)


def rank_stopped(run: Machines) -> None:
    os.kill(run.child("trainer"), signal.SIGSTOP)


def trainer_killed(run: Machines) -> None:
    run.processes["trainer"].kill()
    run.processes["trainer"].wait()
    run.start_trainer()


def coordinator_killed(run: Machines) -> None:
    run.processes["head"].kill()
    run.processes["head"].wait()
    run.resume_coordinator()


FAULTS = (
    daemon_killed,
    *(
        pytest.param(fault, marks=pytest.mark.e2e)
        for fault in (engine_killed, drained, coordinator_killed, trainer_killed)
    ),
    *(
        pytest.param(fault, marks=pytest.mark.slow)
        for fault in (engine_stopped, daemon_stopped, line_cut, rank_killed, rank_stopped)
    ),
)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_while_a_version_is_sent_the_others_go_on(
    pulled, tmp_path: Path, fault: Callable[[Machines], None]
):
    with a_run(tmp_path) as run:
        until_half_has_come(run)
        disturbed_at = time.monotonic()
        fault(run)
        run.star.set_rate(0, FAST, FAST)
        run.until(goes_on, "b goes on")
        assert time.monotonic() - disturbed_at < LIMIT_S
        assert result_of(run) == pulled(1)


@pytest.mark.slow  # and a matter of time: two runs on slow lines
def test_a_version_is_served_no_later_by_broadcast_than_by_pull(tmp_path: Path):
    """By the second machine, on equal lines; from when a step is trained."""
    seconds: dict[str, float] = {}
    for mode in ("off", "auto"):
        (folder := tmp_path / mode).mkdir()
        with machines(folder, 2, SLOW, *APART, f"weights.broadcast={mode}", "train.steps=6") as run:
            run.begin("a")
            run.finish()
            steps = [r for r in sinks.read(run.run_dir) if "reward/mean" in r]
            # the first version forms the group, the last one is for nobody
            seconds[mode] = statistics.median(r["timing_s/weights"] for r in steps[1:-1])
            assert (sum(broadcast_to(run)) >= 5) == (mode == "auto")
    assert seconds["auto"] < 1.05 * seconds["off"]
