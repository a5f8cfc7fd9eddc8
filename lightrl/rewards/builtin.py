"""The table of built-in reward functions, and the functions that are in no file of their own.

They have the native signature and run in the reward worker. Must not import optional libraries
before they are chosen.
"""

import asyncio
import difflib
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightrl.config.reward import VERIFIERS, Reward
from lightrl.errors import RewardError
from lightrl.rewards.answers import answer_text, is_answer, math_reward
from lightrl.rewards.base import Columns, RewardFunction, Sample
from lightrl.rewards.load import import_function
from lightrl.rewards.signatures import no_answers, wrap


def exact_match(sample: Sample) -> float | None:
    """1 if the whole response is the answer and ended by itself, else 0. None for a row without an
    answer."""
    if answer_text(sample.answer) is None:
        return None
    right = is_answer(sample.response, sample.answer)
    return float(right and sample.finish_reason == "stop")


def regex_reward(pattern: str) -> Callable[[Sample], float | None]:
    """1 if the last match of `pattern` in the response holds the answer in its first group, else 0;
    without a group, 1 if there is a match. None for a row without an answer that is needed."""
    compiled = re.compile(pattern)

    def regex(sample: Sample) -> float | None:
        if not compiled.groups:
            return float(compiled.search(sample.response) is not None)
        if answer_text(sample.answer) is None:
            return None
        matches = list(compiled.finditer(sample.response))
        found = (matches[-1][1] or "") if matches else None
        return float(found is not None and is_answer(found, sample.answer))

    return regex


def _load_math(reward: Reward) -> Callable[[Sample], Any]:
    try:
        importlib.import_module("math_verify")
    except ModuleNotFoundError as e:
        raise RewardError(
            f"reward \"math\" needs {e.name}, which is not installed: pip install 'lightrl[math]'"
        ) from None
    return math_reward


def _load_code(reward: Reward) -> Callable[[Sample], Any]:
    from lightrl.rewards.code.reward import CodeReward
    from lightrl.rewards.code.sandbox import Limits

    code, mib = reward.code, 1 << 20
    limits = Limits(code.memory_mb * mib, code.disk_mb * mib, processes=code.processes)
    return CodeReward(reward.timeout_s, code.partial, limits, not code.unisolated, code.packages)


def _load_judge(reward: Reward) -> Callable[[Sample], Any]:
    from lightrl.rewards.judge import JudgeReward

    name = reward.judge.key_env
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise RewardError(f"reward.judge.key_env = {name!r}: this environment variable is not set")
    function = JudgeReward(reward.judge, key, reward.timeout_s, reward.workers)
    asyncio.run(function.check())
    return function


BUILTIN: dict[str, Callable[[Reward], Callable[[Sample], Any]]] = {
    "exact_match": lambda reward: exact_match,
    "regex": lambda reward: regex_reward(reward.regex),
    "math": _load_math,
    "code": _load_code,
    "judge": _load_judge,
}


def needs_answer(name: str, reward: Reward) -> bool:
    """Return whether this built-in compares with an answer. Tests of programs may be in other
    columns, and a judge may need no answer."""
    if name == "regex":
        return bool(re.compile(reward.regex).groups)
    return name not in {"code", "judge"}


def load_function(
    reference: str,
    reward: Reward | None = None,
    columns: Columns | None = None,
    loaded: dict[str, Callable[[Sample], Any]] | None = None,
) -> RewardFunction:
    """A built-in by its name, the user's "path.py:function" or the rubric of "verifiers:ENV", for
    rows with these columns. Raises RewardError, one line.

    `loaded`: built-in functions of this process, which share their limits; this one is added."""
    reward = reward or Reward()
    loaded = {} if loaded is None else loaded
    load = BUILTIN.get(reference)
    if load is not None:
        if columns is not None and not columns.have_answers and needs_answer(reference, reward):
            raise no_answers(f"reward {reference!r} compares with an answer", columns)
        if reference not in loaded:
            loaded[reference] = load(reward)
        return replace(wrap(loaded[reference], reference), name=reference)
    if reference.startswith(VERIFIERS):
        from lightrl.rewards.rubrics import load_rubric

        return load_rubric(reference.removeprefix(VERIFIERS), columns)
    if ":" not in reference:
        close = difflib.get_close_matches(reference, BUILTIN, n=1)
        hint = f"did you mean {close[0]}?" if close else f"built-in are {', '.join(BUILTIN)}"
        raise RewardError(f'{reference!r}: no such reward; {hint} (or give "path.py:function")')
    function = import_function(reference)
    return wrap(function, reference, columns, reward.kwargs, reward.form)
