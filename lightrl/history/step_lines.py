"""An optional file of a run with one JSON object for each step."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightrl.system.append_file import AppendFile
from lightrl.system.json_lines import read_back
from lightrl.wire import to_json


class StepLines:
    """Appends lines. A line that cannot be written is dropped and reported."""

    def __init__(self, file: Path, step: int, report: Callable[[str], None]) -> None:
        """Open the file of a run that continues from `step`, and cut the lines of later steps."""
        try:
            _cut(file, step)
        except OSError as e:
            report(
                f"WARNING: {file.name}: rounds from step {step} on will appear twice ({e.strerror})"
            )
        self._file = AppendFile(file, report, separator=b"\n")

    def append(self, line: Mapping[str, object]) -> None:
        """Append a line, which contains "step"."""
        self._file.append(to_json(line) + b"\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class _Line:
    step: int


def _cut(file: Path, step: int) -> None:
    """Truncate in place; only the end of the file is read."""
    if file.exists():
        ends = (end for end, line in read_back(file, _Line) if line.step < step)
        os.truncate(file, next(ends, 0))
