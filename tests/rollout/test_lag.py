"""No version, however large, holds up the event loop: neither its proof nor its end."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rollout.test_weights import Node, node, until
from tests.support.cores import waited_for_a_core_s
from tests.support.versions import make_version, serving

pytestmark = pytest.mark.e2e

NUM_BUCKETS = 128  # 1 GiB: giving its pages back takes 0.15 s and more
LIMIT_S = 0.05
TRIES = 3  # others use this machine, too; a loop that is blocked is so each time


async def measure(late: list[float]) -> None:
    while True:
        due, waited_s = time.monotonic() + 0.005, waited_for_a_core_s()
        await asyncio.sleep(0.005)
        late.append(time.monotonic() - due - (waited_for_a_core_s() - waited_s))


async def a_version_comes_and_goes(one: Node, tmp_path: Path) -> float:
    """Returns how late the loop was, at most, but for others that had the cores. The version is
    in shared memory, and nowhere else."""
    draft = await asyncio.to_thread(make_version, one.folder / "draft.bin", 1, NUM_BUCKETS)
    here = one.folder / f"{draft.digest}.bin"
    os.rename(draft.path, here)
    os.rename(draft.manifest_path, here.with_suffix(".manifest"))
    small = make_version(tmp_path / "small.bin", 2, 1, 1000)
    late: list[float] = []
    async with serving(small) as trainer:
        measuring = asyncio.create_task(measure(late))
        beside = str(here.with_suffix(".manifest"))
        one.offer(replace(draft, path=str(here), manifest_path=beside), trainer)
        fetched = await one.weights.next()
        assert fetched.file.path == str(here)
        one.offer(small, trainer)
        await one.weights.next()
        await until(lambda: not here.exists() and not one.weights._chores)
        measuring.cancel()
    return max(late)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory")
def test_a_large_version_is_proved_and_given_back_beside_the_event_loop(tmp_path: Path):
    async def scenario() -> None:
        lags: list[float] = []
        async with node("a", tmp_path) as one:
            for _ in range(TRIES):
                lags.append(await a_version_comes_and_goes(one, tmp_path))
                if lags[-1] < LIMIT_S:
                    return
        raise AssertionError(f"the event loop was late by {lags} s")

    asyncio.run(scenario())
