"""Real rollout daemons when the trainer has trained a version again, with other bytes."""

import asyncio
from pathlib import Path

import pytest

from lightrl.core.log_entries import VersionRetrained
from lightrl.core.state import RunState
from lightrl.journal.disk import FOLDER, segments
from lightrl.journal.read import LOG, read_segment
from tests.daemon.test_runs import busy
from tests.support.daemons import Running, a_run

pytestmark = pytest.mark.usefixtures("warm_daemons")

# Steps of 2.4 s: long enough for things to happen in the middle.
SLOW = {
    "rollout": {"engine_args": {"t0_ms": 10.0, "mean_length": 0.0}, "max_response_length": 240},
    "train": {"steps": 3, "prompts_per_step": 4},
    "journal": {"keep_history": True},
}


def lines(run: Running) -> list[str]:
    return [text for _, text in run.head._records._events]


async def disturbed(run: Running) -> None:
    """While two nodes sample with version 2, the trainer is lost; the next begins at step 1."""
    for name in "ab":
        await run.add_rollout(name)
    await run.until(lambda s: s.step == 2 and busy(s, "a", "b"))
    await run.replace_trainer(begins_at=1, rounds_otherwise=True)


def test_nodes_load_it_and_keep_the_tokens_that_they_have(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            await disturbed(run)
            await run.until_finished()
            assert run.head.succeeded
            core = run.head._core
            assert core.fleet.digests[2] == tuple(
                dict.fromkeys([core.fleet.digests[2][0], run.trainer.files[1].digest])
            )
            assert len(core.fleet.digests[2]) == 2
            assert core.table.counters.bad_chunks == 0
            assert core.fleet.num_weights_failed == 0
            assert core.table.counters.nodes_lost <= 1  # the trainer, if it was missed in time
            [line] = [t for t in lines(run) if "came out different" in t and "load it" in t]
            assert "there is no canary to compare" in line

    asyncio.run(scenario())
    entries = [
        entry
        for segment in segments(tmp_path / "test" / FOLDER)
        for entry in read_segment(segment.path, LOG)
        if isinstance(entry, VersionRetrained)
    ]
    assert [entry.version for entry in entries] == [2]


@pytest.mark.e2e
def test_a_deterministic_run_fails_with_one_line(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW, run={"deterministic": True}) as run:
            await disturbed(run)
            await run.until_finished()
            assert run.head._core.state is RunState.FAILED
            [line] = [text for text in lines(run) if text.startswith("run failed")]
            assert "version 2 was trained again and came out different (digest " in line

    asyncio.run(scenario())
