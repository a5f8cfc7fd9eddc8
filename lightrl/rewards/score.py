"""Call the reward functions on responses of one prompt and add up their answers.

Owns the sum, and what an exception means: no score, with the reason, for the responses of that call
alone. Runs in the reward worker only; watches no clock.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.errors import RewardError
from lightrl.rewards.base import (
    CallLog,
    RewardFunction,
    RunProgress,
    Sample,
    read_answer,
    read_answers,
    why_no_score,
)
from lightrl.wire import fits_f32

NO_SCORE = "no score"  # every function returned None
MAX_EXTRA = 200  # characters of a value that a function logs beside its scores
MAX_LINE = 300  # of the text of an exception


@dataclass(slots=True)
class Score:
    """The sum for one sample. `failure` "" = `reward` is a score, which may be 0; else why there is
    none, in one line."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # other returned values, and columns of TRL's log_extra
    extras: dict[str, str] = field(default_factory=dict)
    failure: str = ""


async def score(
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
    samples: Sequence[Sample],
    state: RunProgress = RunProgress(),  # noqa: B008
    begin: Callable[[], None] = lambda: None,
    on_error: Callable[[], None] = lambda: None,
) -> list[Score]:
    """The weighted sum of all functions for each sample; a None is left out, all None = no score. A
    function that fails for a sample costs that sample its score, since the sum of the others would
    mean something else.

    `begin` is called before each call of user code, `on_error` where an exception can be logged.
    """
    scores = [Score() for _ in samples]
    prefixed = len(functions) > 1
    calls = [
        _call(
            _Call(f, w, f"{f.name}/" if prefixed else "", [(samples[k], scores[k]) for k in part]),
            state,
            begin,
            on_error,
        )
        for f, w in zip(functions, weights, strict=True)
        for part in ([range(len(samples))] if f.takes_list else [[k] for k in range(len(samples))])
    ]
    if any(f.is_async for f in functions):
        await asyncio.gather(*calls)
    else:
        for each in calls:
            await each
    for each in scores:
        if each.failure:
            each.reward = None
        elif each.reward is None:
            each.failure = NO_SCORE
        elif why := why_no_score(each.reward):
            names = ", ".join(f.name for f in functions)
            each.reward, each.failure = None, f"the sum of {names} is {why}"
    return scores


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of one function. `prefix`: of its figures, if there are several functions."""

    function: RewardFunction
    weight: float
    prefix: str
    pairs: list[tuple[Sample, Score]]


async def _call(
    one: _Call, state: RunProgress, begin: Callable[[], None], on_error: Callable[[], None]
) -> None:
    function, log = one.function, CallLog()
    async with function.turns:
        try:
            begin()
            with contextlib.nullcontext() if function.is_async else no_running_loop():
                answer = function.call([sample for sample, _ in one.pairs], state, log)
            if asyncio.iscoroutine(answer) or hasattr(answer, "__await__"):
                answer = await answer
            answers = read_answers(answer, len(one.pairs)) if function.takes_list else [answer]
        except BaseException as e:  # user code may exit or interrupt its process
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by the time limit of the call
            on_error()
            for _, mine in one.pairs:
                mine.failure = mine.failure or one_line(e)
            return
    for (_, mine), answer in zip(one.pairs, answers, strict=True):
        try:
            _add(one, mine, answer)
        except RewardError as e:
            mine.failure = mine.failure or f"{function.name}: {e}"
    _add_log(log, [mine for _, mine in one.pairs])


def _add(one: _Call, mine: Score, answer: Any) -> None:
    value, figures, texts = read_answer(answer)
    if value is not None:
        mine.reward = (mine.reward or 0.0) + one.weight * value
        if one.prefix:
            mine.metrics[one.function.name] = value
    mine.metrics.update((one.prefix + key, figure) for key, figure in figures.items())
    mine.extras.update((one.prefix + key, _shown(text)) for key, text in texts.items())


def _add_log(log: CallLog, scores: Sequence[Score]) -> None:
    """Every sample of the call gets the mean of a metric, so that the mean of all is right."""
    for name, values in log.metrics.items():
        if finite := [value for value in values if fits_f32(value)]:
            for each in scores:
                each.metrics[name] = math.fsum(finite) / len(finite)
    for column, values in log.extras.items():
        for each, value in zip(scores, values, strict=False):
            each.extras[column] = _shown(value)


def _shown(value: object, limit: int = MAX_EXTRA) -> str:
    """Return the text of `value` in a form that UTF-8 can encode, without lone surrogates."""
    try:
        return str(value).encode(errors="backslashreplace").decode()[:limit]
    except Exception:  # of a __str__ of the user's
        return f"{type(value).__name__} without text"


def one_line(e: BaseException) -> str:
    """Example: "ValueError: could not convert string to float: 'x'"."""
    first = next(iter(_shown(e, MAX_LINE).strip().splitlines()), "")
    if isinstance(e, RewardError):
        return first
    return f"{type(e).__name__}: {first}" if first else type(e).__name__


@contextlib.contextmanager
def no_running_loop() -> Iterator[None]:
    """Within it this thread has no running loop and no current task, so that user code can call
    `asyncio.run`, and limit its time by signals, which only the main thread receives. Must be
    entered in a task; no await inside."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    # see "Extending" in the documentation of asyncio
    asyncio._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio._enter_task(loop, task)
