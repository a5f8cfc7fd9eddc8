"""Ranks are killed while they save, at any moment: the newest checkpoint restores, and is no older
than the last one that was promised."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from lightrl.system.child import ChildDied
from lightrl.trainer.batch import plan_micro_batches
from lightrl.trainer.checkpoint.checksums import find_corruption
from lightrl.trainer.checkpoint.on_disk import checkpoint_path, latest, newest_sound, step_of, tidy
from lightrl.trainer.protocol import (
    RANK_TARGET,
    Accumulate,
    RankStarted,
    Save,
    Saved,
    StepFinished,
    Update,
)
from tests.support.killed_rank import KILLED_TARGET

DEADLINE_S = 110

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.usefixtures("warm_ranks"),
]


async def received(rank, kind):
    """The next event of this kind."""
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance(event := await rank.receive(), kind):
            pass
    return event


async def train(ranks, samples, step):
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    batches_R = plan_micro_batches([samples], len(ranks), 60, False)
    for rank, batches in zip(ranks, batches_R, strict=True):
        rank.send(Accumulate(step, batches))
        rank.send(Update(step, len(samples), tokens, step + 1))
    for rank in ranks:
        await received(rank, StepFinished)


async def save(ranks, path):
    """Seconds until all that is to be there is there."""
    begun = time.monotonic()
    for rank in ranks:
        rank.send(Save(step_of(path), str(path), export=True))
    await received(ranks[0], Saved)
    await received(ranks[0], Saved)
    return time.monotonic() - begun


async def killed(processes, start, world, samples, folder, share):
    """One life: it restores the newest checkpoint, trains and saves a step, and another one, whose
    save is cut off after `share` of the time that the first took, or by the rank itself (None). The
    steps done that are promised, and whether a save was under way."""
    newest = latest(folder)
    step = step_of(newest) if newest is not None else 0
    target = RANK_TARGET if share is not None else KILLED_TARGET
    async with processes(start(start_step=step), world=world, target=target) as ranks:
        for rank in ranks:
            assert isinstance(await rank.receive(), RankStarted)  # it has what was saved
        await train(ranks, samples, step)
        took_s = await save(ranks, checkpoint_path(folder, step + 1))
        await train(ranks, samples, step + 1)
        path = checkpoint_path(folder, step + 2)
        for rank in ranks:
            rank.send(Save(step + 2, str(path), export=True))
        saved = asyncio.ensure_future(received(ranks[0], Saved))
        if share is None:
            with pytest.raises(ChildDied, match="killed by SIGKILL"):
                await saved
            is_promised = False
        else:
            await asyncio.wait({saved}, timeout=share * took_s)
            await asyncio.sleep(share * took_s if saved.done() else 0)  # its export
            is_promised = saved.done()
        for rank in ranks:
            rank.kill()
        saved.cancel()
        await asyncio.gather(saved, return_exceptions=True)
        for rank in ranks:
            await rank.stop()
    drafts = [*folder.glob(".step_*"), *folder.glob("step_*/.hf.draft")]
    return step + (2 if is_promised else 1), bool(drafts)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "lives", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_save_that_is_killed_leaves_the_last_whole_checkpoint(
    processes, start, samples, tmp_path: Path, lives
):
    folder = tmp_path / "run" / "checkpoints"
    draw = random.Random(5)
    for life in range(lives):
        # one save of four is cut for certain, however the time is measured
        share = draw.uniform(0, 1.1) if life % 4 != 1 else None
        promised, was_cut = asyncio.run(
            killed(processes, start, 1 + life % 2, samples, folder, share)
        )
        tidy(folder)
        lines: list[str] = []
        newest = newest_sound(folder, find_corruption, lines.append)
        assert lines == []
        assert newest is not None
        assert step_of(newest) >= promised
        assert find_corruption(newest) == ""
        assert not list(folder.rglob("*.draft"))
        if (newest / "hf").exists():
            assert {f.name for f in (newest / "hf").iterdir()} >= {
                "config.json",
                "model.safetensors",
            }
        assert was_cut or share is not None
