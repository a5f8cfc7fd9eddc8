"""Trial of the reward functions before a run: a row of each set is scored with a right response,
made from its reference answer, and with a wrong one.

Owns the responses and the conclusion. The workers of a pool make the calls.
"""

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from lightrl.config.reward import Reward
from lightrl.config.values import shortened
from lightrl.data.layouts import answer_of
from lightrl.data.prompts import PromptSet
from lightrl.rewards.answers import GSM8K, answer_text, last_boxes
from lightrl.rewards.jobs import RewardJob, RewardResult
from lightrl.rewards.runner import RewardPool
from lightrl.rewards.score import NO_SCORE
from lightrl.rewards.worker import RewardSet

LOOKED_AT = 64  # rows of a set, for one with an answer and for another answer
# Marks that functions commonly search for, in one response.
MARKED = "<think>\n\n</think>\n\nAnswer: @\n#### @\n<answer>@</answer>\n\\boxed{@}"
WRONG_ANSWER = "I do not know."  # where no other row has another answer
WRONG_PROGRAM = "```python\nraise SystemExit(1)\n```"

# A right and a wrong response with their tokens, or a wrong one alone.
Pair: TypeAlias = Mapping[str, "array[int]"]


@dataclass(frozen=True, slots=True)
class FirstRow:
    """The row of a trial. `job`: of any response; `group_size`: responses of a prompt in a run."""

    name: str
    where: str
    functions: tuple[str, ...]
    group_size: int
    job: RewardJob
    pairs: tuple[Pair, ...]


def first_rows(
    sets: Iterable[tuple[PromptSet, RewardSet, int]], tokenizer: Any
) -> Iterator[FirstRow]:
    """The first row of each set with an answer, or else the first; no row of a set that drops all.
    `sets`: in the order of the pool, with the responses of a prompt in a run."""
    encode = partial(tokenizer, add_special_tokens=False)
    for index, (one, scored, size) in enumerate(sets):
        if not (rows := list(one.first(LOOKED_AT))):
            continue
        answers = [answer_of(row, one.settings.answer_key) for _, row in rows]
        texts = [answer_text(a) if isinstance(a, str | int | float) else None for a in answers]
        first = next((k for k, text in enumerate(texts) if text), 0)
        prompt, row = rows[first]
        found = pairs_of(scored.functions, row, texts[first:])
        pairs = tuple({t: array("i", encode(t)["input_ids"]) for t in pair} for pair in found)
        job = RewardJob(f"first row {index}", 0, prompt.text, row, array("i"), "stop", index)
        yield FirstRow(one.name, one.rows.where(prompt.index), scored.functions, size, job, pairs)


def pairs_of(
    functions: Sequence[str], row: Mapping[str, Any], answers: Sequence[str | None]
) -> tuple[tuple[str, ...], ...]:
    """A right and a wrong response, or a wrong one alone for a row without an answer; and a second
    pair if the functions may want another form. `answers`: of the row itself and of later ones.

    Example: pairs_of(("judge",), {}, ["4", "7"]) is (("4", "7"),).
    """
    if "code" in functions:
        program = row.get("code") or row.get("solution")  # as in MBPP and KodCode
        if not (isinstance(program, str) and program.strip()):
            return ((WRONG_PROGRAM,),)
        return ((program if "```" in program else f"```python\n{program}\n```", WRONG_PROGRAM),)
    if not (right := answers[0]):
        return ((WRONG_ANSWER,),)
    others = (a for a in (*answers, WRONG_ANSWER) if a and final(a) != final(right))
    wrong = next(others, "")
    forms = "\\boxed{@}", MARKED
    boxed, marked = (tuple(f.replace("@", final(a)) for a in (right, wrong)) for f in forms)
    first = boxed if "math" in functions else (right, wrong)
    is_one = "judge" in functions or set(functions) <= {"exact_match", "math"}
    return (first,) if is_one else (first, marked)


def final(answer: str) -> str:
    """The end of an answer with its derivation: after "####", or in its last box."""
    if found := GSM8K.search(answer):
        return found[1].replace(",", "")
    return next((box for box in last_boxes(answer)[-1:] if box), answer)


@dataclass(frozen=True, slots=True)
class Tried:
    """`line`: the responses and their scores. `note`: why the functions cannot be used ("fail"), or
    may never reward a response ("warn"), in one line."""

    verdict: Literal["fail", "warn", "ok"]
    line: str
    note: str = ""


