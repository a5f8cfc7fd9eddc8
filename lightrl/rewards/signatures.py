"""Which reward functions are recognised and what each is called with: ours, verl's, TRL's and those
of `verifiers` rubrics, by the names of their parameters.

Owns the arguments; how answers are read is base.py's. What a function requires and nobody provides
is found here, before the run begins.
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
from lightrl.rewards.base import CallLog, Columns, RewardFunction, Sample, TrainerState

SIGNATURES = (
    "reward(sample), compute_score(data_source, solution_str, ground_truth, extra_info), "
    "f(prompts, completions, **columns) or f(prompt, completion, answer)"
)
TRL = frozenset({"prompts", "completions", "completion_ids", "completions_ids"})
VERL = frozenset({"solution_str", "ground_truth"})
VERL_BATCH = frozenset({"solution_strs", "ground_truths"})
# What rubric functions of a group have and TRL's do not, unless a column is called so.
RUBRIC_GROUP = frozenset({"states", "answers", "infos", "tasks"})
NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})  # TRL keeps these for itself

Arguments: TypeAlias = Callable[[Sequence[Sample], TrainerState, CallLog], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """One family of signatures."""

    arguments: Arguments
    # names that `arguments` has for every row
    provided: frozenset[str]
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
    parameter without a default that nobody provides.
    """
    parameters = parameters_of(function, reference)
    named = [n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {k: v for k, v in options.items() if is_open or k in named}
    taken, empty = frozenset(given), inspect.Parameter.empty
    required = [n for n in named if parameters[n].default is empty and n not in given]
    name = _name_of(function, reference)
    if required in (["sample"], ["samples"]):
        takes_list = required == ["samples"]
        call = _native(partial(function, **given), takes_list)
        turns = getattr(function, "turns", contextlib.nullcontext())
        return RewardFunction(name, call, is_coroutine(function), takes_list, turns, taken)
    if form == "auto":
        form = _form_of(frozenset(named), columns)
    if form == "auto" and is_open:
        # verl and TRL both could call it; it is verl's if it is called as verl's are
        form = "verl" if "compute_score" in reference.rpartition(":")[2] else "trl"
    kind = _kind_of(form, frozenset(named), columns)
    if kind is None:
        raise RewardError(
            f"{reference}({', '.join(parameters)}): unknown signature; expected {SIGNATURES}"
        )
    if columns is not None:
        _require_provided(reference, required, kind, columns)
    accepts = None if is_open else frozenset(named)

    def call(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> Any:
        arguments = {**kind.arguments(samples, state, log), **given}
        return function(**chosen(arguments, accepts))

    return RewardFunction(name, call, is_coroutine(function), kind.takes_list, taken=taken)


def parameters_of(function: Any, reference: str) -> Mapping[str, inspect.Parameter]:
    """Raises RewardError, one line, for what is no function."""
    if isinstance(function, partial):
        # without the name of what it is made of, whose signature would be taken for its own
        function = partial(function.func, *function.args, **function.keywords)
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"{reference}: is not a function; expected {SIGNATURES}") from None


def _name_of(function: Any, reference: str) -> str:
    """Its own, as TRL's figures have it, or that in its file."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else reference.rpartition(":")[2]


def is_coroutine(function: Any) -> bool:
    """An object with `async def __call__` is asynchronous too."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the attribute is wanted, not whether it exists
    )


def chosen(values: Mapping[str, Any], accepts: frozenset[str] | None) -> dict[str, Any]:
    """Those that a function has parameters for; None: it has **kwargs."""
    return {k: v for k, v in values.items() if accepts is None or k in accepts}


def _form_of(named: frozenset[str], columns: Columns | None) -> Form:
    """Whose function has these parameters; "auto": nobody's."""
    names = columns.names if columns is not None else frozenset[str]()
    if "solution_strs" in named:
        return "verl_batch"
    if "solution_str" in named:
        return "verl"
    if "completion" in named or "states" in named:
        return "verifiers"
    if "completions" in named and named & (RUBRIC_GROUP - names):
        return "verifiers"
    return "trl" if named & TRL else "auto"


def _kind_of(form: Form, named: frozenset[str], columns: Columns | None) -> _Kind | None:
    columns = columns or Columns(frozenset())
    names = columns.names
    match form:
        case "verl_batch":
            provided = VERL_BATCH | {"data_sources", "extra_infos"}
            return _Kind(_verl_batch, provided, True, "ground_truths")
        case "verl" | "verl_sequence":
            arguments = _verl if form == "verl" else _verl_sequence
            return _Kind(arguments, VERL | {"data_source", "extra_info"}, False, "ground_truth")
        case "verifiers":
            rubric = Rubric({}, columns)
            if named & (RUBRIC_GROUP | {"completions"}):
                return _Kind(rubric.group_arguments, rubric.group_names, True, "answers")
            return _Kind(rubric.arguments, rubric.names | names, False, "answer")
        case "trl":
            extras = TRL | {"trainer_state", "log_metric", "log_extra"}
            return _Kind(_Trl(columns).arguments, extras | names - NOT_COLUMNS, True)
        case "auto":
            return None


def _require_provided(
    reference: str, required: Sequence[str], kind: _Kind, columns: Columns
) -> None:
    missing = [n for n in required if n not in kind.provided]
    if missing:
        raise RewardError(
            f"{reference}: requires {', '.join(missing)}, which no row has; {columns}"
        )
    if kind.answer in required and not columns.have_answers:
        raise no_answers(f"{reference}: requires {kind.answer}", columns)


