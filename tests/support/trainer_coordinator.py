"""A scripted coordinator for a trainer with real ranks, and what it takes to disturb them."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from lightrl.journal.read import StepPortions, recut
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.sharing import SetDevices
from lightrl.messages.training import Checkpointed, ShardsTaken, StepDone, TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.trainer.rank_processes import Place
from lightrl.trainer.served import ServedVersions
from lightrl.trainer.trainer import Trainer
from lightrl.weights.serve.server import WeightServer

DEADLINE_S = 280
TURNS = 20  # of the event loop between shards, so that some are computed while others wait


class Coordinator:
    """Feeds a trainer as the real one does, from where the trainer says that it stands.

    `on` holds what is to happen when a message comes for the first time, by its kind and number:
    functions, or coroutines that go on beside. What would be fed to a version that appears is then
    theirs to feed.
    """

    def __init__(self, config, folder, groups):
        self.config = config
        self.folder = folder
        size = config.train.prompts_per_step // config.train.mini_batches
        self.groups = [replace(group, mini_batch=i // size) for i, group in enumerate(groups)]
        self.digests = {}
        self.portions = {}
        self.replicas = {}
        self.sent = []  # all that the trainer said
        self.says_taken = True  # of each version that it pulls, as the real one does
        self.waits = False  # with each shard until the one before it was taken
        self.num_hellos = 1
        self.on = {}
        # of the devices, that the ranks have whenever a shard comes; None: they are whole
        num_parts = config.device_parts
        self.parts = tuple(range(num_parts)) if num_parts > 1 else None
        self._feeding = None
        self._tasks = set()
        self._failed = asyncio.get_running_loop().create_future()  # what went wrong in a task
        self._expects_position = True
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.published = folder / "published"
        self.published.mkdir(exist_ok=True)
        self.server = WeightServer()
        versions = ServedVersions(self.server)
        self.trainer = Trainer(
            config, Place(folder, self.published), versions, self.take, self.restarted
        )

    def restarted(self):
        self.num_hellos += 1
        self.rejoin()

    def rejoin(self):
        """The trainer said hello and is welcomed."""
        self._expects_position = True
        if self._feeding is not None:
            self._feeding.cancel()
        self.trainer.rejoin()

    def take(self, message):
        self.sent.append(message)
        match message:
            case PublishWeights(version, digest, portions=portions, replicas=replicas):
                assert self.digests.setdefault(version, digest) == digest
                if portions:
                    assert self.portions.setdefault(version, portions) == portions
                    assert self.replicas.setdefault(version, replicas) == replicas
                happens = self.on.pop(("published", version), None)
                if self._expects_position or version > self._stands_at:
                    self._expects_position, self._stands_at = False, version
                    if self.says_taken and version < self.config.train.steps:
                        self.trainer.handle(VersionTaken(version, wants_delta=True))
                    if happens is None and version < self.config.train.steps:
                        self.feed(version)
            case StepDone(step):
                happens = self.on.pop(("done", step), None)
            case Checkpointed(step):
                happens = self.on.pop(("saved", step), None)
            case _:
                happens = None
        if happens is not None and (more := happens()) is not None:
            self.spawn(more)

    def shards(self, step, sizes=(1, 2, 4, 1)):
        """As the trainer had them when it trained that step first; else in any parts."""
        borders = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        shards = [
            TrainShard(
                step, i, step, tuple(self.groups[a:b]), b == len(self.groups), len(self.groups)
            )
            for i, (a, b) in enumerate(pairwise(borders))
        ]
        if step + 1 not in self.portions:
            return shards
        known = StepPortions(self.portions[step + 1], self.replicas[step + 1])
        return recut(shards, known)

    def hand_over(self, shard):
        if self.parts is not None:
            self.trainer.handle(SetDevices("trainer", shard.step, True, self.parts))
        self.trainer.handle(shard)

    def feed(self, step):
        async def feed():
            for shard in self.shards(step):
                self.hand_over(shard)
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                if self.waits:
                    taken = ShardsTaken(step, shard.index)
                    await until(lambda taken=taken: taken in self.sent)

        self._feeding = self.spawn(feed())

    def spawn(self, coroutine):
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task):
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() and not self._failed.done():
            self._failed.set_exception(task.exception())

    async def run(self):
        """The trainer, to its end."""
        await self.server.start("127.0.0.1")
        running = asyncio.ensure_future(self.trainer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait({running, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            (self._failed if self._failed.done() else running).result()
        finally:
            for task in (running, *self._tasks):
                task.cancel()
            await asyncio.gather(running, *self._tasks, return_exceptions=True)

    async def run_and_close(self):
        try:
            await self.run()
        finally:
            await self.close()

    async def close(self):
        await self.trainer.close()
        await self.server.close()


def pid_of(rank):
    """Of the rank process that this one started last; None while there is none."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            if is_ours and f"lightrl-rank-{rank}\0" in (path / "cmdline").read_text():
                found.append(int(path.name))
    return max(found, default=None)


def kill(rank=0, number=signal.SIGKILL):
    os.kill(pid_of(rank), number)


async def until(holds):
    """For what nobody tells us: another process has come so far."""
    deadline = time.monotonic() + DEADLINE_S
    while not (result := holds()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
    return result


async def turns(number=TURNS):
    for _ in range(number):
        await asyncio.sleep(0)
