"""Files of JSON lines that `AppendFile` writes, read whatever a crash has left of them.

Owns what counts as a line: one of another form says nothing, as the torn last one of a process
that was killed. Data sets and what else a user writes are read elsewhere, where a wrong line is an
error.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from lightrl.errors import ProtocolError
from lightrl.wire import from_json

T = TypeVar("T")


def read_rows(file: Path, kind: type[T]) -> Iterator[T]:
    """What the lines of that form say, in order; nothing if there is no such file. May raise
    OSError."""
    return (row for _, row in read_lines(file, kind))


def read_lines(file: Path, kind: type[T]) -> Iterator[tuple[bytes, T]]:
    """As `read_rows`, with the lines themselves, without their ends."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield line, from_json(line, kind)
        except ProtocolError:
            continue