class Trials:
    """Tries rows in a running pool. `take` must get every result of the pool first."""

    def __init__(self, reward: Reward, patience_s: float = float("inf")) -> None:
        """After `patience_s` no second pair is tried, and nothing is concluded from the first."""
        self._on_failure, self._patience_s = reward.on_failure, patience_s
        self._reasons = {
            "timeout": f"takes longer than reward.timeout_s = {reward.timeout_s:g} s",
            "crashed": "the process of the reward function ended",
            NO_SCORE: "None is returned",
        }
        self._waiting: dict[str, asyncio.Future[RewardResult]] = {}

    def take(self, result: RewardResult) -> bool:
        """Return True for a result of a trial."""
        waiting = self._waiting.pop(result.response, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)
        return waiting is not None

    async def run(self, pool: RewardPool, rows: Sequence[FirstRow]) -> list[Tried]:
        return await asyncio.gather(*(self._try(pool, row) for row in rows))

    async def _try(self, pool: RewardPool, row: FirstRow) -> Tried:
        loop, tried = asyncio.get_running_loop(), list[Tried]()
        until = loop.time() + self._patience_s
        for pair in row.pairs:
            if tried and tried[-1].verdict != "fail" and loop.time() > until:
                return Tried("ok", tried[0].line)
            results = await self._score(pool, row, pair)
            tried.append(self._concluded(row, list(pair), results))
            if tried[-1].verdict == "ok" or results[-1].failure in ("timeout", "crashed"):
                break
        return max(tried, key=lambda each: ("fail", "warn", "ok").index(each.verdict))

    async def _score(self, pool: RewardPool, row: FirstRow, pair: Pair) -> list[RewardResult]:
        """Of each response of a pair, or of the first alone if it timed out."""
        size = row.group_size if pool.by_group[row.job.prompts] else 1
        texts, results = list(pair), list[RewardResult]()
        group = [texts[k % len(texts)] for k in range(size)]
        for call in [group] if size > 1 else [[text] for text in texts]:
            loop = asyncio.get_running_loop()
            futures = {f"{row.job.response} #{k}": loop.create_future() for k in range(len(call))}
            self._waiting.update(futures)
            jobs = zip(futures, call, strict=True)
            pool.submit(*(replace(row.job, response=n, tokens=pair[t]) for n, t in jobs))
            results += await asyncio.gather(*futures.values())
            if results[-1].failure == "timeout":
                break
        return results[: len(texts)]

    def _concluded(self, row: FirstRow, texts: list[str], results: list[RewardResult]) -> Tried:
        names = ("the right response", "the wrong one")[-len(texts) :]
        gets = [f"gets {self._worth(result)}" for result in results]
        parts = [f"{n} {shortened(t)} {g}" for n, t, g in zip(names, texts, gets, strict=False)]
        line = f"{row.name}: to {shortened(row.job.prompt_text)} ({row.where}) {', '.join(parts)}"
        has_right, failures = len(texts) > 1, [result.failure for result in results]
        if not has_right:
            line += "; the row has no right one to try"
        if all(failures) and (has_right or failures != [NO_SCORE]):
            note = f"{', '.join(row.functions)}: a response to {row.name} ({row.where}) {gets[0]}"
            if isinstance(self._on_failure, str):
                return Tried("fail", line, note)
            return Tried("warn", line, f"{note}; it gets reward.on_failure = {self._on_failure:g}")
        scores = [float("-inf") if result.reward is None else result.reward for result in results]
        if not has_right or scores[0] > scores[1]:
            return Tried("ok", line)
        note = f"{row.name}: a right response {gets[0]}, no more than a wrong one"
        if (made := results[0].text).split() != texts[0].split():
            note += f"; the model's tokenizer makes {shortened(made)} of it"
        then = "this set may never be rewarded"
        if scores[0] > 0:
            then = "they do not tell a right response from a wrong one"
        return Tried("warn", line, f"{note}: unless the functions want another form, {then}")

    def _worth(self, result: RewardResult) -> str:
        if result.reward is None:
            return f"no score ({self._reasons.get(result.failure, result.failure)})"
        parts = ", ".join(f"{name} {value:.4g}" for name, value in sorted(result.metrics.items()))
        return f"{result.reward:.4g}{f' ({parts})' if parts else ''}"
