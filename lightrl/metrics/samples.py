"""samples.jsonl: what was sampled, as text that can be read, with its score.

Owns which responses of a step are written, and how a line looks. A run can do without the file.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from lightrl.core.state import Response
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

    def write(
        self,
        response: Response,
        prompt: str,
        text: str,
        reward: float | None,
        parts: Mapping[str, float],
        failure: str,
        extras: Mapping[str, str],
    ) -> None:
        """A response that was just scored. `parts`: figures that functions returned besides;
        `failure`: why there is no reward, or ""; `extras`: what functions logged, by column."""
        if self.is_wanted(response):
            line = as_line(response, prompt, text, reward, parts, failure, extras)
            self._file.append(to_json(line) + b"\n")

    def is_wanted(self, response: Response) -> bool:
        """The first groups of a step, whole: which they are does not depend on who finishes
        first."""
        group = response.group
        place = group.position * len(group.responses) + response.index
        return group.round.is_eval or place < self._number

    def close(self) -> None:
        self._file.close()


def as_line(
    response: Response,
    prompt: str,
    text: str,
    reward: float | None,
    parts: Mapping[str, float],
    failure: str,
    extras: Mapping[str, str],
) -> dict[str, Any]:
    """`versions`: [policy version, tokens] in order."""
    line: dict[str, Any] = {
        "step": response.group.round.step,
        "response": response.id,
        "set": response.group.set,
        "is_eval": response.group.round.is_eval,
        "prompt": prompt,
        "text": text,
        "reward": reward,
        "parts": dict(parts),
        "finish_reason": response.finish_reason,
        "tokens": len(response.tokens),
        "versions": [list(span) for span in response.spans],
    }
    optional = {"extras": dict(extras), "failure": failure}
    return line | {name: value for name, value in optional.items() if value}
