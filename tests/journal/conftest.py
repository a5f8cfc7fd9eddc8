"""A small journal, written as a run writes one."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lightrl.core.log_entries import (
    LogEntry,
    RoundOpened,
    ShardSent,
    SnapshotBegan,
    TokensTaken,
    VersionPublished,
)
from lightrl.journal.read import LOG
from lightrl.journal.write import JournalWriter
from lightrl.messages.responses import ResponseTokens
from lightrl.messages.training import TrainGroup, TrainShard
from lightrl.wire import pack_f32, pack_i32

PATIENCE_S = 20.0


def item(
    name: str, offset: int, count: int, attempt: int = 1, how: str | None = None
) -> ResponseTokens:
    """Tokens that say where they stand: 1000 * (number of the response) + position."""
    first = 1000 * sum(name.encode()) + offset
    ids = pack_i32(range(first, first + count))
    logprobs = pack_f32([-float(k) for k in range(offset, offset + count)])
    return ResponseTokens(name, attempt, offset, ids, logprobs, how)  # type: ignore[arg-type]


def shard(
    step: int, index: int, groups: list[str], last: bool = False, total: int = 0
) -> TrainShard:
    return TrainShard(step, index, step, tuple(TrainGroup(g, b"", ()) for g in groups), last, total)


def small_story() -> list[LogEntry]:
    return [
        RoundOpened(2, "plain"),
        TokensTaken(2, (item("a", 0, 3), item("b", 0, 2))),
        TokensTaken(2, (item("a", 3, 1, how="stop"), item("b", 2, 2))),
        ShardSent(shard(2, 0, ["g"], last=True, total=1)),
        VersionPublished(3, "d3", (1,)),
    ]


async def write(folder: Path, *parts: tuple[int, list[LogEntry], list[LogEntry]]) -> None:
    """Segments of (step, base, news)."""
    writer = JournalWriter(folder, LOG, 5, pytest.fail)
    for step, base, news in parts:
        writer.begin(step, base)
        for fact in news:
            writer.append(fact)
    await writer.close()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    folder = tmp_path / "journal"
    asyncio.run(write(folder, (2, [SnapshotBegan(step=2), RoundOpened(2, "plain")], small_story())))
    return folder


def within(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work()

    asyncio.run(bounded())


def tokens_of(facts: list[LogEntry]) -> dict[str, tuple[list[int], list[int], object]]:
    """What a reader that skips what it knows ends up with: (tokens, version of each, how it
    finished)."""
    held: dict[str, tuple[list[int], list[int], object]] = {}
    for fact in facts:
        if isinstance(fact, TokensTaken):
            for i in fact.items:
                ids, versions, _ = held.get(i.response, ([], [], None))
                assert i.offset <= len(ids), f"a hole in {i.response}"
                new = array("i", i.token_ids)[len(ids) - i.offset :].tolist()
                held[i.response] = (
                    ids + new,
                    versions + [fact.version] * len(new),
                    (i.attempt, i.finish_reason),
                )
    return held
