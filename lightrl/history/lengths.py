"""lengths.jsonl of a run: how long every response of every round was, one line for each round.

A workload as it was, for whoever wants to replay or simulate it. Owns the file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.core.state import Round
from lightrl.system import files
from lightrl.system.append_file import AppendFile
from lightrl.system.json_lines import read_lines
from lightrl.wire import to_json

FILE_NAME = "lengths.jsonl"


class LengthsLog:
    def __init__(self, run_dir: Path, step: int, report: Callable[[str], None]) -> None:
        """Lines of a run that goes on from `step` are left out from there on: its rounds come
        again.

        What the disk refuses is left out, and `report` is told.
        """
        file = run_dir / FILE_NAME
        try:
            _cut(file, step)
        except OSError as e:
            report(
                f"WARNING: {file.name}: rounds from step {step} on will appear twice ({e.strerror})"
            )
        self._file = AppendFile(file, report, separator=b"\n")

    def write(self, round: Round) -> None:
        """A training round that has closed. Of each response [prompt, epoch, index, tokens,
        finished], in the order in which they were launched; not finished = given up with so many
        tokens.
        """
        responses = [
            [g.prompt.id, g.prompt.epoch, r.index, len(r.tokens), r.finish_reason is not None]
            for g in round.groups.values()
            for r in g.responses
        ]
        line = {"step": round.step, "kind": round.kind, "responses": responses}
        self._file.append(to_json(line) + b"\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class _Line:
    step: int


def _cut(file: Path, step: int) -> None:
    if file.exists():
        kept = [line + b"\n" for line, said in read_lines(file, _Line) if said.step < step]
        files.write_whole(file, b"".join(kept))
