"""Engines of several sizes over the same devices, as real daemons: those of one size are awake, and
which it is follows the KV cache from round to round. It changes times alone."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightrl.core.state import NodeState
from lightrl.devices.sizes import sized_engines
from tests.daemon.test_runs import children_of
from tests.support.daemons import Running, a_run

pytestmark = pytest.mark.usefixtures("warm_daemons")

NUM_STEPS = 8
# Small engines do more of the short responses, which fit; large ones hold the long ones, too.
ENGINE = {
    **{"t0_ms": 4.0, "half_batch": 8.0, "faster": 1.2, "prefill_ms": 0.2},
    **{"kv_tokens": 150.0, "weights_kv_tokens": 900.0},
    **{"mean_length": 4.0, "runaway_share": 0.35},
}
RESULT = ("steps", "weights_digest", "responses_digest", "trained_responses")


def changes(parallel: list[int], **engine_args: float) -> dict[str, Any]:
    rollout = {"nodes": 2, "slots": 16, "engine_args": ENGINE | engine_args}
    return {
        "rollout": rollout | ({"parallel": parallel} if parallel else {}),
        "train": {"steps": NUM_STEPS, "prompts_per_step": 4},
        "round": {"tail_batching": "both", "eta": 1.5},
    }


async def start_engines(run: Running) -> list[str]:
    """Of all sizes, or those of one size; their names."""
    engines = sized_engines(run.config)
    for engine in engines:
        await run.add_rollout(engine.name, None, "--parallel", str(engine.size))
    for k in range(0 if engines else run.config.rollout.nodes):
        await run.add_rollout(f"rollout-{k}")
    return [engine.name for engine in engines]


def put_an_end_to_one_that_sleeps(run: Running, ended: list[int]) -> None:
    """The large one, when it has been up."""
    node = run.head._core.fleet.nodes.get("rollout-0-tp2")
    if not ended and node is not None and node.order >= 2 and node.state is NodeState.RELEASED:
        for engine in children_of(run.processes["rollout-0-tp2"].pid):
            os.kill(engine, signal.SIGKILL)
            ended.append(engine)


def played(tmp_path: Path, parallel: list[int]) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The summary of a whole run and its records of steps. With several sizes one engine that
    sleeps is killed."""
    ended: list[int] = []

    async def scenario() -> Path:
        async with a_run(tmp_path, **changes(parallel)) as run:
            if parallel:
                run.head.looks.append(lambda: put_an_end_to_one_that_sleeps(run, ended))
            await start_engines(run)
            await run.until_finished()
            assert len(ended) == bool(parallel)
            return run.config.run_dir

    tmp_path.mkdir()
    run_dir = asyncio.run(scenario())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if "reward/mean" in (record := json.loads(line))]
    return json.loads((run_dir / "summary.json").read_text()), steps


def test_sizes_follow_the_kv_cache_from_round_to_round_and_change_times_alone(tmp_path: Path):
    ours, steps = played(tmp_path / "sizes", [1, 2])
    fixed, alone = played(tmp_path / "one", [])
    assert {key: ours[key] for key in RESULT} == {key: fixed[key] for key in RESULT}
    assert len(steps) == NUM_STEPS
    assert {s["planner/parallel"] for s in steps} == {1.0, 2.0}
    assert sum(s["round/is_long"] for s in steps) > 0
    assert not any("planner/parallel" in s for s in alone)
