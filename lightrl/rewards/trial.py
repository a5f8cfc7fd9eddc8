"""Reward functions tried before a run relies on them: one row of each set, with its own answer as
the response and with a wrong one.

Owns what is tried, and what is concluded from it: functions that never say anything cannot be
meant, those that pay a right response no more than a wrong one are in doubt. Calls no function
itself: a pool of workers does, as in a run.
"""

import asyncio
import json
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol, TypeVar

from lightrl.config.reward import Reward
from lightrl.data.layouts import answer_of
from lightrl.data.prompts import PromptSet
from lightrl.errors import RewardError
from lightrl.rewards.builtin import BUILTIN
from lightrl.rewards.forms import Pair, pairs
from lightrl.rewards.jobs import RewardJob, RewardResult
from lightrl.rewards.runner import RewardPool
from lightrl.rewards.score import NO_SCORE

LOOKED_AT = 256  # rows of a set, in search of one with an answer, and of another answer
NUM_OTHERS = 8
SHOWN_TEXT = 60  # characters
# Why there is no score, where another form of the response would change nothing.
TIMEOUT = "timeout"
HOPELESS = frozenset({TIMEOUT, "crashed"})
Result = TypeVar("Result")


class InTurn(Protocol):
    """What `act` returns, called in the thread that reads and tokenises."""

    async def __call__(self, act: Callable[[], Result]) -> Result: ...


@dataclass(frozen=True, slots=True)
class FirstRow:
    """What functions are tried with. `prompts`: index of the set in the pool; `others`: answers of
    other rows; `group_size`: responses of a prompt in a run."""

    prompts: int
    name: str
    where: str
    text: str
    row: dict[str, Any]
    answer: Any
    others: tuple[Any, ...]
    functions: tuple[str, ...]
    group_size: int


def first_row(
    prompts: int, one: PromptSet, functions: tuple[str, ...], group_size: int
) -> FirstRow | None:
    """The first row of a set with an answer; if there is none, the first. None: no row among the
    first is kept."""
    first: FirstRow | None = None
    others: list[Any] = []
    for prompt, row in one.first(LOOKED_AT):
        answer = answer_of(row, one.settings.answer_key)
        if first is None or (first.answer is None and answer is not None):
            where = one.rows.where(prompt.index)
            own = (prompts, one.name, where, prompt.text, row, answer)
            first = FirstRow(*own, (), functions, group_size)
        elif answer is not None and answer != first.answer:
            others.append(answer)
        if len(others) == NUM_OTHERS:
            break
    return None if first is None else replace(first, others=tuple(others))


