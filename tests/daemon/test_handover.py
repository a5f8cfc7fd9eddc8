"""A step that is much more than may be under way at once: on its way to the journal, and to the
trainer."""

import asyncio
import os
import threading
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.sections import Journal
from lightrl.coordinator.journaling import FOLDER, Journaling
from lightrl.coordinator.replays import Replays
from lightrl.core.commands import Command, Record, ReplayShards, Send
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import MessageArrived, NodeLost, ShardLeft
from lightrl.core.log_entries import LogEntry, ShardSent, SnapshotBegan, VersionPublished
from lightrl.core.recovery import recover
from lightrl.core.training import trainer_feed as trainer_feed
from lightrl.journal import disk
from lightrl.journal.read import LOG, newest
from lightrl.messages.training import ShardsTaken, TrainShard
from lightrl.system import child
from tests.core.conftest import Driver
from tests.journal.conftest import shard, write

NUM_GROUPS = 16
TOKENS = 50  # of a response; a group has two
SHARD_BYTES = 8 * 2 * TOKENS + 1000


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group a shard, three of them untaken."""
    monkeypatch.setattr(trainer_feed, "MAX_SHARD_TOKENS", 2 * TOKENS)
    monkeypatch.setattr(trainer_feed, "MAX_UNTAKEN_TOKENS", 6 * TOKENS)


def within(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


class Watched(Journaling):
    """Says how many shards were read again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.num_read = 0
        self.has_read = asyncio.Event()

    async def shards(self, step: int) -> AsyncGenerator[TrainShard, None]:
        async with aclosing(super().shards(step)) as shards:
            async for shard in shards:
                self.num_read += 1
                self.has_read.set()  # who waits for it runs when the reader has to wait, too
                yield shard


class Shell:
    """Carries out what a core says of shards, with a real journal, and remembers them for a
    trainer."""

    def __init__(self, folder: Path) -> None:
        self.driver = Driver(
            prompts_per_step=NUM_GROUPS, num_prompts=NUM_GROUPS, max_response_tokens=TOKENS
        )
        self.driver.disk_is_slow = True  # the shell says when a shard has left
        self.journaling = Watched(folder, Journal(flush_ms=1), pytest.fail)
        self.shards: list[TrainShard] = []
        self.came = asyncio.Event()
        self.worst_pending = 0

    def start(self) -> None:
        """All of a step has finished, and the trainer is away."""
        self.driver.start("a", slots=2 * NUM_GROUPS)
        self.driver.feed(NodeLost("t", "gone"))
        self.driver.complete(lambda name: TOKENS)
        self.journaling.begin(self.driver.core, b"")

    def perform(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Record):
                self.journaling.record(command.entry)
            elif isinstance(command, Send) and isinstance(command.message, TrainShard):
                shard = command.message
                self.journaling.when_durable(lambda shard=shard: self.send(shard))
        self.worst_pending = max(self.worst_pending, self.journaling.pending_bytes)

    def send(self, shard: TrainShard) -> None:
        self.shards.append(shard)
        self.came.set()
        left = ShardLeft(shard.step, shard.index)
        asyncio.get_running_loop().call_soon(lambda: self.perform(self.driver.feed(left)))

    def take(self, shard: TrainShard) -> None:
        taken = MessageArrived("t", ShardsTaken(shard.step, shard.index))
        self.perform(self.driver.feed(taken))

    async def hand_over(self) -> None:
        self.driver.join("t", "trainer", incarnation=2)
        self.perform(self.driver.publish(0))
        taken = 0
        while not (self.shards and self.shards[-1].last):
            self.came.clear()
            await self.came.wait()
            assert len(self.shards) - taken <= 3
            while taken < len(self.shards):
                self.take(self.shards[taken])
                taken += 1


def test_a_step_much_larger_than_what_may_wait_is_handed_over_on_a_slow_disk(
    tmp_path, small_window, monkeypatch
):
    write = os.pwrite
    most: list[int] = []

    async def story() -> None:
        shell = Shell(tmp_path)
        shell.start()

        def pwrite(file: int, data: bytes, offset: int) -> int:
            most.append(shell.journaling.pending_bytes)
            return sum(write(file, data[k : k + 100], offset + k) for k in range(0, len(data), 100))

        monkeypatch.setattr(disk.os, "pwrite", pwrite)
        await shell.hand_over()
        shell.journaling.check()
        assert [s.index for s in shell.shards] == list(range(NUM_GROUPS))
        assert [g.group for s in shell.shards for g in s.groups] == [
            f"p{k}@0" for k in range(NUM_GROUPS)
        ]
        assert max(*most, shell.worst_pending) <= trainer_feed.MAX_UNWRITTEN * SHARD_BYTES
        await shell.journaling.close()

    within(story)


