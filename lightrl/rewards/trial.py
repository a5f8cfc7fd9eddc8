"""Trial of the reward functions before a run: one row of each set is scored with its reference
answer as the response, and with an empty one. The workers of a pool make the calls.
"""

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightrl.config.reward import Reward
from lightrl.config.values import shortened
from lightrl.data.layouts import answer_of
from lightrl.data.prompts import PromptSet
from lightrl.rewards.answers import GSM8K, answer_text, last_boxes
from lightrl.rewards.protocol import RewardJob, RewardResult, RewardSet
from lightrl.rewards.runner import RewardPool
from lightrl.rewards.score import NO_SCORE

MAX_ROWS = 64  # of a set, to find one with an answer
# Marks that functions of users commonly search for, in one response.
MARKED = "<think>\n\n</think>\n\nAnswer: @\n#### @\n<answer>@</answer>\n\\boxed{@}"
UNKNOWN = "I do not know."  # where no right response is known; functions may fail on an empty one


@dataclass(frozen=True, slots=True)
class FirstRow:
    """The row of a trial. `job`: of any response; `group_size`: responses of a prompt in a run."""

    name: str
    where: str
    functions: tuple[str, ...]
    group_size: int
    job: RewardJob
    # with their tokens: right ones and "", or UNKNOWN alone for a row without an answer
    responses: "dict[str, array[int]]"


def first_rows(
    sets: Iterable[tuple[PromptSet, RewardSet, int]], tokenizer: Any
) -> Iterator[FirstRow]:
    """Yield the first row of each set with an answer, or else the first; none of a set that drops
    all. `sets`: in the order of the pool, with the responses of a prompt in a run."""
    for index, (one, scored, size) in enumerate(sets):
        if not (prompts := list(one.first(MAX_ROWS))):
            continue
        key = one.settings.answer_key
        rights = [right_responses(scored.functions, p.row, answer_of(p.row, key)) for p in prompts]
        first = next((k for k, right in enumerate(rights) if right), 0)
        prompt = prompts[first]
        tokens = {
            text: array("i", tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in ((*rights[first], "") if rights[first] else (UNKNOWN,))
        }
        job = RewardJob(f"first row {index}", 0, prompt.text, prompt.row, array("i"), "stop", index)
        yield FirstRow(one.name, one.rows.where(prompt.index), scored.functions, size, job, tokens)


def right_responses(functions: Sequence[str], row: Mapping[str, Any], answer: Any) -> list[str]:
    """Return responses of which the functions should reward one: the answer, in the form of a
    built-in function, or as it is and with all marks. Empty for a row without an answer.

    Example: right_responses(("math",), {}, "so it is 4 #### 4") == ["\\boxed{4}"]
    """
    if "code" in functions:
        program = row.get("code") or row.get("solution")  # as in MBPP and KodCode
        if not isinstance(program, str) or not program.strip():
            return []
        return [program if "```" in program else f"```python\n{program}\n```"]
    text = answer_text(answer) if isinstance(answer, str | int | float) else None
    if not text:
        return []
    if "math" in functions:
        return [f"\\boxed{{{final(text)}}}"]
    is_plain = "judge" in functions or set(functions) == {"exact_match"}
    return [text] if is_plain else [text, MARKED.replace("@", final(text))]


def final(answer: str) -> str:
    """Return the end of an answer with its derivation: after "####", or in its last box."""
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
    score: float = float("-inf")  # of a right response that is in the note


class Trials:
    """Tries rows in a running pool. `take` must get every result of the pool first."""

    def __init__(self, reward: Reward) -> None:
        self._on_failure = reward.on_failure
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
        rights, tried = list(row.responses)[:-1], list[Tried]()
        for text in rights or row.responses:
            pair = await self._score(pool, row, [text, ""] if rights else [text])
            tried.append(self._concluded(row, text, pair))
            if tried[-1].verdict == "ok" or pair[-1].failure == "timeout":  # once is enough
                break
        return max(tried, key=lambda t: (("fail", "warn", "ok").index(t.verdict), t.score))

    async def _score(self, pool: RewardPool, row: FirstRow, texts: list[str]) -> list[RewardResult]:
        """Of the first and the last text; functions by group get both alternately in one call."""
        size = row.group_size if pool.by_group[row.job.prompts] else 1
        results = list[RewardResult]()
        for call in [(texts * size)[:size]] if size > 1 else [[text] for text in texts]:
            futures = {f"{row.job.response} #{k}": asyncio.Future() for k in range(len(call))}
            self._waiting |= futures
            jobs = zip(futures, call, strict=True)
            pool.submit(*(replace(row.job, response=n, tokens=row.responses[t]) for n, t in jobs))
            results += await asyncio.gather(*futures.values())
            if results[-1].failure == "timeout":
                break
        return [results[0], results[:2][-1]]

    def _concluded(self, row: FirstRow, text: str, pair: list[RewardResult]) -> Tried:
        (right, other), has_right = pair, len(row.responses) > 1
        gets, other_gets = (f"gets {self._worth(result)}" for result in pair)
        line = f"{row.name}: to {shortened(row.job.prompt_text)} ({row.where}) "
        if has_right:
            line += f"the right response {shortened(text)} {gets}, an empty one {other_gets}"
        else:
            line += f"the response {shortened(text)} {gets}; the row has no right one to try"
        if right.failure and other.failure and (has_right or right.failure != NO_SCORE):
            note = f"{', '.join(row.functions)}: a response to {row.name} ({row.where}) {gets}"
            if isinstance(self._on_failure, str):
                return Tried("fail", line, note)
            return Tried("warn", line, f"{note}; it gets reward.on_failure = {self._on_failure:g}")
        scores = [float("-inf") if r.reward is None else r.reward for r in (right, other)]
        if not has_right or scores[0] > scores[1]:
            return Tried("ok", line)
        note = f"{row.name}: a right response {gets}, no more than an empty one"
        if (made := right.text).split() != text.split():
            note += f"; the model's tokenizer makes {shortened(made)} of it"
        return Tried("warn", line, f"{note}: do the functions want another form?", scores[0])

    def _worth(self, result: RewardResult) -> str:
        if result.reward is None:
            return f"no score ({self._reasons.get(result.failure, result.failure)})"
        parts = ", ".join(f"{name} {value:.4g}" for name, value in sorted(result.metrics.items()))
        return f"{result.reward:.4g}{f' ({parts})' if parts else ''}"
