"""Jobs and results of the reward pool. Data only."""

from array import array
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class RewardJob:
    """A finished response. `row`: all columns of its prompt. `tokens` is copied only when a worker
    gets the job. `prompts`: index of the set of its prompt. `step`, `epoch`: of the run.

    Example: RewardJob("p7@0#3", 1, "39%3=", {"answer": "36"}, array("i", [5, 8, 1]), "stop")
    """

    response: str
    # of the response; in the result too, so that a late one is recognised
    attempt: int
    prompt_text: str
    row: dict[str, Any]
    tokens: "array[int]"
    finish_reason: str
    prompts: int = 0
    step: int = 0
    epoch: int = 0
    # seconds of the slowest test of a right answer to the prompt so far; None = not known
    slowest_s: float | None = None


# Responses of one prompt that are scored together, often a single one.
Jobs: TypeAlias = tuple[RewardJob, ...]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`reward` is None exactly if `failure` is not empty.

    `failure`: "" = scored, "no score" = the functions returned None, "timeout", "crashed", or the
    exception in one line, e.g. "ValueError: could not convert string to float: 'x'".
    """

    response: str
    attempt: int
    reward: float | None
    metrics: dict[str, float]
    # decoded response, cut at worker.MAX_TEXT characters; "" after a timeout or crash
    text: str
    # of its call, divided by the responses in it
    duration_s: float
    failure: str
    # logged by the functions, by column
    extras: dict[str, str] = field(default_factory=dict)
