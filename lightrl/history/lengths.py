"""Write the workload of a run for the simulator, one line for each step: the lengths of all
responses in lengths.jsonl, and the speeds of `metrics/speeds.py` in speeds.jsonl."""

from collections.abc import Callable, Mapping
from pathlib import Path

from lightrl.core.state import Round
from lightrl.history.step_lines import StepLines

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
            [g.prompt.id, g.prompt.epoch, r.index, len(r.tokens), r.finish_reason is not None]
            for g in round.groups.values()
            for r in g.responses
        ]
        self._lengths.append({"step": round.step, "kind": round.kind, "responses": responses})

    def write_step(self, speeds: Mapping[str, object]) -> None:
        """Append the speeds of a finished step."""
        self._speeds.append(speeds)

    def close(self) -> None:
        self._lengths.close()
        self._speeds.close()
