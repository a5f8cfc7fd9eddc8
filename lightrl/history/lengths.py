"""Write the workload of a run for the simulator, one line for each step: the lengths of all
responses in lengths.jsonl, and the speeds of `metrics/speeds.py` in speeds.jsonl."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.core.state import Round
from lightrl.system.append_file import AppendFile, read_ends
from lightrl.wire import to_json

FILE_NAME = "lengths.jsonl"
SPEEDS = "speeds.jsonl"


class WorkloadLog:
    """The two files of a run."""

    def __init__(self, run_dir: Path, step: int, report: Callable[[str], None]) -> None:
        """Open the files, see `StepLines`."""
        self._lengths = StepLines(run_dir / FILE_NAME, step, report)
        self._speeds = StepLines(run_dir / SPEEDS, step, report)

    def write(self, round: Round) -> None:
        """Append a closed training round: [prompt, epoch, index, tokens, finished] of each
        response, in the order of launch; an unfinished one was aborted after `tokens`.
        """
        responses = [
            [g.prompt.id, g.prompt.epoch, r.index, r.num_sampled, r.finish_reason is not None]
            for g in round.groups.values()
            for r in g.responses
        ]
        self._lengths.append({"step": round.step, "kind": round.kind, "responses": responses})

    def write_step(self, speeds: object) -> None:
        """Append the speeds of a finished step."""
        self._speeds.append(speeds)

    def close(self) -> None:
        self._lengths.close()
        self._speeds.close()


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

    def append(self, line: object) -> None:
        """Append a line, which contains "step"."""
        self._file.append(to_json(line) + b"\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class _Line:
    step: int


def _cut(file: Path, step: int) -> None:
    """Truncate in place."""
    if file.exists():
        ends = [end for end, line in read_ends(file, _Line) if line.step < step]
        os.truncate(file, max(ends, default=0))
