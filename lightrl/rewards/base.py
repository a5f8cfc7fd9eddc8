"""What a reward function may look like and how its answer is read: the border between us and user
code.

Owns `Sample`, the three signatures that are recognised and the rules for a score. Runs in the
reward worker only, since it imports user code; must not know processes, pipes or the tokenizer.
"""

import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.errors import RewardError

SIGNATURES = (
    "reward(sample), compute_score(data_source, solution_str, ground_truth, extra_info) "
    "or f(prompts, completions, **columns)"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished response, as a native reward function sees it.

    Example: Sample("39%3=", "36,33", answer="36,33", row={"prompt": "39%3="}, response_ids=[5, 8,
    1], finish_reason="stop")
    """

    # text, chat template applied
    prompt: str
    # text, special tokens left out
    response: str
    # column data.answer_key, or where the data set's layout keeps it; None if there is none
    answer: Any
    # all columns
    row: dict[str, Any]
    response_ids: list[int]
    # "stop" or "length"
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Score:
    """What the functions say about one sample; `reward` None = no score, which is not 0."""

    reward: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function behind one calling convention."""

    name: str
    # may return an awaitable
    call: Callable[[Sample], Any]
    is_async: bool


def wrap(function: Callable[..., Any], reference: str) -> RewardFunction:
    """Adapts `function` by its parameter names. Raises RewardError for an unknown signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"{reference}: is not a function; expected {SIGNATURES}") from None
    named = [n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    required = [n for n in named if parameters[n].default is inspect.Parameter.empty]
    accepts = None if open_ended else frozenset(named)

    def chosen(values: dict[str, Any]) -> dict[str, Any]:
        return values if accepts is None else {k: v for k, v in values.items() if k in accepts}

    if required == ["sample"]:
        call = function
    elif "completions" in named:

        def call(sample: Sample) -> Any:
            return function(**chosen(_trl_arguments(sample)))

    elif {"solution_str", "ground_truth"} <= set(named):

        def call(sample: Sample) -> Any:
            return function(**chosen(_verl_arguments(sample)))

    else:
        raise RewardError(
            f"{reference}({', '.join(parameters)}): unknown signature; expected {SIGNATURES}"
        )
    name = getattr(function, "__name__", reference)
    # An object with `async def __call__` is asynchronous too.
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the attribute is wanted, not whether it exists
    )
    return RewardFunction(name, call, is_async)


def _verl_arguments(sample: Sample) -> dict[str, Any]:
    return {
        "data_source": sample.row.get("data_source", ""),
        "solution_str": sample.response,
        "ground_truth": sample.answer,
        "extra_info": sample.row.get("extra_info") or {},
    }


def _trl_arguments(sample: Sample) -> dict[str, Any]:
    """A batch of one. Chat data sets get chat completions, as TRL's users expect."""
    prompt = sample.row.get("prompt")
    if isinstance(prompt, list):
        prompts, completions = [prompt], [[{"role": "assistant", "content": sample.response}]]
    else:
        prompts, completions = [sample.prompt], [sample.response]
    columns = {k: [v] for k, v in sample.row.items() if k not in ("prompt", "completion")}
    return {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [sample.response_ids],
    }


async def score(
    functions: Sequence[RewardFunction], weights: Sequence[float], sample: Sample
) -> Score:
    """The weighted sum of all functions; one that says None is left out, all None = no score.

    Raises whatever a function raises, and RewardError for an answer that is not a score.
    """
    total: float | None = None
    metrics: dict[str, float] = {}
    for function, weight in zip(functions, weights, strict=True):
        answer = function.call(sample)
        if isinstance(answer, Awaitable):
            answer = await answer
        value, entries = read_answer(answer)
        prefix = ""
        if len(functions) > 1:
            prefix = f"{function.name}/"
            if value is not None:
                metrics[function.name] = value
        metrics.update((prefix + key, entry) for key, entry in entries.items())
        if value is not None:
            total = (total or 0.0) + weight * value
    return Score(total, metrics)


def read_answer(answer: Any) -> tuple[float | None, dict[str, float]]:
    """A function's return value as (score, metrics). Raises RewardError for what is neither."""
    if isinstance(answer, list | tuple) and len(answer) == 1:  # TRL: one score per completion
        answer = answer[0]
    if not isinstance(answer, dict):
        return _score_number(answer), {}
    key = next((k for k in ("reward", "score") if k in answer), None)
    if key is None:
        raise RewardError(
            f'the dict has no "reward" or "score"; its keys are {", ".join(map(str, answer))}'
        )
    metrics = {str(k): n for k, v in answer.items() if k != key and (n := _number(v)) is not None}
    return _score_number(answer[key]), {k: v for k, v in metrics.items() if math.isfinite(v)}


def _score_number(value: Any) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if number is None:
        raise RewardError(f"returned {type(value).__name__}, not a number, dict or None")
    if not math.isfinite(number):
        raise RewardError(f"returned {number}, which is not finite")
    return number


def _number(value: Any) -> float | None:
    """Numbers, bools and one-element arrays or tensors as a float; None for everything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several elements
        return None


def import_function(reference: str) -> Callable[..., Any]:
    """The function "path.py:name" points at. Raises RewardError, one line, if there is none."""
    file, name = split_reference(reference)
    path = Path(file)
    if not path.is_file():
        raise RewardError(f"{reference}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{reference}: is not a Python file")
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours, as a script can
    sys.path.append(os.getcwd())  # and the project that it belongs to
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle in user code look their module up
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = [
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == path.stem
        ]
        raise RewardError(
            f"{reference}: no such function; {path.name} defines {', '.join(found) or 'none'}"
        )
    return function


def split_reference(reference: str) -> tuple[str, str]:
    """("path.py", "function"). Raises RewardError if `reference` does not look like that."""
    file, colon, name = reference.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise RewardError(f'{reference!r}: expected a built-in name or "path.py:function"')
    return file, name
