"""Whole runs as processes whose trainer has two replicas: half of the devices change sides within
each step, and nothing else changes."""

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lightrl.client.address import listening
from lightrl.client.find_run import ask
from lightrl.keys import KEY_FILE, read_key
from lightrl.messages.snapshot import Snapshot
from lightrl.metrics.sinks import read
from tests.daemon.test_runs import children_of
from tests.support.cli import QUICKSTART, linux_only, piped

LIMIT_S = 100.0  # far more than a run takes
STEPS = 3
EMULATED = (
    "rollout.engine=emulated",
    "train.engine=emulated",
    "rollout.engine_args={t0_ms=10.0,mean_length=40.0,sleep_ms=10.0,wake_ms=10.0}",
)
TORCH = ("rollout.engine=torch", "train.max_tokens_per_gpu=1024")
# By a rule that lets half of them go in each round, whether that pays or not.
RULE = "offload.rule=window"
SHARED = ("rollout.placement=shared", "train.ranks=2", "train.replicas=2", RULE)


def run(folder: Path, *overrides: str, hit: Any = None) -> Path:
    """The directory of a run that has finished. `hit` is awaited beside it, with its process."""
    first = ("up", str(QUICKSTART), "run.name=one", "run.bind=tcp://127.0.0.1:*", "--no-tui")
    small = (
        *("rollout.nodes=2", "rollout.slots=64", "rollout.group_size=4"),
        *("train.prompts_per_step=8", f"train.steps={STEPS}", "eval.path=", "node.grace_s=10"),
        *("checkpoint.export=last", "rollout.max_response_length=100"),
    )
    folder.mkdir()
    with piped(folder, *first, *small, *overrides) as process:
        if hit is not None:
            asyncio.run(asyncio.wait_for(hit(process, folder / "runs" / "one"), LIMIT_S))
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out
        assert f"finished {STEPS} steps" in out
    return folder / "runs" / "one"


async def until(run_dir: Path, holds: Any) -> Snapshot:
    """What is seen by who asks, as soon as it is so."""
    while True:
        address = listening(run_dir)
        if address is not None:
            snapshot = await ask(address, read_key(run_dir / KEY_FILE))
            if holds(snapshot):
                return snapshot
        await asyncio.sleep(0.02)


def half_trains(snapshot: Snapshot) -> bool:
    states = {n.part: n.state for n in snapshot.nodes if n.shares}
    return snapshot.step > 0 and sorted(states.values()) == ["ready", "released"]


def require_halves(run_dir: Path) -> None:
    """In each step one half has trained for much of the time in which the other one sampled."""
    for metrics in read(run_dir):
        trained = sorted(metrics[f"device_s/rollout-{k}/train"] for k in range(2))
        sampled = sorted(metrics[f"device_s/rollout-{k}/rollout"] for k in range(2))
        assert trained[0] + 0.3 * sampled[1] < trained[1], metrics
        assert metrics["offload/switches"] == 4
        assert metrics["offload/window_s"] < sampled[1]


@pytest.mark.e2e
@linux_only
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_half_of_the_devices_change_sides_within_each_step(tmp_path: Path, nodes: int):
    """Of one trainer node, or of two, each with a replica."""
    ranks = (f"train.nodes={nodes}", f"train.ranks={2 // nodes}")
    require_halves(run(tmp_path / "parts", *EMULATED, *SHARED, *ranks))


@linux_only
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_half_trains_costs_no_group(tmp_path: Path, rank: int):
    """Whether it is one of those that train. Engines stand still until the trainer has seen it."""

    async def hit(process: subprocess.Popen[str], run_dir: Path) -> None:
        engines: list[int] = []
        while True:
            await until(run_dir, half_trains)
            engines = pids_of(process, "emulated-engine")
            signal_all(engines, signal.SIGSTOP)
            if half_trains(await until(run_dir, lambda _: True)):
                break
            signal_all(engines, signal.SIGCONT)
        signal_all(pids_of(process, f"lightrl-rank-{rank}"), signal.SIGKILL)
        await until(run_dir, lambda _: WAITS in (run_dir / "logs" / "trainer-0.log").read_text())
        signal_all(engines, signal.SIGCONT)

    run_dir = run(tmp_path / "parts", *EMULATED, *SHARED, hit=hit)
    assert [m["step"] for m in read(run_dir)] == [1, 2, 3]
    assert {m["round/groups_trained"] for m in read(run_dir)} == {8.0}
    said = (run_dir / "logs" / "trainer-0.log").read_text()
    assert said.count(WAITS) == said.count("starting again from step") == 1


WAITS = "they start when their devices are given back"


def pids_of(process: subprocess.Popen[str], name: str) -> list[int]:
    """Of all processes of a run with this name."""
    found: list[int] = []
    todo = [process.pid]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(FileNotFoundError):
            todo += children_of(pid)
            if f"{name}\0" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.slow
@linux_only
def test_real_ranks_come_out_as_with_devices_of_their_own(tmp_path: Path):
    """Up to rounding: which groups a replica gets follows from who had devices. A rank is killed
    while half trains."""

    async def hit(process: subprocess.Popen[str], run_dir: Path) -> None:
        await until(run_dir, half_trains)
        signal_all(pids_of(process, "lightrl-rank-1"), signal.SIGKILL)

    own = run(tmp_path / "own", *TORCH)
    parts = run(tmp_path / "parts", *TORCH, *SHARED, hit=hit)
    weights, expected = (load_file(exported(path)) for path in (parts, own))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert (weights[name] - value).abs().max() <= 1e-5, name


@pytest.mark.slow
@linux_only
def test_where_sums_have_one_order_devices_change_sides_as_a_whole_and_bits_are_the_same(
    tmp_path: Path,
):
    fixed = ("run.deterministic=true", "train.ranks=2", "train.replicas=2")
    own = run(tmp_path / "own", *TORCH, *fixed)
    parts = run(tmp_path / "parts", *TORCH, *fixed, "rollout.placement=shared")
    assert exported(own).read_bytes() == exported(parts).read_bytes()
    for metrics in read(parts):
        assert metrics["offload/window_s"] >= metrics["device_s/rollout-0/rollout"]


def exported(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{STEPS}" / "hf" / "model.safetensors"
