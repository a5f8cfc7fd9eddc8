"""Which reward functions are recognised and what each is called with: ours, verl's, TRL's and those
of `verifiers` rubrics, by the names of their parameters.

Owns the arguments; how answers are read is base.py's. What a function requires and nobody provides
is found here, before the run begins.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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


def wrap(function: Any, reference: str, columns: Columns | None = None) -> RewardFunction:
    """Adapts `function` by its parameter names.

    Raises RewardError, one line, for an unknown signature or, where `columns` are known, for a
    parameter without a default that nobody provides.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"{reference}: is not a function; expected {SIGNATURES}") from None
    named = [n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    required = [n for n in named if parameters[n].default is inspect.Parameter.empty]
    name = getattr(function, "__name__", reference)
    if required in (["sample"], ["samples"]):
        takes_list = required == ["samples"]
        call = _native(function, takes_list)
        return RewardFunction(name, call, is_coroutine(function), takes_list)
    kind = _kind_of(frozenset(named), columns)
    if kind is None:
        raise RewardError(
            f"{reference}({', '.join(parameters)}): unknown signature; expected {SIGNATURES}"
        )
    if columns is not None:
        _require_provided(reference, required, kind, columns)
    accepts = None if is_open else frozenset(named)

    def call(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> Any:
        return function(**chosen(kind.arguments(samples, state, log), accepts))

    return RewardFunction(name, call, is_coroutine(function), kind.takes_list)


def is_coroutine(function: Any) -> bool:
    """An object with `async def __call__` is asynchronous too."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the attribute is wanted, not whether it exists
    )


def chosen(values: Mapping[str, Any], accepts: frozenset[str] | None) -> dict[str, Any]:
    """Those that a function has parameters for; None: it has **kwargs."""
    return {k: v for k, v in values.items() if accepts is None or k in accepts}


def _kind_of(named: frozenset[str], columns: Columns | None) -> _Kind | None:
    names = columns.names if columns is not None else frozenset[str]()
    prompt_key = columns.prompt_key if columns is not None else "prompt"
    if named >= VERL_BATCH:
        return _Kind(
            _verl_batch, VERL_BATCH | {"data_sources", "extra_infos"}, True, "ground_truths"
        )
    if named >= VERL:
        return _Kind(_verl, VERL | {"data_source", "extra_info"}, False, "ground_truth")
    if "completion" in named:
        rubric = Rubric({}, prompt_key)
        return _Kind(rubric.arguments, rubric.names | names, False, "answer")
    if "states" in named or ("completions" in named and named & (RUBRIC_GROUP - names)):
        rubric = Rubric({}, prompt_key)
        return _Kind(rubric.group_arguments, rubric.group_names, True, "answers")
    if named & TRL:
        trl = _Trl(names or None, prompt_key)
        extras = TRL | {"trainer_state", "log_metric", "log_extra"}
        return _Kind(trl.arguments, extras | names - NOT_COLUMNS, True)
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
    values = _verl_batch(samples, state, log)
    return {name.removesuffix("s"): each[0] for name, each in values.items()}


def _verl_batch(samples: Sequence[Sample], state: TrainerState, log: CallLog) -> dict[str, Any]:
    return {
        "data_sources": [s.row.get("data_source", "") for s in samples],
        "solution_strs": [s.response for s in samples],
        "ground_truths": [s.answer for s in samples],
        "extra_infos": [s.row.get("extra_info") or {} for s in samples],
    }


# TRL


@dataclass(frozen=True, slots=True)
class _Trl:
    """Columns that a row lacks are None, as in a `datasets.Dataset`."""

    names: frozenset[str] | None
    prompt_key: str

    def arguments(
        self, samples: Sequence[Sample], state: TrainerState, log: CallLog
    ) -> dict[str, Any]:
        """Chat data sets get chat completions, as TRL's users expect."""
        prompts = [s.row.get(self.prompt_key, s.prompt) for s in samples]
        chats = [isinstance(prompt, list) for prompt in prompts]
        names = self.names if self.names is not None else samples[0].row.keys()
        columns = {k: [s.row.get(k) for s in samples] for k in names if k not in NOT_COLUMNS}
        ids = [s.response_ids for s in samples]
        return {
            **columns,
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": s.response}] if is_chat else s.response
                for s, is_chat in zip(samples, chats, strict=True)
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
    prompt_key: str = "prompt"

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
        prompt = sample.row.get(self.prompt_key, sample.prompt)
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
