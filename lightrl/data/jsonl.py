"""Rows of a JSONL file, by their number. Rows of other formats are converted to lines of JSON in a
temporary file.

Owns the offset of each line and a checksum of each: a row that changes during a run is an error.
"""

import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from lightrl.data.formats import BLANK, other_lines
from lightrl.data.layouts import text_key
from lightrl.data.rows import CHANGED, Keys, keys_of
from lightrl.errors import DataError, first_line
from lightrl.system import open_files


class Spool:
    """A temporary file without a name that all files of a set share, made at the first use."""

    @cached_property
    def file(self) -> IO[bytes]:
        """Raises OSError if there is no room."""
        return tempfile.TemporaryFile()

    def __del__(self) -> None:
        if "file" in self.__dict__:
            self.file.close()


class JsonlRows:
    """Implements `rows.Rows`. Reads the file once when it is opened: every row must be JSON."""

    def __init__(self, file: Path, prompt_key: str, spool: Spool) -> None:
        self._file = file
        self._spool = spool
        self._starts = array("q")
        self._lines = array("q")  # numbers of lines, which begin at 1; empty ones are no rows
        self._sums = array("Q")  # of each row
        self._unit = "line"
        self._is_spooled = False  # the lines are in a temporary file
        self._digest = hashlib.blake2b(digest_size=8)
        self._names: dict[str, None] = {}
        self._keys = keys_of(self._index(), prompt_key)
        self.num_rows = len(self._lines)
        self.columns = tuple(self._names)
        self.digest = self._digest.hexdigest()

    def keys(self) -> Keys:
        return self._keys

    def where(self, index: int) -> str:
        return self._where(self._lines[index])

    def read(self, index: int) -> dict[str, Any]:
        try:
            start, end = self._starts[index], self._starts[index + 1]
            if self._is_spooled:
                lines = os.pread(self._spool.file.fileno(), end - start, start)
            else:
                with open(self._file, "rb", opener=open_files.insist) as file:
                    lines = os.pread(file.fileno(), end - start, start)
        except OSError as e:
            raise DataError(f"{self._file}: cannot be read: {e.strerror}") from None
        line = lines.partition(b"\n")[0]  # empty ones may follow
        if text_key(line) != self._sums[index]:
            raise DataError(f"{self.where(index)}: {CHANGED}")
        return self._row(line, self._lines[index])

    def scan(self) -> Iterator[dict[str, Any]]:
        for index in range(self.num_rows):
            yield self.read(index)

    def _index(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._file, "rb", opener=open_files.insist) as file:
                lines, start = enumerate(file, 1), 0
                if (other := other_lines(self._file, file)) is not None:
                    self._unit, lines = other
                    self._is_spooled, start = True, self._spool.file.seek(0, os.SEEK_END)
                for number, line in lines:
                    if line.strip(BLANK):
                        self._starts.append(start)
                        self._lines.append(number)
                        self._sums.append(text_key(line.rstrip(b"\n")))
                        self._digest.update(line.strip(BLANK) + b"\n")
                        row = self._row(line, number)
                        self._names.update(dict.fromkeys(row))
                        yield row
                    if self._is_spooled:
                        line = line.rstrip(b"\n") + b"\n"
                        self._spool.file.write(line)
                    start += len(line)
                self._starts.append(start)  # the end
                if self._is_spooled:
                    self._spool.file.flush()
        except OSError as e:
            raise DataError(f"{self._file}: cannot be read: {e.strerror or e}") from None

    def _where(self, number: int) -> str:
        return f"{self._file}, {self._unit} {number}"

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        where = self._where(number)
        try:
            row = json.loads(line, parse_constant=_constant if b"NaN" in line else None)
        except json.JSONDecodeError as e:  # its own text counts lines from this one
            column = min(e.pos, len(e.doc.rstrip())) + 1
            raise DataError(f"{where}: not valid JSON: {e.msg} at column {column}") from None
        except (ValueError, RecursionError) as e:
            raise DataError(f"{where}: not valid JSON: {first_line(e)}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
        return row


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)