@dataclass(frozen=True, slots=True)
class Attempt:
    """What two responses of one form got; `right` None: nobody knew one, `wrong` None: it was not
    tried, since the right one took all the time that there is."""

    pair: Pair
    right: RewardResult | None
    wrong: RewardResult | None

    @property
    def results(self) -> tuple[RewardResult, ...]:
        return tuple(result for result in (self.right, self.wrong) if result is not None)

    @property
    def pays(self) -> bool:
        """Whether the right one got more."""
        if self.right is None or self.right.reward is None or self.wrong is None:
            return False
        return self.wrong.reward is None or self.right.reward > self.wrong.reward

    @property
    def failures(self) -> list[str]:
        return [result.failure for result in self.results if result.failure]


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a row. `is_complete`: there is nothing more to try."""

    row: FirstRow
    attempts: tuple[Attempt, ...]
    is_complete: bool
    limit_s: float

    @property
    def best(self) -> Attempt:
        """The one to show: whose right response got more, else one with a score, else the first."""
        scored = [a for a in self.attempts if len(a.failures) < len(a.results)]
        return next((a for a in self.attempts if a.pays), (scored or self.attempts)[0])

    @property
    def failure(self) -> str:
        """Why no response had a score, in one line; "" if one had."""
        if not self.is_complete or any(len(a.failures) < len(a.results) for a in self.attempts):
            return ""
        why = self.attempts[0].failures[0]
        if why == NO_SCORE and self.best.right is None:
            return ""  # of a row without an answer nothing need be said
        functions = ", ".join(self.row.functions)
        forms = "a response" if self.best.right is None else "right and wrong responses"
        if self.best.wrong is None:
            forms = "the right response"
        return (
            f"{functions}: no score for {forms} to the first prompt of {self.row.name} "
            f"({self.row.where}): {self._reason(why)}"
        )

    @property
    def doubt(self) -> str:
        """Why the set may never be rewarded, in one line; "" if a right response got more."""
        if not self.is_complete or any(a.pays for a in self.attempts):
            return ""
        if self.best.right is None or self.best.wrong is None:
            return ""
        tried = list(dict.fromkeys(a.pair.right or "" for a in self.attempts))
        forms = f"of its {len(tried)} forms that were tried ({', '.join(map(_quoted, tried[:3]))}"
        if len(tried) > 3:
            forms += ", ..."
        if len(tried) == 1:
            forms = f"as it was tried ({_quoted(tried[0])}"
        is_ours = all(name in BUILTIN for name in self.row.functions)
        unless = "" if is_ours else "unless your function wants another form, "
        return (
            f"{self.row.name}: the right answer to its first prompt, {forms}), gets no more than a "
            f"wrong one ({self._worth(self.best.wrong)}){self._unwritable()}: {unless}this set may "
            "never be rewarded"
        )

    def _unwritable(self) -> str:
        """Where the functions saw another response, since the model cannot write this one."""
        best = self.best
        if best.right is None or best.right.text.split() == (best.pair.right or "").split():
            return ""
        return f"; the model's tokenizer makes {_quoted(best.right.text)} of it"

    def sentence(self) -> str:
        """The prompt, the two responses and what they got."""
        best, row = self.best, self.row
        start = f"{row.name}: to {_quoted(row.text)} ({row.where}) "
        wrong = f"{_quoted(best.pair.wrong)} {self._gets(best.wrong)}"
        if best.right is None:
            return f"{start}the response {wrong}; {self._why_unknown()}"
        right = f"{_quoted(best.pair.right or '')} {self._gets(best.right)}"
        return f"{start}the right response {right}, the wrong one {wrong}"

    def _why_unknown(self) -> str:
        if self.row.functions == ("code",):
            return "no column has a program that passes the tests"
        if self.row.answer is None:
            return "the row has no answer to try as a right one"
        return "its answer is no text that could be tried as a right one"

    def _gets(self, result: RewardResult | None) -> str:
        return "was not tried" if result is None else f"gets {self._worth(result)}"

    def _worth(self, result: RewardResult) -> str:
        if result.reward is None:
            return f"no score ({self._reason(result.failure)})"
        parts = ", ".join(f"{name} {value:.4g}" for name, value in sorted(result.metrics.items()))
        return f"{result.reward:.4g}{f' ({parts})' if parts else ''}"

    def _reason(self, failure: str) -> str:
        if failure == TIMEOUT:
            return f"takes longer than reward.timeout_s = {self.limit_s:g} s"
        if failure == "crashed":
            return "the process of the reward function ended"
        return "None is returned" if failure == NO_SCORE else failure


def doubts(reward: Reward, tried: Tried) -> list[str]:
    """Lines to say. Raises RewardError, one line, for functions that never give a score, unless
    `reward.on_failure` is one."""
    if not tried.failure:
        return [tried.doubt] if tried.doubt else []
    if isinstance(reward.on_failure, str):
        raise RewardError(tried.failure)
    return [f"{tried.failure}; what fails gets reward.on_failure = {reward.on_failure:g}"]


class Trials:
    """Tries rows in a pool that is served meanwhile, of which `take` sees every result first."""

    def __init__(self, reward: Reward, tokenizer: Any, in_turn: InTurn) -> None:
        """`in_turn` calls what uses the tokenizer, which is made for one thread."""
        self._reward = reward
        self._tokenizer = tokenizer
        self._in_turn = in_turn
        self._waiting: dict[str, asyncio.Future[RewardResult]] = {}
        self._numbers = count()

    def take(self, result: RewardResult) -> bool:
        """Whether it is of a trial."""
        waiting = self._waiting.pop(result.response, None)
        if waiting is None:
            return False
        if not waiting.done():
            waiting.set_result(result)
        return True

    async def run(
        self, pool: RewardPool, rows: Sequence[FirstRow], patience_s: float = math.inf
    ) -> list[Tried]:
        """Each until a right response gets more than a wrong one; no further form is tried after
        `patience_s`."""
        return await asyncio.gather(*(self._try(pool, row, patience_s) for row in rows))

    async def _try(self, pool: RewardPool, row: FirstRow, patience_s: float) -> Tried:
        by_group = pool.by_group[row.prompts]
        tries = await self._in_turn(
            lambda: [(pair, self._calls(row, pair, by_group)) for pair in self._pairs(row)]
        )
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        attempts: list[Attempt] = []
        is_complete = True
        for pair, calls in tries:
            if attempts and loop.time() > until:
                is_complete = False
                break
            results = await self._results(pool, calls)
            if pair.right is None:
                right, wrong = None, results[0]
            else:
                right, wrong = results[0], next(iter(results[1:]), None)
            attempts.append(Attempt(pair, right, wrong))
            failures = attempts[-1].failures
            is_hopeless = len(failures) == len(attempts[-1].results) and set(failures) <= HOPELESS
            if attempts[-1].pays or is_hopeless:
                break
        return Tried(row, tuple(attempts), is_complete, self._reward.timeout_s)

    def _pairs(self, row: FirstRow) -> list[Pair]:
        """Without those that the tokenizer cannot write, if it can one."""
        found = pairs(row.functions, self._reward, row.row, row.answer, row.others)
        return [p for p in found if p.right is None or self._can_write(p.right)] or [found[0]]

    def _can_write(self, text: str) -> bool:
        return self._tokenizer.decode(self._encoded(text)).split() == text.split()

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _calls(self, row: FirstRow, pair: Pair, by_group: bool) -> list[list[RewardJob]]:
        """The right one first."""
        texts = [pair.wrong] if pair.right is None else [pair.right, pair.wrong]
        if by_group and row.group_size > 1:
            # as many as in a run, right and wrong in turn
            texts_of_group = [texts[k % len(texts)] for k in range(row.group_size)]
            return [[self._job(row, text) for text in texts_of_group]]
        return [[self._job(row, text)] for text in texts]

    def _job(self, row: FirstRow, text: str) -> RewardJob:
        name = f"first row #{next(self._numbers)}"
        tokens = array("i", self._encoded(text))
        return RewardJob(name, 0, row.text, row.row, tokens, "stop", row.prompts)

    async def _results(
        self, pool: RewardPool, calls: Sequence[Sequence[RewardJob]]
    ) -> list[RewardResult]:
        """One call after the other: where one hangs, the next would take as long."""
        loop = asyncio.get_running_loop()
        results: list[RewardResult] = []
        for call in calls:
            futures = {job.response: loop.create_future() for job in call}
            self._waiting.update(futures)
            pool.submit(*call)
            results += await asyncio.gather(*futures.values())
            if any(result.failure == TIMEOUT for result in results):
                break
        return results


def _quoted(text: str) -> str:
    """As JSON, the middle left out of a long one."""
    if len(text) > SHOWN_TEXT:
        text = f"{text[: SHOWN_TEXT // 2]} ... {text[-SHOWN_TEXT // 2 :]}"
    return json.dumps(text, ensure_ascii=False)
