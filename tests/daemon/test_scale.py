"""A run that asks for preemptible nodes and counts its costs: real daemons, a real command."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lightrl.messages.snapshot import Snapshot
from lightrl.metrics.sinks import read
from tests.support.daemons import a_run

pytestmark = pytest.mark.usefixtures("warm_daemons")

PRICES = {"reserved_per_hour": 36.0, "preemptible_per_hour": 0.0}  # wanted: as many as there may be


def scaling(tmp_path: Path, *lines: str) -> dict[str, Any]:
    script = tmp_path / "scale"
    script.write_text("\n".join(("#!/bin/sh", *lines, "")))
    script.chmod(0o755)
    return {"max": 1, "command": str(script), "every_s": 0.1}


def events(snapshot: Snapshot, text: str) -> list[str]:
    return [line for _, line in snapshot.events if text in line]


def test_a_run_calls_its_command_and_says_what_it_has_cost(tmp_path: Path):
    said = tmp_path / "said"
    scale = scaling(tmp_path, f"echo $1 $LIGHTRL_WANTED >> {said}")

    async def scenario() -> Snapshot:
        async with a_run(tmp_path, prices=PRICES, scale=scale, train={"steps": 4}) as run:
            await run.add_rollout("a")
            snapshot = await run.until(lambda s: s.cost is not None and s.cost.wanted is not None)
            await run.until_finished()
            return snapshot

    snapshot = asyncio.run(scenario())
    assert snapshot.cost is not None
    assert snapshot.cost.wanted in {0, 1}
    first, *_ = said.read_text().splitlines()  # later steps may want another number
    assert first.split() == [str(snapshot.cost.wanted)] * 2
    assert [row.preemptible for row in snapshot.cost.forecast] == [0, 1, 2]
    run_dir = next(tmp_path.rglob("summary.json")).parent
    summary = json.loads((run_dir / "summary.json").read_text())
    # two nodes at a cent a second, for no longer than the run took
    assert 0 < summary["cost"]["usd"] < 0.02 * summary["total_wall_s"] * 1.01
    records = [r for r in read(run_dir) if "cost/usd" in r]
    assert len(records) == 4
    costs = [r["cost/usd"] for r in records]
    assert costs == sorted(costs)
    assert costs[-1] <= summary["cost"]["usd"] + 1e-6
    assert records[-1]["cost/usd_per_step"] == pytest.approx(costs[-1] / 4)


@pytest.mark.e2e
def test_a_command_that_fails_costs_the_run_one_line(tmp_path: Path):
    scale = scaling(tmp_path, "echo no such queue; exit 7")

    async def scenario() -> None:
        async with a_run(tmp_path, prices=PRICES, scale=scale, train={"steps": 12}) as run:
            await run.add_rollout("a")
            warned = "failed (status 7): no such queue"
            snapshot = await run.until(lambda s: bool(events(s, warned)))
            assert len(events(snapshot, "scale.command")) == 1
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())
