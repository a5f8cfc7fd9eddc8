"""The reward functions that come with LightRL: one literal dict, nothing registers itself.

They have the native signature and run in the reward worker. Must not import optional libraries
before they are chosen.
"""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from lightrl.errors import RewardError
from lightrl.rewards.base import RewardFunction, Sample, import_function, wrap


def exact_match(sample: Sample) -> float | None:
    """1 if the whole response is the answer and ended by itself, else 0. None for a row without an
    answer."""
    if sample.answer is None:
        return None
    right = sample.response.strip() == str(sample.answer).strip()
    return float(right and sample.finish_reason == "stop")


def _load_math() -> Callable[[Sample], Any]:
    try:
        return importlib.import_module("lightrl.rewards.math").math_reward
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("lightrl"):
            raise
        raise RewardError(
            f"reward \"math\" needs {e.name}, which is not installed: pip install 'lightrl[math]'"
        ) from None


BUILTIN: dict[str, Callable[[], Callable[[Sample], Any]]] = {
    "exact_match": lambda: exact_match,
    "math": _load_math,
}


def load_function(reference: str) -> RewardFunction:
    """A built-in by its name, or the user's "path.py:function". Raises RewardError, one line."""
    load = BUILTIN.get(reference)
    if load is not None:
        return wrap(load(), reference)
    if ":" not in reference:
        close = difflib.get_close_matches(reference, BUILTIN, n=1)
        hint = f"did you mean {close[0]}?" if close else f"built-in are {', '.join(BUILTIN)}"
        raise RewardError(f'{reference!r}: no such reward; {hint} (or give "path.py:function")')
    return wrap(import_function(reference), reference)
