"""Ranks that take long, and what is made of several that fail at once."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightrl.errors import TrainerError
from lightrl.trainer import rank_processes
from lightrl.trainer.nodes.followers import RanksLost
from lightrl.trainer.process_group import join
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    RankFailed,
    StartRank,
    StepFinished,
    StillAlive,
    Update,
)
from lightrl.trainer.rank_processes import PATIENCE_FACTOR, Place, Ranks, worst
from tests.support.paths import python_path
from tests.support.slow_rank import EVERY_S, LATE_S, SIGNS, SLOW_TARGET
from tests.trainer.conftest import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 0.5  # less than it takes to start, a third of what a step takes


async def one_step(config, folder):
    (folder / "logs").mkdir()
    ranks = Ranks(config, Place(folder, folder), lambda _: None)
    watch = None
    try:
        await ranks.start(0)
        watch = asyncio.ensure_future(ranks.watch())
        work = asyncio.ensure_future(finished(ranks))
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        return await (work if work.done() else watch)
    finally:
        if watch is not None:
            watch.cancel()
        await ranks.kill()


async def finished(ranks):
    await ranks.started()
    ranks.send_all(Update(0, 0, 0, 1))
    [done] = await ranks.replies(StepFinished)
    return done.step


def test_a_rank_that_takes_long_and_gives_signs_of_life_is_waited_for(
    config, tmp_path, monkeypatch, caplog
):
    assert PATIENCE_S < LATE_S
    assert PATIENCE_FACTOR * PATIENCE_S < SIGNS * EVERY_S
    monkeypatch.setattr(rank_processes, "EMULATED_TARGET", SLOW_TARGET)
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    settings = {"rollout": {"engine": "emulated"}, "train": {"engine": "emulated"}}
    slow = config(**settings, node={"patience_s": PATIENCE_S})
    assert asyncio.run(one_step(slow, tmp_path)) == 0
    assert "the ranks have not all started after" in caplog.text


def test_a_mini_batch_that_is_computed_at_its_end_gives_signs_of_life(new_rank, samples):
    rank = new_rank(algorithm={"name": "reinforce++"})
    batches = tuple((sample,) for sample in samples[:20])
    assert list(rank.perform(Accumulate(0, batches))) == [Done(0)]
    assert rank.events == []
    tokens = sum(len(s.token_ids) // 4 for s in samples[:20])
    list(rank.perform(Update(0, 20, tokens, 1)))
    assert rank.events == [StillAlive(0)] * 3


class Failing:
    """In place of a rank, one that has failed."""

    name = "a rank"

    def __init__(self, is_final):
        self._failed = RankFailed("gone", is_final)

    async def receive(self):
        return self._failed

    async def require_answers(self, *_):
        await asyncio.Event().wait()


@pytest.mark.parametrize("order", [(True, *[False] * 7), (*[False] * 7, True)])
def test_of_failures_that_come_at_once_the_final_one_counts(config, tmp_path, order):
    async def watched():
        ranks = Ranks(config(), Place(tmp_path, tmp_path), lambda _: None)
        for is_final in order:
            ranks._add(Failing(is_final))
        await ranks.watch()

    with pytest.raises(TrainerError) as raised:
        asyncio.run(watched())
    assert not isinstance(raised.value, RanksLost)


def test_the_worst_error_is_not_one_after_which_ranks_are_started_again():
    lost, final = RanksLost("lost"), TrainerError("out of memory")
    assert worst([lost, None, final]) is worst([final, lost]) is final
    assert worst([None, lost]) is lost


def test_no_download_and_no_disk_is_too_slow_for_the_ranks_that_wait(monkeypatch, tmp_path):
    """Longer than the daemon waits for a sign of life of a rank: it is the one who ends them."""
    found = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: found.update(options))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    join(StartRank("", "", 0, 2, str(tmp_path / "here"), "", ""), torch.device("cpu"))
    assert min(found["timeout"], found["store"].timeout) >= timedelta(hours=12)
