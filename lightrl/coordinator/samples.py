"""Write samples.jsonl: responses as text, with their scores. An optional file."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightrl.core.state import Response
from lightrl.errors import ProtocolError
from lightrl.metrics.round_figures import num_tool_calls
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

    def write(
        self,
        response: Response,
        prompt: str,
        result: RewardResult,
        chat: list[Messages] | None = None,
    ) -> None:
        """Append a response that was just scored. `chat`: as in `as_line`."""
        if self.is_wanted(response):
            self._file.append(to_json(as_line(response, prompt, result, chat)) + b"\n")

    def is_wanted(self, response: Response) -> bool:
        """Return whether a response belongs to the first groups of its step, in launch order."""
        group = response.group
        place = group.position * len(group.responses) + response.index
        return group.round.is_eval or place < self._number

    def close(self) -> None:
        self._file.close()


def as_line(
    response: Response, prompt: str, result: RewardResult, chat: list[Messages] | None = None
) -> dict[str, Any]:
    """Return a line. `parts`: further figures of the functions; `versions`: [policy version,
    tokens] in order; `extras`: logged by functions, by column; `failure`: why there is no
    reward. `chat`: what `messages_of` returns, if it was called before."""
    chat = messages_of(response) if chat is None else chat
    prompt, text = texts_of(chat, prompt, result)
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
        num_calls = num_tool_calls(response)
        line |= {"stop": outcome.stop, "turns": len(turns), "tool_calls": num_calls}
        line["turn_rewards"] = [*(turn.reward for turn in turns[1:]), outcome.turn_reward]
        line["environment_reward"] = outcome.reward
        line["messages"] = [m for part in chat for m in part]
    optional = {"extras": result.extras, "failure": result.failure}
    return line | {name: value for name, value in optional.items() if value}


def texts_of(chat: list[Messages], prompt: str, result: RewardResult) -> tuple[str, str]:
    """Return prompt and response for people. Those of an episode are its messages as text, of which
    the prompt is what its environment began with."""
    if not chat:
        return prompt, result.text
    return chat_text(chat[0]), chat_text([m for part in chat[1:] for m in part])


def messages_of(response: Response) -> list[Messages]:
    """Return the messages of an episode by observation, [[]] where a record cannot be read; [] for
    a single turn."""
    if response.outcome is None:
        return []
    try:
        records = [*(turn.record for turn in response.turns), response.outcome.record]
        return [read_messages(record) for record in records]
    except (ProtocolError, RecursionError):
        return [[]]