def no_answers(who: str, columns: Columns) -> RewardError:
    """`who` cannot do without reference answers."""
    return RewardError(
        f"{who}, and no row has an answer: data.answer_key = {columns.answer_key!r}; {columns}"
    )


def _native(function: Callable[..., Any], takes_list: bool) -> Callable[..., Any]:
    def call(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> Any:
        return function(list(samples) if takes_list else samples[0])

    return call


# verl


def _verl(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> dict[str, Any]:
    [sample] = samples
    return {
        "data_source": sample.row.get("data_source") or "",
        "solution_str": sample.response,
        "ground_truth": sample.answer,
        "extra_info": _extra_info(sample),
    }


def _verl_sequence(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> dict[str, Any]:
    values = _verl(samples, state, log)
    return {**values, "solution_str": samples[0].prompt + samples[0].response}


def _verl_batch(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> dict[str, Any]:
    """Columns of a batch are arrays there, what is made of it lists."""
    return {
        "data_sources": _array([s.row.get("data_source") or "" for s in samples]),
        "solution_strs": [s.response for s in samples],
        "ground_truths": [s.answer for s in samples],
        "extra_infos": _array([_extra_info(s) for s in samples]),
    }


def _extra_info(sample: Sample) -> dict[str, Any]:
    """With what verl adds; new for each sample, since functions write into it. A question and its
    answer are two turns."""
    given = sample.row.get("extra_info") or {}
    return {**given, "num_turns": 2, "rollout_reward_scores": {}}


def _array(values: Sequence[Any]) -> Any:
    import numpy as np

    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


# TRL


def conversation(sample: Sample, columns: Columns) -> Any:
    """The prompt as TRL's functions know it: text, or the messages that the model was given."""
    column = prompt_column(sample.row, columns.prompt_key)
    prompt = messages_of(column, sample.row.get(column, sample.prompt))
    if isinstance(prompt, str) and columns.as_chat:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and columns.system_prompt and not _has_system(prompt):
        prompt = [{"role": "system", "content": columns.system_prompt}, *prompt]
    return prompt


def _has_system(messages: Sequence[Any]) -> bool:
    return any(isinstance(m, Mapping) and m.get("role") == "system" for m in messages)


@dataclass(frozen=True, slots=True)
class _Trl:
    """Columns that a row lacks are None, as in a `datasets.Dataset`."""

    columns: Columns

    def arguments(
        self, samples: Sequence[Sample], state: TrainerState, log: CallLog
    ) -> dict[str, Any]:
        """Chat data sets get chat completions, as TRL's users expect."""
        prompts = [conversation(s, self.columns) for s in samples]
        names = self.columns.names or samples[0].row.keys()
        columns = {k: [s.row.get(k) for s in samples] for k in names if k not in NOT_COLUMNS}
        ids = [s.response_ids for s in samples]
        return {
            **columns,
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": s.response}]
                if isinstance(prompt, list)
                else s.response
                for s, prompt in zip(samples, prompts, strict=True)
            ],
            "completion_ids": ids,
            # as TRL's documentation has it
            "completions_ids": ids,
            "trainer_state": state,
            "log_metric": log.log_metric,
            "log_extra": log.log_extra,
        }


# verifiers


class Message(dict[str, Any]):
    """A chat message, whose fields are items and attributes: `verifiers` has had both."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Rubric:
    """What functions of a rubric can name. `objects`: what they share, as its parser."""

    objects: Mapping[str, Any]
    columns: Columns

    @property
    def names(self) -> frozenset[str]:
        return frozenset({"prompt", "completion", "answer", "info", "task", "state", *self.objects})

    @property
    def group_names(self) -> frozenset[str]:
        return frozenset({"prompts", "completions", "answers", "infos", "tasks", "states"}) | set(
            self.objects
        )

    def state_of(self, sample: Sample) -> dict[str, Any]:
        """The state of a rollout that has ended, new for each sample: functions write into it."""
        prompt = conversation(sample, self.columns)
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        info = sample.row.get("info") or {}
        if isinstance(info, str):
            info = json.loads(info)
        messages = [Message(m) for m in prompt]
        completion = [Message(role="assistant", content=sample.response)]
        turn = {"prompt": messages, "completion": completion, "extras": {}}
        return {
            "input": sample.row,
            "prompt": messages,
            "completion": completion,
            "answer": "" if sample.answer is None else sample.answer,
            "info": info,
            "task": sample.row.get("task", "default"),
            "example_id": sample.row.get("example_id", 0),
            "trajectory": [turn],
            "is_completed": True,
            "is_truncated": sample.finish_reason == "length",
            "timing": {},
            "metrics": {},
        }

    def named(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a function of one response may have."""
        own = {name: state[name] for name in ("prompt", "completion", "answer", "info", "task")}
        return {**state["input"], **own, "state": state, **self.objects}

    def named_of_group(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What a function of a whole group may have."""
        plural = {
            f"{name}s": [state[name] for state in states]
            for name in ("prompt", "completion", "answer", "info", "task")
        }
        return {**plural, "states": list(states), **self.objects}

    def arguments(
        self, samples: Sequence[Sample], state: TrainerState, log: CallLog
    ) -> dict[str, Any]:
        return self.named(self.state_of(samples[0]))

    def group_arguments(
        self, samples: Sequence[Sample], state: TrainerState, log: CallLog
    ) -> dict[str, Any]:
        return self.named_of_group([self.state_of(s) for s in samples])
