"""How facts become bytes: tokens column by column, so that a gigabyte of them is read in seconds.

Owns `LOG`, the codec of every journal of a run. What facts mean is said in core/log_entries.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightrl.core.log_entries import LogEntry, TokensTaken
from lightrl.errors import ProtocolError
from lightrl.messages import FinishReason, ResponseTokens
from lightrl.wire import Codec, pack_i32, unpack_i32

SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A TokensTaken as it lies on the disk: one entry of each column for each item.

    The names are one string, because a node's chunks mostly bring the same responses as the one
    before. Example: PackedTokens(4, "p7@0#3", pack_i32([1]), pack_i32([16]), pack_i32([2]), (),
    <2>, <2>)
    """

    version: int
    # with SEPARATOR between them
    responses: str
    # int32
    attempts: bytes
    # int32
    offsets: bytes
    # int32, tokens
    counts: bytes
    # (index, how), of items that have a reason
    finished: tuple[tuple[int, FinishReason], ...]
    # int32, of all items
    token_ids: bytes
    # float32, of all items
    logprobs: bytes

    @property
    def names(self) -> list[str]:
        return self.responses.split(SEPARATOR)


class LogCodec(Codec[LogEntry]):
    def __init__(self) -> None:
        super().__init__(LogEntry)
        self.packed: Codec[LogEntry | PackedTokens] = _PackedCodec(LogEntry | PackedTokens)

    def encode(self, message: LogEntry) -> bytes:
        packed = pack(message) if isinstance(message, TokensTaken) else None
        return self.packed.encode(message if packed is None else packed)

    def decode(self, frame: bytes | memoryview) -> LogEntry:
        fact = self.packed.decode(frame)
        return (
            TokensTaken(fact.version, tuple(unpack(fact)))
            if isinstance(fact, PackedTokens)
            else fact
        )


class _PackedCodec(Codec[LogEntry | PackedTokens]):
    def decode(self, frame: bytes | memoryview) -> LogEntry | PackedTokens:
        fact = super().decode(frame)
        if isinstance(fact, PackedTokens):
            _check(fact)
        return fact


def pack(fact: TokensTaken) -> PackedTokens | None:
    """None if it is better left as it is."""
    items = fact.items
    names = SEPARATOR.join([item.response for item in items])
    # there are none, or somebody's ids hold separators
    if names.count(SEPARATOR) + 1 != len(items):
        return None
    return PackedTokens(
        fact.version,
        names,
        pack_i32([item.attempt for item in items]),
        pack_i32([item.offset for item in items]),
        pack_i32([len(item.token_ids) // 4 for item in items]),
        tuple(
            [
                (k, item.finish_reason)
                for k, item in enumerate(items)
                if item.finish_reason is not None
            ]
        ),
        b"".join([item.token_ids for item in items]),
        b"".join([item.logprobs for item in items]),
    )


def unpack(fact: PackedTokens) -> Iterator[ResponseTokens]:
    finished = dict(fact.finished)
    columns = (unpack_i32(fact.attempts), unpack_i32(fact.offsets), unpack_i32(fact.counts))
    start = 0
    for k, (response, attempt, offset, count) in enumerate(zip(fact.names, *columns, strict=True)):
        end = start + 4 * count
        ids, logprobs = fact.token_ids[start:end], fact.logprobs[start:end]
        yield ResponseTokens(response, attempt, offset, ids, logprobs, finished.get(k))
        start = end


def _check(fact: PackedTokens) -> None:
    num_items = fact.responses.count(SEPARATOR) + 1
    if any(len(c) != 4 * num_items for c in (fact.attempts, fact.offsets, fact.counts)):
        raise ProtocolError("columns of tokens are of different lengths")
    counts = np.frombuffer(fact.counts, "<i4")
    size = 4 * int(counts.sum())
    if counts.min() < 0 or len(fact.token_ids) != size or len(fact.logprobs) != size:
        raise ProtocolError("tokens and their counts differ")


LOG = LogCodec()
