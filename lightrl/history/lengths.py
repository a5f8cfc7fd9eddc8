"""A run as a workload, for whoever wants to replay or simulate it, one line for each step:
lengths.jsonl, how long every response of every round was, and speeds.jsonl, how fast all was.

Owns the files. What speeds are is said in `metrics/speeds.py`.
"""

from collections.abc import Callable
from pathlib import Path

from lightrl.core.state import Round
from lightrl.history.step_lines import StepLines

FILE_NAME = "lengths.jsonl"
SPEEDS = "speeds.jsonl"


class WorkloadLog:
    def __init__(self, run_dir: Path, step: int, report: Callable[[str], None]) -> None:
        """See `StepLines`."""
        self._lengths = StepLines(run_dir / FILE_NAME, step, report)
        self._speeds = StepLines(run_dir / SPEEDS, step, report)

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
        self._lengths.append({"step": round.step, "kind": round.kind, "responses": responses})

    def write_step(self, speeds: object) -> None:
        """A step that is over."""
        self._speeds.append(speeds)

    def close(self) -> None:
        self._lengths.close()
        self._speeds.close()
