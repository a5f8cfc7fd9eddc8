"""The input of a reward function, and how its answer is read.

Owns `Sample`, the interface of a function to its caller, and the rules for a score. Must not use
processes, pipes or the tokenizer. Recognised functions are in signatures.py.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightrl.errors import RewardError
from lightrl.rewards.episodes import Messages, SampledTurn
from lightrl.wire import fits_f32

# of a dict that a function returns; verl takes "score", whatever else there is
SCORE_KEYS = ("score", "reward")
SLOWEST = "slowest_s"  # figure of a right answer to the reward "code"


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished response, the argument of a native reward function.

    Example: Sample("39%3=", "36,33", answer="36,33", row={"prompt": "39%3="}, response_ids=[5, 8,
    1], finish_reason="stop")
    """

    # text, chat template applied; of an episode that before its first turn
    prompt: str
    # text, special tokens left out; of an episode that of its last turn
    response: str
    # column data.answer_key, or that of the data set's layout; None if there is none
    answer: Any
    # all columns
    row: dict[str, Any]
    # of an episode from the first turn on, with what its environment inserted
    response_ids: list[int]
    # "stop" or "length"
    finish_reason: str
    # of the reward "code": seconds of the slowest test of a right answer to the prompt in the run;
    # None = not known
    slowest_s: float | None = None
    # the whole chat; empty where the prompt is text
    messages: Messages = field(default_factory=Messages)
    # of the model
    turns: list[SampledTurn] = field(default_factory=list[SampledTurn])
    # of an episode; None = its environment gave none
    environment_reward: float | None = None


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of the run, in TRL's names."""

    # steps done
    global_step: int = 0
    max_steps: int = 0
    # times that this prompt was drawn before
    epoch: float = 0.0


@dataclass(slots=True)
class CallLog:
    """Figures and texts beside the scores, from TRL's `log_metric` and `log_extra`."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: list[Any]) -> None:
        self.extras.setdefault(column, []).extend(values)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function behind one calling convention."""

    name: str
    # may return an awaitable; samples of one prompt
    call: Callable[[Sequence[Sample], RunProgress, CallLog], Any]
    is_async: bool
    # one score for each of many samples; else it is called with one at a time
    takes_list: bool = False
    # held during a call, to limit concurrent ones; the time limit starts after it is acquired
    turns: contextlib.AbstractAsyncContextManager[Any] = field(
        default_factory=contextlib.nullcontext
    )
    # keys of reward.kwargs that it gets
    taken: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a set of prompts."""

    names: frozenset[str]
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    # whether any row has a reference answer
    have_answers: bool = True
    # as data.as_chat and data.system_prompt
    as_chat: bool = False
    system_prompt: str = ""

    def __str__(self) -> str:
        return f"the columns are {', '.join(sorted(self.names)) or 'none'}"


def read_answers(answer: Any, count: int) -> list[Any]:
    """The parts of a list, tuple, array or tensor that a function of `count` samples returned.

    Raises RewardError for any other type or length.
    """
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        if count == 1:
            return [answer]
        raise RewardError(f"returned {type(answer).__name__}, not a list of {count} scores")
    if len(answer) != count:
        raise RewardError(f"returned {len(answer)} scores for {count} responses")
    return list(answer)


class Answer(NamedTuple):
    """A function's value for one sample. `texts`: its entries that are not finite float32s."""

    score: float | None
    figures: dict[str, float]
    texts: dict[str, Any]


def read_answer(answer: Any) -> Answer:
    """Read the answer of a reward function for one sample. Raises RewardError if invalid."""
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    if not isinstance(answer, Mapping):
        return Answer(_score_number(answer), {}, {})
    key = next((k for k in SCORE_KEYS if k in answer), None)
    if key is None:
        raise RewardError(
            f'the dict has no "reward" or "score"; its keys are {", ".join(map(str, answer))}'
        )
    figures: dict[str, float] = {}
    texts: dict[str, Any] = {}
    for name, value in answer.items():
        if name != key:
            number = _number(value)
            if number is not None and fits_f32(number):
                figures[str(name)] = number
            else:
                texts[str(name)] = value
    return Answer(_score_number(answer[key]), figures, texts)


def _score_number(value: Any) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if number is None:
        raise RewardError(f"returned {type(value).__name__}, not a number, dict or None")
    if why := why_no_score(number):
        raise RewardError(f"returned {why}")
    return number


def why_no_score(number: float) -> str:
    """Why it cannot be a score, or "". Example: "nan, which is not finite"."""
    if fits_f32(number):
        return ""
    why = "is outside the range of float32" if math.isfinite(number) else "is not finite"
    return f"{number}, which {why}"


def _number(value: Any) -> float | None:
    """Numbers, bools and one-element arrays or tensors as a float; None for everything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:  # an int
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several elements
        return None
