"""Signatures of reward functions: ours, verl's, TRL's and those of `verifiers` rubrics, recognised
by the names of their parameters.

Owns the arguments of a call; base.py reads the answers. A parameter that nothing provides is an
error here, before the run begins.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from lightrl.config.reward import Form
from lightrl.data.layouts import messages_of, prompt_column
from lightrl.errors import RewardError
from lightrl.rewards.base import CallLog, Columns, RewardFunction, RunProgress, Sample

SIGNATURES = (
    "reward(sample), compute_score(data_source, solution_str, ground_truth, extra_info), "
    "f(prompts, completions, **columns) or f(prompt, completion, answer)"
)
TRL = frozenset({"prompts", "completions", "completion_ids", "completions_ids"})
VERL = frozenset({"solution_str", "ground_truth"})
VERL_BATCH = frozenset({"solution_strs", "ground_truths"})
OF_RUBRICS = ("prompt", "completion", "answer", "info", "task")
RUBRIC_ONE = frozenset({*OF_RUBRICS, "state"})
RUBRIC_ALL = frozenset(f"{name}s" for name in RUBRIC_ONE)
# What rubric functions of a group have and TRL's do not, unless a column is called so.
RUBRIC_GROUP = frozenset({"states", "answers", "infos", "tasks"})
NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})  # TRL keeps these for itself

Arguments: TypeAlias = Callable[[Sequence[Sample], RunProgress, CallLog], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A family of signatures."""

    arguments: Arguments
    # names that `arguments` has for every row; None: whatever is required
    provided: frozenset[str] | None
    takes_list: bool
    # the one that is the reference answer
    answer: str = ""


def wrap(
    function: Any,
    reference: str,
    columns: Columns | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    form: Form = "auto",
) -> RewardFunction:
    """Adapts `function` by its parameter names. It gets those of `options` that it takes.

    Raises RewardError, one line, for an unknown signature or, where `columns` are known, for a
    parameter without a default that nothing provides.
    """
    parameters = parameters_of(function, reference)
    named = [n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {k: v for k, v in options.items() if is_open or k in named}
    empty = inspect.Parameter.empty
    required = [n for n in named if parameters[n].default is empty and n not in given]
    if required in (["sample"], ["samples"]):
        kind = _native(required[0])
    else:
        if form == "auto":
            form = _form_of(frozenset(named), columns)
        if form == "auto" and is_open:
            # verl and TRL both could call it; it is verl's if it is called as verl's are
            form = "verl" if "compute_score" in reference.rpartition(":")[2] else "trl"
        if form == "auto":
            raise RewardError(
                f"{reference}({', '.join(parameters)}): unknown signature; expected {SIGNATURES}"
            )
        kind = _kind_of(form, frozenset(named), columns or Columns(frozenset()))
        if columns is not None:
            _require_provided(reference, required, kind, columns)
    accepts = None if is_open else frozenset(named)

    def call(samples: Sequence[Sample], state: RunProgress, log: CallLog) -> Any:
        arguments = {**kind.arguments(samples, state, log), **given}
        return function(**chosen(arguments, accepts))

    turns = getattr(function, "turns", contextlib.nullcontext())
    name = getattr(function, "__name__", "")  # as TRL's figures have it, or that in its file
    name = name if name.isidentifier() else reference.rpartition(":")[2]
    is_async = is_coroutine(function)
    return RewardFunction(name, call, is_async, kind.takes_list, turns, frozenset(given))


def parameters_of(function: Any, reference: str) -> Mapping[str, inspect.Parameter]:
    """Raises RewardError, one line, for what is no function."""
    if isinstance(function, partial):
        # without the name of what it is made of, whose signature would be taken for its own
        function = partial(function.func, *function.args, **function.keywords)
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"{reference}: is not a function; expected {SIGNATURES}") from None


def is_coroutine(function: Any) -> bool:
    """Return True for objects with `async def __call__` too."""
    while isinstance(function, partial):
        function = function.func
    called = getattr(type(function), "__call__", None)  # noqa: B004 - its kind is wanted
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def chosen(values: Mapping[str, Any], accepts: frozenset[str] | None) -> dict[str, Any]:
    """The values that a function has parameters for; None: it has **kwargs."""
    return {k: v for k, v in values.items() if accepts is None or k in accepts}


