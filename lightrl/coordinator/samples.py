"""samples.jsonl: what was sampled, as text that can be read, with its score.

Owns which responses of a step are written, and how a line looks. A run can do without the file.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightrl.core.state import Response
from lightrl.rewards.jobs import RewardResult
from lightrl.system.append_file import AppendFile
from lightrl.wire import to_json

FILE_NAME = "samples.jsonl"


class SamplesLog:
    def __init__(
        self, run_dir: Path, number: int | Literal["all"], report: Callable[[str], None]
    ) -> None:
        """`number`: of each training step; of evaluations all are written. What the disk refuses is
        left out, and `report` is told."""
        self._number = math.inf if number == "all" else number
        self._file = AppendFile(run_dir / FILE_NAME, report, separator=b"\n")

    def write(self, response: Response, prompt: str, result: RewardResult) -> None:
        """A response that was just scored."""
        if self.is_wanted(response):
            self._file.append(to_json(as_line(response, prompt, result)) + b"\n")

    def is_wanted(self, response: Response) -> bool:
        """The first groups of a step, whole: which they are does not depend on who finishes
        first."""
        group = response.group
        place = group.position * len(group.responses) + response.index
        return group.round.is_eval or place < self._number

    def close(self) -> None:
        self._file.close()


def as_line(response: Response, prompt: str, result: RewardResult) -> dict[str, Any]:
    """`parts`: figures that functions returned besides; `versions`: [policy version, tokens] in
    order; `extras`: what functions logged, by column; `failure`: why there is no reward."""
    line: dict[str, Any] = {
        "step": response.group.round.step,
        "response": response.id,
        "set": response.group.set,
        "is_eval": response.group.round.is_eval,
        "prompt": prompt,
        "text": result.text,
        "reward": result.reward,
        "parts": result.metrics,
        "finish_reason": response.finish_reason,
        "tokens": len(response.tokens),
        "versions": [list(span) for span in response.spans],
    }
    optional = {"extras": result.extras, "failure": result.failure}
    return line | {name: value for name, value in optional.items() if value}
