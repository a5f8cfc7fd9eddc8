"""Write samples.jsonl: responses as text, with their scores. An optional file."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightrl.core.state import Response
from lightrl.rewards.protocol import RewardResult
from lightrl.system.append_file import AppendFile
from lightrl.wire import to_json

FILE_NAME = "samples.jsonl"


class SamplesLog:
    """Appends a line for each response that is wanted."""

    def __init__(
        self, run_dir: Path, number: int | Literal["all"], report: Callable[[str], None]
    ) -> None:
        """`number`: responses of each training step; those of evaluations are all written. A line
        that cannot be written is dropped and reported."""
        self._number = math.inf if number == "all" else number
        self._file = AppendFile(run_dir / FILE_NAME, report, separator=b"\n")

    def write(self, response: Response, prompt: str, result: RewardResult) -> None:
        """Append a response that was just scored."""
        if self.is_wanted(response):
            self._file.append(to_json(as_line(response, prompt, result)) + b"\n")

    def is_wanted(self, response: Response) -> bool:
        """Return whether a response belongs to the first groups of its step, in launch order."""
        group = response.group
        place = group.position * len(group.responses) + response.index
        return group.round.is_eval or place < self._number

    def close(self) -> None:
        self._file.close()


def as_line(response: Response, prompt: str, result: RewardResult) -> dict[str, Any]:
    """Return a line. `parts`: further figures of the functions; `versions`: [policy version,
    tokens] in order; `extras`: logged by functions, by column; `failure`: why there is no
    reward."""
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
