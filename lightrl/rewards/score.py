"""Calls the reward functions on responses of one prompt and adds up what they say.

Owns the sum, and what an exception means: no score, with the reason, for the responses of that call
alone. Runs in the reward worker only; watches no clock.
"""

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.errors import RewardError
from lightrl.rewards.base import (
    CallLog,
    RewardFunction,
    Sample,
    TrainerState,
    read_answer,
    read_answers,
    why_no_score,
)
from lightrl.rewards.no_loop import no_running_loop
from lightrl.wire import fits_f32

NO_SCORE = "no score"  # every function said None
MAX_EXTRA = 200  # characters of a value that a function logs beside its scores


@dataclass(slots=True)
class Score:
    """What the functions say about one sample. `failure` "" = `reward` is a score, which may be 0;
    else why there is none, in one line."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # what else they returned, and columns of TRL's log_extra
    extras: dict[str, str] = field(default_factory=dict)
    failure: str = ""


async def score(
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
    samples: Sequence[Sample],
    state: TrainerState = TrainerState(),  # noqa: B008
    begin: Callable[[], None] = lambda: None,
    on_error: Callable[[], None] = lambda: None,
) -> list[Score]:
    """The weighted sum of all functions for each sample; one that says None is left out, all None =
    no score. One that fails for a sample costs that sample its score, since the others' sum would
    mean something else.

    `begin` is called before each call of user code, `on_error` where an exception can be logged.
    """
    scores = [Score() for _ in samples]
    pairs = zip(functions, weights, strict=True)
    calls = [_Calls(f, w, samples, scores, state, begin, on_error) for f, w in pairs]
    prefixed = len(functions) > 1
    if any(f.is_async for f in functions):
        # those that wait overlap
        await asyncio.gather(*(c.run(prefixed) for c in calls))
    else:
        for c in calls:
            await c.run(prefixed)
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
class _Calls:
    """All calls of one function."""

    function: RewardFunction
    weight: float
    samples: Sequence[Sample]
    scores: list[Score]
    state: TrainerState
    begin: Callable[[], None]
    on_error: Callable[[], None]

    async def run(self, is_one_of_several: bool) -> None:
        each = [[k] for k in range(len(self.samples))]
        parts = [list(range(len(self.samples)))] if self.function.takes_list else each
        prefix = f"{self.function.name}/" if is_one_of_several else ""
        if self.function.is_async:
            await asyncio.gather(*(self._call(part, prefix) for part in parts))
        else:
            for part in parts:
                await self._call(part, prefix)

    async def _call(self, part: list[int], prefix: str) -> None:
        """Of the samples with these indices, at once; when it is their turn."""
        async with self.function.turns:
            await self._call_now(part, prefix)

    async def _call_now(self, part: list[int], prefix: str) -> None:
        log = CallLog()
        samples = [self.samples[k] for k in part]
        try:
            self.begin()
            with contextlib.nullcontext() if self.function.is_async else no_running_loop():
                answer = self.function.call(samples, self.state, log)
            if asyncio.iscoroutine(answer) or hasattr(answer, "__await__"):
                answer = await answer
            answers = read_answers(answer, len(part)) if self.function.takes_list else [answer]
        except BaseException as e:  # user code may exit or interrupt its process
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by the time limit of the call
            self.on_error()
            for k in part:
                self._fail(k, one_line(e))
            return
        for k, one in zip(part, answers, strict=True):
            self._add(k, one, prefix)
        self._log(log, part)

    def _add(self, k: int, answer: Any, prefix: str) -> None:
        try:
            value, figures, texts = read_answer(answer)
        except RewardError as e:
            self._fail(k, f"{self.function.name}: {e}")
            return
        mine = self.scores[k]
        if value is not None:
            mine.reward = (mine.reward or 0.0) + self.weight * value
            if prefix:
                mine.metrics[self.function.name] = value
        mine.metrics.update((prefix + key, figure) for key, figure in figures.items())
        mine.extras.update((prefix + key, _shown(text)[:MAX_EXTRA]) for key, text in texts.items())

    def _log(self, log: CallLog, part: list[int]) -> None:
        """A metric is one of every sample of the call, so that its mean is the mean."""
        for name, values in log.metrics.items():
            if not (finite := [value for value in values if fits_f32(value)]):
                continue
            mean = math.fsum(finite) / len(finite)
            for k in part:
                self.scores[k].metrics[name] = mean
        for column, values in log.extras.items():
            for k, value in zip(part, values, strict=False):
                self.scores[k].extras[column] = _shown(value)[:MAX_EXTRA]

    def _fail(self, k: int, why: str) -> None:
        """The first reason counts."""
        self.scores[k].failure = self.scores[k].failure or why


def _shown(value: object) -> str:
    """As text that UTF-8 can encode: without lone surrogates."""
    try:
        return str(value).encode(errors="backslashreplace").decode()
    except Exception:  # of a __str__ of the user's
        return f"{type(value).__name__} without text"


def one_line(e: BaseException) -> str:
    """Example: "ValueError: could not convert string to float: 'x'"."""
    lines = _shown(e).strip().splitlines()
    if isinstance(e, RewardError):
        return lines[0][:300]
    if isinstance(e, SystemExit) and (said := getattr(sys.stderr, "last_line", "")):
        lines = [f"{e.code}; the last line on stderr is {said!r}"] if e.code != str(e) else lines
    return f"{type(e).__name__}: {lines[0]}"[:300] if lines else type(e).__name__