def test_a_step_that_is_trained_again_is_read_and_sent_as_the_trainer_takes_it(
    tmp_path, small_window
):
    async def story() -> None:
        shell = Shell(tmp_path)
        shell.start()
        await shell.hand_over()
        first = shell.shards
        shell.journaling.record(VersionPublished(1, "d", (1,) * NUM_GROUPS))
        again: list[TrainShard] = []
        came = asyncio.Event()

        def send(node: str, shard: TrainShard, hello: int) -> bool:
            assert (node, hello) == ("t", 3)
            again.append(shard)
            came.set()
            return True

        replays = Replays(shell.journaling, send, pytest.fail)
        async with asyncio.TaskGroup() as tasks:
            replays.start(tasks, ReplayShards("t", 0, 3))
            while shell.journaling.num_read < 4:
                shell.journaling.has_read.clear()
                await shell.journaling.has_read.wait()
            # The fourth one is there, and is not sent before one is taken.
            assert [s.index for s in again] == [0, 1, 2]
            replays.on_shards_taken(ShardsTaken(7, 1))  # of another step
            while not again[-1].last:
                came.clear()
                replays.on_shards_taken(ShardsTaken(0, again[-1].index))
                await came.wait()
        assert [s.groups for s in again] == [s.groups for s in first]
        assert all(s.alone for s in again)
        await shell.journaling.close()

    within(story)


def test_a_replay_gives_way_to_the_next_one(tmp_path, small_window):
    async def story() -> None:
        shell = Shell(tmp_path)
        shell.start()
        await shell.hand_over()
        shell.journaling.record(VersionPublished(1, "d", (1,) * NUM_GROUPS))
        sent: list[int] = []
        came = asyncio.Event()

        def send(node: str, shard: TrainShard, hello: int) -> bool:
            sent.append(hello)
            came.set()
            return hello == 1 or len(sent) < 5

        replays = Replays(shell.journaling, send, pytest.fail)
        async with asyncio.TaskGroup() as tasks:
            for hello in (1, 2):
                replays.start(tasks, ReplayShards("t", 0, hello))
                while len(sent) < (3 if hello == 1 else 5):
                    came.clear()
                    await came.wait()
        assert sent == [1, 1, 1, 2, 2]
        await shell.journaling.close()

    within(story)


def test_restating_hundreds_of_megabytes_does_not_hold_the_event_loop(tmp_path):
    """Measured is the time that the loop's own thread works: others may use the machine, too."""
    num_tokens = 1 << 18

    async def story() -> None:
        driver = Driver(prompts_per_step=32, num_prompts=32, max_response_tokens=1 << 20)
        driver.start("a", slots=64)
        for response in driver.core.table.responses.values():
            response.version = 0
            response.starts.append((0, 0))
            response.tokens.frombytes(bytes(4 * num_tokens))
            response.logprobs.frombytes(bytes(4 * num_tokens))
        journaling = Journaling(tmp_path, Journal(), pytest.fail)
        over = asyncio.Event()
        begun = time.thread_time()
        journaling.begin(driver.core, b"")
        journaling.when_durable(over.set)
        worst = time.thread_time() - begun
        while not over.is_set():
            begun = time.thread_time()
            for response in driver.core.table.responses.values():  # they go on meanwhile
                response.tokens.append(1)
                response.logprobs.append(-1.0)
            await asyncio.sleep(0)
            worst = max(worst, time.thread_time() - begun)
        assert worst < 0.1
        await journaling.close()
        again = Coordinator(driver.core.settings, 0.0)
        recover(again, newest(tmp_path / FOLDER, LOG)[1], 0.0)
        assert len(again.table.responses) == 64
        held = array("i", bytes(4 * num_tokens))
        assert all(r.tokens == held for r in again.table.responses.values())

    within(story)


def test_a_step_is_read_again_whole_on_a_machine_that_now_and_then_has_no_thread(
    tmp_path, monkeypatch
):
    sent = [ShardSent(shard(2, k, [f"g{k}"], last=k == 2, total=3)) for k in range(3)]
    facts: list[LogEntry] = [*sent, VersionPublished(3, "d3", (1, 1, 1))]
    start = threading.Thread.start
    num_starts = 0

    def every_other_time(thread: threading.Thread) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts % 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def story() -> None:
        await write(tmp_path / FOLDER, (2, [SnapshotBegan(step=2)], facts))
        told: list[str] = []
        journaling = Journaling(tmp_path, Journal(), told.append)
        with monkeypatch.context() as lack:
            lack.setattr(child, "START_AGAIN_S", 0)
            lack.setattr(threading.Thread, "start", every_other_time)
            assert [part.groups async for part in journaling.shards(2)] == [
                fact.shard.groups for fact in sent
            ]
        assert set(told) == {
            "WARNING: training step 2 again cannot be started: can't start new thread; trying again"
        }
        await journaling.close()

    within(story)
