"""Files of JSON lines that `AppendFile` writes, read whatever a crash has left of them.

Owns what counts as a line: one of another form says nothing, as the torn last one of a process
that was killed. Data sets and what else a user writes are read elsewhere, where a wrong line is an
error.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from lightrl.errors import ProtocolError
from lightrl.wire import from_json

T = TypeVar("T")

BLOCK_BYTES = 1 << 20  # read at once, from the end


def read_rows(file: Path, kind: type[T]) -> Iterator[T]:
    """What the lines of that form say, in order; nothing if there is no such file. May raise
    OSError."""
    try:
        opened = file.open("rb")
    except FileNotFoundError:
        return
    with opened:
        for line in opened:
            if (row := _row(line, kind)) is not None:
                yield row


def read_back(file: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """The same rows, the last one first, each with where its line ends; what comes before those
    that are asked for is not read."""
    try:
        with file.open("rb") as opened:
            for end, line in _lines_back(opened):
                if (row := _row(line, kind)) is not None:
                    yield end, row
    except FileNotFoundError:
        return


def _row(line: bytes, kind: type[T]) -> T | None:
    try:
        return from_json(line, kind)
    except ProtocolError:
        return None


def _lines_back(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(where it ends, the line without its end), from the last one on."""
    at = file.seek(0, os.SEEK_END)
    end, later = at, list[bytes]()  # pieces of the line at hand, the last one first
    while at:
        size = min(at, BLOCK_BYTES)
        at -= size
        file.seek(at)
        block = file.read(size)
        while (newline := block.rfind(b"\n", 0, size)) >= 0:
            yield end, b"".join([block[newline + 1 : size], *reversed(later)])
            size, later, end = newline, [], at + newline + 1
        later.append(block[:size])
    yield end, b"".join(reversed(later))
