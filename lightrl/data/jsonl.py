"""Rows of a JSONL file, by their number.

Owns where its lines begin; keeps nothing else of them.
"""

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightrl.data.layouts import content_key, explicit_id, id_key, prompt_column
from lightrl.data.open_files import OpenFiles
from lightrl.data.rows import Keys
from lightrl.errors import DataError
from lightrl.model_files import first_line


class JsonlRows:
    """Implements `rows.Rows`. Reads the file once when it is opened: every line must be JSON."""

    def __init__(self, file: Path, prompt_key: str, files: OpenFiles) -> None:
        self._file = file
        self._files = files
        self._starts = array("q")
        self._lines = array("q")  # numbers of lines, which begin at 1; empty ones are no rows
        names: dict[str, None] = {}
        ids, has_id, contents = array("Q"), bytearray(), array("Q")
        for row in self._index():
            names.update(dict.fromkeys(row))
            own = explicit_id(row)
            ids.append(0 if own is None else id_key(own))
            has_id.append(own is not None)
            contents.append(content_key(row.get(prompt_column(row, prompt_key))))
        self.num_rows = len(self._lines)
        self.columns = tuple(names)
        self._keys = Keys(
            np.frombuffer(ids, np.uint64),
            np.frombuffer(bytes(has_id), np.bool_),
            lambda: np.frombuffer(contents, np.uint64),
        )

    def keys(self) -> Keys:
        return self._keys

    def where(self, index: int) -> str:
        return f"{self._file}, line {self._lines[index]}"

    def read(self, index: int) -> dict[str, Any]:
        try:
            size = self._starts[index + 1] - self._starts[index]
            lines = os.pread(self._files.descriptor(self._file), size, self._starts[index])
        except OSError as e:
            raise DataError(f"{self._file}: cannot be read: {e.strerror}") from None
        return self._row(lines.partition(b"\n")[0], self._lines[index])  # empty ones may follow

    read_prompt = read

    def scan(self) -> Iterator[dict[str, Any]]:
        for index in range(self.num_rows):
            yield self.read(index)

    def get_ready(self) -> None:
        """It is."""

    def _index(self) -> Iterator[dict[str, Any]]:
        try:
            descriptor = self._files.descriptor(self._file)
            with open(descriptor, "rb", closefd=False) as file:
                start = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._starts.append(start)
                        self._lines.append(number)
                        yield self._row(line, number)
                    start += len(line)
                self._starts.append(start)  # the end
        except OSError as e:
            raise DataError(f"{self._file}: cannot be read: {e.strerror}") from None

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        where = f"{self._file}, line {number}"
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