def _form_of(named: frozenset[str], columns: Columns | None) -> Form:
    """Return "auto" for parameters of no known form."""
    names = columns.names if columns is not None else frozenset[str]()
    if "solution_strs" in named:
        return "verl_batch"
    if "solution_str" in named:
        return "verl"
    if {"completion", "states"} & named or (
        "completions" in named and named & RUBRIC_GROUP - names
    ):
        return "verifiers"
    return "trl" if named & TRL else "auto"


def _kind_of(form: Form, named: frozenset[str], columns: Columns) -> _Kind:
    match form:
        case "verl_batch":
            provided = VERL_BATCH | {"data_sources", "extra_infos"}
            return _Kind(_verl_batch, provided, True, "ground_truths")
        case "verl" | "verl_sequence":
            arguments = partial(_verl, is_sequence=form == "verl_sequence")
            return _Kind(arguments, VERL | {"data_source", "extra_info"}, False, "ground_truth")
        case "verifiers":
            rubric = Rubric({}, columns)
            if named & (RUBRIC_GROUP | {"completions"}):
                return _Kind(rubric.group_arguments, RUBRIC_ALL, True, "answers")
            return _Kind(rubric.arguments, RUBRIC_ONE | columns.names, False, "answer")
        case _:
            extras = TRL | {"trainer_state", "log_metric", "log_extra"}
            provided = extras | columns.names - NOT_COLUMNS
            return _Kind(partial(_trl, columns=columns), provided, True)


def _require_provided(
    reference: str, required: Sequence[str], kind: _Kind, columns: Columns
) -> None:
    missing = [n for n in required if kind.provided is not None and n not in kind.provided]
    if missing:
        raise RewardError(
            f"{reference}: requires {', '.join(missing)}, which no row has; {columns}"
        )
    if kind.answer in required and not columns.have_answers:
        raise no_answers(f"{reference}: requires {kind.answer}", columns)


def no_answers(who: str, columns: Columns) -> RewardError:
    """The error of `who`, which needs reference answers."""
    return RewardError(
        f"{who}, and no row has an answer: data.answer_key = {columns.answer_key!r}; {columns}"
    )


def _native(name: str) -> _Kind:
    if name == "samples":
        return _Kind(lambda samples, *_: {name: list(samples)}, None, True)
    return _Kind(lambda samples, *_: {name: samples[0]}, None, False)


def _verl(
    samples: Sequence[Sample], state: RunProgress, log: CallLog, is_sequence: bool
) -> dict[str, Any]:
    """`is_sequence`: the solution begins with the prompt."""
    [sample] = samples
    return {
        "data_source": sample.row.get("data_source") or "",
        "solution_str": (sample.prompt if is_sequence else "") + sample.response,
        "ground_truth": sample.answer,
        "extra_info": _extra_info(sample),
    }


def _verl_batch(samples: Sequence[Sample], state: RunProgress, log: CallLog) -> dict[str, Any]:
    """Columns of a batch are numpy arrays there, what is made of it lists."""
    import numpy as np

    sources, infos = (np.empty(len(samples), dtype=object) for _ in range(2))
    sources[:] = [s.row.get("data_source") or "" for s in samples]
    infos[:] = [_extra_info(s) for s in samples]
    return {
        "data_sources": sources,
        "solution_strs": [s.response for s in samples],
        "ground_truths": [s.answer for s in samples],
        "extra_infos": infos,
    }


def _extra_info(sample: Sample) -> dict[str, Any]:
    """Return the row's extra_info with verl's additions, as a new dict for each sample, since
    functions write into it. A question and its answer are two turns."""
    given = sample.row.get("extra_info") or {}
    num_turns = 2 * max(1, len(sample.turns))
    return {**given, "num_turns": num_turns, "rollout_reward_scores": {}}


