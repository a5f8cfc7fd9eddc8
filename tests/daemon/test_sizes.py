"""Engines of several sizes over the same devices, as real daemons: those of one size are awake, and
which it is follows from round to round. It changes times alone."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightrl.core.sharing.planner import PlannedRound, Planner
from lightrl.core.state import NodeState
from lightrl.devices.sizes import sized_engines
from tests.daemon.test_runs import children_of
from tests.support.daemons import Running, a_run

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("warm_daemons")]

SIZES = [1, 2]
# Small caches: what runs to the limit is preempted.
ENGINE = {
    **{"t0_ms": 4.0, "half_batch": 8.0, "faster": 1.2, "prefill_ms": 0.2},
    **{"kv_tokens": 100.0, "weights_kv_tokens": 900.0},
    **{"mean_length": 4.0, "runaway_share": 0.35},
}
RESULT = ("steps", "weights_digest", "responses_digest", "trained_responses")


class InTurn(Planner):
    """Another size for each round, whatever it takes."""

    num_rounds = 0

    def learn(self, round: PlannedRound) -> None:
        self.num_rounds += 1

    def size_for(self, kind: str, expected_s: Mapping[int, float]) -> int:
        return SIZES[self.num_rounds % 2]


class Seen:
    """What was preempted by engines of each size; the engine that was killed asleep."""

    def __init__(self, run: Running) -> None:
        self.preempted: dict[int, int] = {}
        self.killed: list[int] = []
        self._run = run
        run.head.looks.append(self._look)

    def _look(self) -> None:
        for node in self._run.head._core.fleet.devices.parallel.values():
            before = self.preempted.get(node.parallel, 0)
            self.preempted[node.parallel] = max(before, node.load.num_preemptions)
            is_asleep = node.order >= 2 and node.state is NodeState.RELEASED
            if not self.killed and is_asleep and node.parallel == 2:
                for engine in children_of(self._run.processes[node.name].pid):
                    os.kill(engine, signal.SIGKILL)
                    self.killed.append(engine)


def changes(parallel: list[int], num_steps: int, **engine_args: float) -> dict[str, Any]:
    rollout = {"nodes": 2, "slots": 16, "engine_args": ENGINE | engine_args}
    return {
        "rollout": rollout | ({"parallel": parallel} if parallel else {}),
        "train": {"steps": num_steps, "prompts_per_step": 4},
        "round": {"tail_batching": "both", "eta": 1.5, "deferred": "restart"},
    }


async def start_engines(run: Running) -> None:
    """Of all sizes, or those of one size."""
    engines = sized_engines(run.config)
    for engine in engines:
        await run.add_rollout(engine.name, None, "--parallel", str(engine.size))
    for k in range(0 if engines else run.config.rollout.nodes):
        await run.add_rollout(f"rollout-{k}")


def result(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The summary of a whole run and its records of steps."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if "reward/mean" in (record := json.loads(line))]
    return json.loads((run_dir / "summary.json").read_text()), steps


def played(tmp_path: Path, parallel: list[int], num_steps: int) -> tuple[Path, Seen]:
    """A whole run; with several sizes each round has another one than the round before."""

    async def scenario() -> tuple[Path, Seen]:
        async with a_run(tmp_path, **changes(parallel, num_steps)) as run:
            sizes, seen = run.head._core.sizes, Seen(run)
            if parallel:
                sizes.planner = InTurn(SIZES)
            await start_engines(run)
            await run.until_finished()
            return run.config.run_dir, seen

    tmp_path.mkdir()
    return asyncio.run(scenario())


def test_sizes_take_turns_from_round_to_round_and_that_changes_times_alone(tmp_path: Path):
    run_dir, seen = played(tmp_path / "sizes", SIZES, 6)
    ours, steps = result(run_dir)
    fixed, alone = result(played(tmp_path / "one", [], 6)[0])
    assert {key: ours[key] for key in RESULT} == {key: fixed[key] for key in RESULT}
    assert [s["planner/parallel"] for s in steps] == [1, 2, 1, 2, 1, 2]
    assert [s["planner/next_parallel"] for s in steps] == [2, 1, 2, 1, 2, 2]
    assert not any("planner/parallel" in s for s in alone)
    assert len(seen.killed) == 1
    assert seen.preempted[1] > 0


def test_the_planner_goes_where_rounds_take_less(tmp_path: Path):
    """Twice the devices are three times as fast here."""

    async def scenario() -> Path:
        async with a_run(tmp_path, **changes(SIZES, 5, faster=3.0)) as run:
            await start_engines(run)
            await run.until_finished()
            return run.config.run_dir

    _, steps = result(asyncio.run(scenario()))
    assert steps[-1]["planner/parallel"] == 2
