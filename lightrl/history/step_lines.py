"""A file of a run with one JSON object for each step, which it can do without.

Owns what happens to it when a run goes on from an earlier step, and when the disk refuses.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.system.append_file import AppendFile
from lightrl.system.json_lines import read_back
from lightrl.wire import to_json


class StepLines:
    def __init__(self, file: Path, step: int, report: Callable[[str], None]) -> None:
        """Lines of a run that goes on from `step` are left out from there on: its steps come again.

        What the disk refuses is left out, and `report` is told.
        """
        try:
            _cut(file, step)
        except OSError as e:
            report(
                f"WARNING: {file.name}: rounds from step {step} on will appear twice ({e.strerror})"
            )
        self._file = AppendFile(file, report, separator=b"\n")

    def append(self, line: object) -> None:
        """With its "step"."""
        self._file.append(to_json(line) + b"\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class _Line:
    step: int


def _cut(file: Path, step: int) -> None:
    """In place, and only the end is read: the file grows with the run."""
    if file.exists():
        ends = (end for end, said in read_back(file, _Line) if said.step < step)
        os.truncate(file, next(ends, 0))
