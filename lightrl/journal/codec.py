"""Encode entries: tokens column by column, so that a gigabyte of them is read in seconds.

`LOG` is the codec of every journal. core/log_entries.py defines the entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightrl.core.log_entries import LogEntry, TokensTaken
from lightrl.errors import ProtocolError
from lightrl.messages.responses import FinishReason, ResponseTokens
from lightrl.wire import Codec, pack_i32, unpack_i32

SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A TokensTaken on disk: one entry of each column for each item.

    The names are one string, because successive chunks of a node mostly have the same responses.
    Example: PackedTokens(4, "p7@0#3", pack_i32([1]), pack_i32([16]), pack_i32([2]), (), <2>, <2>)
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
        entry = self.packed.decode(frame)
        return (
            TokensTaken(entry.version, tuple(unpack(entry)))
            if isinstance(entry, PackedTokens)
            else entry
        )


class _PackedCodec(Codec[LogEntry | PackedTokens]):
    def decode(self, frame: bytes | memoryview) -> LogEntry | PackedTokens:
        entry = super().decode(frame)
        if isinstance(entry, PackedTokens):
            _check(entry)
        return entry


def pack(entry: TokensTaken) -> PackedTokens | None:
    """Return the columns of an entry; None if it is empty or its ids contain separators."""
    items = entry.items
    names = SEPARATOR.join([item.response for item in items])
    if names.count(SEPARATOR) + 1 != len(items):
        return None
    return PackedTokens(
        entry.version,
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


def unpack(entry: PackedTokens) -> Iterator[ResponseTokens]:
    finished = dict(entry.finished)
    columns = (unpack_i32(entry.attempts), unpack_i32(entry.offsets), unpack_i32(entry.counts))
    start = 0
    for k, (response, attempt, offset, count) in enumerate(zip(entry.names, *columns, strict=True)):
        end = start + 4 * count
        ids, logprobs = entry.token_ids[start:end], entry.logprobs[start:end]
        yield ResponseTokens(response, attempt, offset, ids, logprobs, finished.get(k))
        start = end


def _check(entry: PackedTokens) -> None:
    num_items = entry.responses.count(SEPARATOR) + 1
    if any(len(c) != 4 * num_items for c in (entry.attempts, entry.offsets, entry.counts)):
        raise ProtocolError("columns of tokens are of different lengths")
    counts = np.frombuffer(entry.counts, "<i4")
    size = 4 * int(counts.sum())
    if counts.min() < 0 or len(entry.token_ids) != size or len(entry.logprobs) != size:
        raise ProtocolError("tokens and their counts differ")


LOG = LogCodec()