def _split(sample: Sample, columns: Columns) -> tuple[Any, Any]:
    """The prompt and the completion in TRL's form: text, or messages."""
    if sample.messages:
        num = len(sample.messages) - sum(1 + len(turn.observation) for turn in sample.turns)
        chat = [dict(message) for message in sample.messages]  # a function may change its own
        return chat[:num], chat[num:]
    prompt = conversation(sample.prompt, sample.row, columns)
    is_chat = isinstance(prompt, list)
    said = [{"role": "assistant", "content": sample.response}] if is_chat else sample.response
    return prompt, said


def conversation(text: str, row: Mapping[str, Any], columns: Columns) -> Any:
    """The prompt of a row in TRL's form: text, or the messages of the model's input. `text`: of a
    row without its column."""
    column = prompt_column(row, columns.prompt_key)
    prompt = messages_of(column, row.get(column, text))
    if isinstance(prompt, str) and columns.as_chat:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and columns.system_prompt and not _has_system(prompt):
        prompt = [{"role": "system", "content": columns.system_prompt}, *prompt]
    return prompt


def _has_system(messages: Sequence[Any]) -> bool:
    return any(isinstance(m, Mapping) and m.get("role") == "system" for m in messages)


def _trl(
    samples: Sequence[Sample], state: RunProgress, log: CallLog, columns: Columns
) -> dict[str, Any]:
    """Chat data sets get chat completions, as TRL's users expect. Columns that a row lacks are
    None, as in a `datasets.Dataset`."""
    prompts, completions = zip(*(_split(s, columns) for s in samples), strict=True)
    names = (columns.names or samples[0].row.keys()) - NOT_COLUMNS
    ids = [s.response_ids for s in samples]
    return {
        **{name: [s.row.get(name) for s in samples] for name in names},
        "prompts": [*prompts],
        "completions": [*completions],
        "completion_ids": ids,
        "completions_ids": ids,  # as TRL's documentation has it
        "trainer_state": state,
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }


class Message(dict[str, Any]):
    """A chat message, whose fields are items and attributes: `verifiers` has had both."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Rubric:
    """The values that functions of a rubric can name. `objects`: shared ones, as its parser."""

    objects: Mapping[str, Any]
    columns: Columns

    def state_of(self, sample: Sample) -> dict[str, Any]:
        """The state of a rollout that has ended, new for each sample: functions write into it."""
        prompt, said = _split(sample, self.columns)
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
            said = [{"role": "assistant", "content": said}]
        info = sample.row.get("info") or {}
        if isinstance(info, str):
            info = json.loads(info)
        messages = [Message(m) for m in prompt]
        completion = [Message(m) for m in said]
        trajectory, num = list[dict[str, Any]](), 0
        for one in sample.turns[1:] and sample.turns:
            seen = [*messages, *completion[:num]]
            trajectory.append({"prompt": seen, "completion": [completion[num]], "extras": {}})
            num += 1 + len(one.observation)
        turn = {"prompt": messages, "completion": completion, "extras": {}}
        return {
            "input": sample.row,
            "prompt": messages,
            "completion": completion,
            "answer": "" if sample.answer is None else sample.answer,
            "info": info,
            "task": sample.row.get("task", "default"),
            "example_id": sample.row.get("example_id", 0),
            "trajectory": trajectory or [turn],
            "is_completed": True,
            "is_truncated": sample.finish_reason == "length",
            "timing": {},
            "metrics": {},
        }

    def named(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the values that a function of one response may name."""
        own = {name: state[name] for name in OF_RUBRICS}
        return {**state["input"], **own, "state": state, **self.objects}

    def named_of_group(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the values that a function of a whole group may name."""
        plural = {f"{name}s": [state[name] for state in states] for name in OF_RUBRICS}
        return {**plural, "states": list(states), **self.objects}

    def arguments(self, samples: Sequence[Sample], *_: Any) -> dict[str, Any]:
        return self.named(self.state_of(samples[0]))

    def group_arguments(self, samples: Sequence[Sample], *_: Any) -> dict[str, Any]:
        return self.named_of_group([self.state_of(s) for s in samples])
