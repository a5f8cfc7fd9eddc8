"""Write samples.jsonl: responses as text, with their scores. An optional file."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightrl.core.state import Response
from lightrl.errors import ProtocolError
from lightrl.rewards.episodes import Messages, chat_text, read_messages
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
    prompt, text = texts_of(response, prompt, result)
    line: dict[str, Any] = {
        "step": response.group.round.step,
        "response": response.id,
        "set": response.group.set,
        "is_eval": response.group.round.is_eval,
        "prompt": prompt,
        "text": text,
        "reward": result.reward,
        "parts": result.metrics,
        "finish_reason": response.finish_reason,
        "tokens": response.num_sampled,
        "versions": [list(span) for span in response.spans],
    }
    if (outcome := response.outcome) is not None:
        turns = response.turns
        num_calls = sum(turn.num_tool_calls for turn in turns) + outcome.num_tool_calls
        line |= {"stop": outcome.stop, "turns": len(turns), "tool_calls": num_calls}
        line["turn_rewards"] = [*(turn.reward for turn in turns[1:]), outcome.turn_reward]
        line["environment_reward"] = outcome.reward
        line["messages"] = [m for part in _messages_of(response) for m in part]
    optional = {"extras": result.extras, "failure": result.failure}
    return line | {name: value for name, value in optional.items() if value}


def texts_of(response: Response, prompt: str, result: RewardResult) -> tuple[str, str]:
    """Return prompt and response for people. Those of an episode are its messages as text, of which
    the prompt is what its environment began with."""
    if response.outcome is None:
        return prompt, result.text
    first, *others = _messages_of(response)
    return chat_text(first), chat_text([m for part in others for m in part])


def _messages_of(response: Response) -> list[Messages]:
    """Return the messages of an episode by observation; none where a record cannot be read."""
    outcome = response.outcome
    records = [turn.record for turn in response.turns] + [outcome.record if outcome else ""]
    try:
        return [read_messages(record) for record in records]
    except (ProtocolError, RecursionError):
        return [[]]
