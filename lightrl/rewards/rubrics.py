"""Single-turn environments of the package `verifiers`: the rubric as a reward function, the data
set as rows.

Owns the parts of an environment that are used, by the names that `verifiers` documents (its classic
API, `verifiers<0.3`). An environment is user code: it is imported in the reward worker, and for its
rows in a process of their own (`python -m lightrl.rewards.rubrics ENV train`), never in a daemon.
"""

import importlib
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightrl.config.reward import Reward
from lightrl.config.values import VERIFIERS
from lightrl.errors import DataError, RewardError
from lightrl.rewards.base import (
    SCORE_KEYS,
    CallLog,
    Columns,
    RewardFunction,
    RunProgress,
    Sample,
    read_answer,
    read_answers,
)
from lightrl.rewards.load import distinct_names
from lightrl.rewards.protocol import inherited
from lightrl.rewards.score import one_line
from lightrl.rewards.signatures import Rubric, chosen, is_coroutine
from lightrl.wire import to_json

GROUP_PARAMETERS = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})
READ_LIMIT_S = 600.0  # of an environment that loads its data from a hub

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]


def load_environment(name: str) -> Any:
    """The environment of this name. Raises RewardError, one line, if there is none or it has
    several turns."""
    sys.path.append(os.getcwd())  # of a project whose environments are not installed
    reference = VERIFIERS + name
    try:
        verifiers = importlib.import_module("verifiers")
    except ModuleNotFoundError as e:
        raise RewardError(
            f"{reference}: needs {e.name}, which is not installed: pip install 'lightrl[verifiers]'"
        ) from None
    single = getattr(verifiers, "SingleTurnEnv", None)
    if single is None:
        raise RewardError(
            f"{reference}: verifiers has no SingleTurnEnv: pip install 'lightrl[verifiers]'"
        )
    try:
        environment = verifiers.load_environment(name)
    except BaseException as e:  # code of the user's
        logger.exception("%s", reference)
        raise RewardError(f"{reference}: cannot be loaded: {one_line(e)}") from None
    if not isinstance(environment, single):
        raise RewardError(
            f"{reference}: is a {type(environment).__name__}; a prompt has one response, so it "
            "must be a SingleTurnEnv"
        )
    return environment


@dataclass(frozen=True, slots=True)
class _Part:
    """One function of a rubric."""

    name: str
    function: Callable[..., Any]
    weight: float
    # shared by the functions of its rubric
    rubric: Rubric
    accepts: frozenset[str] | None
    takes_list: bool


def load_rubric(name: str, columns: Columns | None) -> RewardFunction:
    """All functions of an environment's rubric as one, with their weights. Functions of weight 0
    are figures, and may fail without an effect on the score."""
    parts = list(_parts(load_environment(name).rubric, columns or Columns(frozenset())))
    # names of figures: different from each other and from SCORE_KEYS
    names = [f"rubric.{part.name}" if part.name in SCORE_KEYS else part.name for part in parts]
    distinct = distinct_names(names, names)
    parts = [replace(part, name=one) for part, one in zip(parts, distinct, strict=True)]
    if not any(part.weight for part in parts):
        raise RewardError(f"{VERIFIERS}{name}: its rubric has no function with a weight")
    takes_list = any(part.takes_list for part in parts)

    async def call(samples: Sequence[Sample], state: RunProgress, log: CallLog) -> Any:
        answers = await _score(parts, samples)
        return answers if takes_list else answers[0]

    is_async = any(is_coroutine(part.function) for part in parts)
    return RewardFunction(name, call, is_async, takes_list)


def _parts(rubric: Any, columns: Columns) -> Iterator[_Part]:
    """Yield functions in the order of calls: earlier ones write into `state` for later ones."""
    if members := getattr(rubric, "rubrics", None):  # a RubricGroup
        for member in members:
            yield from _parts(member, columns)
        return
    shared = Rubric(dict(getattr(rubric, "class_objects", {})), columns)
    for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
        signature = inspect.signature(function)
        kinds = [p.kind for p in signature.parameters.values()]
        is_open = inspect.Parameter.VAR_KEYWORD in kinds
        accepts = frozenset(signature.parameters)
        returns = str(signature.return_annotation)
        takes_list = bool(accepts & GROUP_PARAMETERS) or returns.lower().startswith("list")
        name = getattr(function, "__name__", type(function).__name__)
        yield _Part(name, function, float(weight), shared, None if is_open else accepts, takes_list)


async def _score(parts: Sequence[_Part], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    states = [parts[0].rubric.state_of(sample) for sample in samples]
    totals: list[dict[str, Any]] = [{"reward": None} for _ in samples]
    for part in parts:
        try:
            values = await _values(part, states)
        except (Exception, SystemExit):
            if part.weight:
                raise
            continue
        for total, value in zip(totals, values, strict=True):
            if value is None:
                continue
            total[part.name] = value
            if part.weight:
                total["reward"] = (total["reward"] or 0.0) + part.weight * value
    return totals


async def _values(part: _Part, states: Sequence[dict[str, Any]]) -> list[float | None]:
    if part.takes_list:
        answer = await _call(part, part.rubric.named_of_group(states))
        answers = read_answers(answer, len(states))
    else:
        answers = [await _call(part, part.rubric.named(state)) for state in states]
    try:
        return [read_answer(answer).score for answer in answers]
    except RewardError as e:
        raise RewardError(f"{part.name} {e}") from None


async def _call(part: _Part, values: dict[str, Any]) -> Any:
    answer = part.function(**chosen(values, part.accepts))
    return await answer if inspect.isawaitable(answer) else answer


# Its data set


def rows_file(path: str, split: Split, reward: Reward, folder: Path) -> str:
    """`path`, or for "verifiers:ENV" a JSONL file in `folder` with the environment's rows.

    Raises DataError, one line.
    """
    if not path.startswith(VERIFIERS):
        return path
    name = path.removeprefix(VERIFIERS)
    program = [sys.executable, "-P", "-m", "lightrl.rewards.rubrics"]
    command = [*reward.command, *program, name, split]
    try:
        done = subprocess.run(
            command,
            env=inherited(os.environ, reward.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=READ_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{path}: its data took longer than {READ_LIMIT_S:g} s") from None
    except OSError as e:
        raise DataError(f"{path}: {command[0]}: {e.strerror}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit status {done.returncode}"
        raise DataError(why if why.startswith(VERIFIERS) else f"{path}: {why}")
    file = folder / f"{name.replace('/', '-')}-{split}.jsonl"
    file.write_bytes(done.stdout)
    return str(file)


def print_rows(name: str, split: Split) -> None:
    """Write the rows to stdout; prints of the environment go to stderr."""
    rows = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    environment = load_environment(name)
    data = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    for row in data:
        if isinstance(prompt := row.get("prompt"), list):
            # columns of messages that other messages have
            row["prompt"] = [{k: v for k, v in m.items() if v is not None} for m in prompt]
        rows.write(to_json(row) + b"\n")
    rows.close()


if __name__ == "__main__":
    try:
        print_rows(sys.argv[1], "train" if sys.argv[2] == "train" else "eval")
    except RewardError as error:
        sys.exit(str(error))
