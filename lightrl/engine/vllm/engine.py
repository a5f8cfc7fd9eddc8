"""The vLLM engine: LightRL's requests straight into vLLM's engine core, in this process.

Owns how vLLM is configured and driven. It skips vLLM's request and output processing (tokenizers,
detokenizers, asyncio), which for small models costs more than the forward pass. The code inside the
worker is in `worker.py`, the supported releases in `versions.py`. On CUDA it ran with 0.26 on one
H200; other releases were read in their sources.
"""

import logging
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.devices.memory import ENGINE_STEP_TOKENS
from lightrl.engine.base import Delta, EngineSpec, ReceiveWeights, Scores
from lightrl.engine.requests import accept, check_text
from lightrl.engine.vllm import lora
from lightrl.engine.vllm.logprobs import computing_dtype, scores_of
from lightrl.engine.vllm.memory import left_on_gpu, shared_memory_args
from lightrl.engine.vllm.versions import (
    BATCH_INVARIANT,
    is_too_old,
    other_torch,
    outside,
    why_not_batch_invariant,
)
from lightrl.errors import EngineError, EngineUnusable, WeightsError
from lightrl.log import environment as log_environment
from lightrl.messages.load import Load
from lightrl.messages.responses import FinishReason, PromptHistory, ResponseRequest, Sampling
from lightrl.rope import settle, settled
from lightrl.system.process import importing
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.canary import arbitrary_text
from lightrl.weights.version.manifest import VersionFile

if TYPE_CHECKING:
    from lightrl.engine.vllm.speculation import VllmSpeculation

NO_SLEEP = "vLLM sets no memory free on a CPU while it sleeps; it generates nothing then"
NOT_INVARIANT = (
    "run.deterministic: vLLM has VLLM_BATCH_INVARIANT, but its workers do not report such "
    "kernels: tokens may depend on what runs beside them"
)
INSTEAD = ', or set rollout.engine = "torch"'
MAX_AUTO_KV_BYTES = 4 << 30  # of a CPU engine whose kv_cache_gib is 0
CPU_BLOCK_TOKENS = 128  # vLLM's KV block on CPU

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # only the V1 runner's sampler is replaced by ours
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A context is as long as lightrl/rope.py finds; vLLM refuses one token more, which no response
    # has, and since 0.32 YaRN that config.json does not count in.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "HF_HUB_OFFLINE": "1",
}
# for several GPUs: this process has asked CUDA already
CUDA_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
CPU_ENVIRONMENT = {
    # "auto" binds every engine of a machine to the same core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


class VllmEngine:
    """Implements `base.Engine`. Build it in a process of its own: vLLM keeps state in globals."""

    def __init__(self, spec: EngineSpec) -> None:
        os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
        os.environ.update(log_environment("engine"))  # for workers in other processes
        with importing():
            from lightrl.devices.cuda import has_cuda

        self.device = "cuda" if has_cuda() else "cpu"
        added = CPU_ENVIRONMENT if self.device == "cpu" else CUDA_ENVIRONMENT
        os.environ.update({k: v for k, v in added.items() if k not in os.environ})
        if is_invariant := spec.is_deterministic and self.device == "cuda":
            os.environ.setdefault(BATCH_INVARIANT, "1")  # read when vLLM is imported
        with importing():
            from lightrl.engine.model_dir import (
                VersionLayouts,
                build_model,
                read_config,
                resolve_dtype,
                tensor_targets,
            )

        config = read_config(Path(spec.model_dir))
        rope_note = settle(config, spec.max_model_length)
        dtype = resolve_dtype(spec.dtype, config, self.device)
        self._targets = tensor_targets(
            build_model(config, dtype, "meta", spec.lora, attention=None)
        )
        self._layouts, self._lora = VersionLayouts(self._targets), spec.lora
        self._vocabulary = int(config.get_text_config().vocab_size)
        self._max_length = spec.max_model_length
        # vLLM gets its own id for every add: an aborted response may come back with other tokens
        self._ids: dict[str, str] = {}  # response -> vLLM request
        self._responses: dict[str, str] = {}  # vLLM request -> response
        self._num_added = 0
        with importing():
            self._api = Api()
            if is_invariant and (why := why_not_batch_invariant()):
                raise EngineUnusable(f"run.deterministic: {why}{INSTEAD}")
        args = {**_engine_args(spec, config, dtype, self.device), **spec.engine_args}
        if spec.gpu_memory and self.device == "cuda":
            args |= shared_memory_args(spec, config, self._targets, args)
        if rope_note:
            args.setdefault("hf_overrides", partial(settled, max_length=spec.max_model_length))
        args["trust_remote_code"] = False
        self._core = self._api.build(args)
        self.dtype = computing_dtype(self._core.vllm_config)
        self.num_workers = int(self._core.vllm_config.parallel_config.world_size)
        cache = self._core.vllm_config.cache_config
        sizes = (getattr(cache, name, None) or 0 for name in ("num_gpu_blocks", "block_size"))
        self._kv_tokens = math.prod(sizes)  # 0 if vLLM does not report it on a CPU
        self._sleeps = False  # until there is room for the KV cache again
        no_sleep = NO_SLEEP if spec.can_sleep and self.device == "cpu" else None
        notes = self._api.version_note, no_sleep, rope_note  # the daemon logs them
        self.notes: tuple[str, ...] = tuple(note for note in notes if note)
        if is_invariant and not all(self._core.collective_rpc("lightrl_is_batch_invariant")):
            self.notes += (NOT_INVARIANT,)
        self._speculation = self._speculate(spec) if spec.max_window else None
        self._num_preemptions = 0
        self._count_preemptions()
        if self.device == "cuda":  # what vLLM compiles for a score is compiled before anybody waits
            self.logprobs_of(arbitrary_text(self._vocabulary, self._max_length))

    def remember(self, histories: tuple[PromptHistory, ...]) -> None:
        if self._speculation is not None:
            self._speculation.drafter.remember(histories)

    def add(self, request: ResponseRequest, sampling: Sampling) -> None:
        if request.response in self._ids:
            raise EngineError(f"{request.response}: already runs here")
        r = accept(request, sampling, self._vocabulary, self._max_length)
        params = self._api.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids alone decides
            logprobs=0,
            detokenize=False,
            extra_args={self._api.seed_key: request.seed},
        )
        self._num_added += 1
        request_id = str(self._num_added)
        wanted = self._api.EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=r.tokens,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._api.lora_request,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(wanted))
        self._ids[request.response] = request_id
        self._responses[request_id] = request.response
        if self._speculation is not None:
            num_prompt = len(request.prompt) // 4
            prompt, prefix = r.tokens[:num_prompt], r.tokens[num_prompt:]
            self._speculation.start(request.response, prompt, prefix, request.max_new_tokens)

    def abort(self, response: str) -> None:
        request_id = self._ids.pop(response, None)
        if request_id is not None:
            del self._responses[request_id]
            self._core.abort_requests([request_id])
            if self._speculation is not None:
                self._speculation.end(response, is_finished=False)

    def step(self) -> list[Delta]:
        started = time.perf_counter()
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        deltas: list[Delta] = []
        for out in outputs[0].outputs if outputs and 0 in outputs else ():
            response = self._responses.get(out.request_id)
            if response is None:  # aborted while its last step ran
                continue
            reason = None if out.finish_reason is None else _finish_reason(out)
            if reason is not None:
                del self._responses[out.request_id], self._ids[response]
            found = out.new_logprobs
            logprobs = found.logprobs[:, 0].tolist() if found is not None else []
            tokens = list(out.new_token_ids)
            deltas.append(Delta(response, tokens, logprobs, reason, _num_cached(out)))
        if self._speculation is not None:
            self._speculation.after_step(deltas, self._ids, started)
        return deltas

    def num_unfinished(self) -> int:
        return len(self._ids)

    def load(self) -> Load:
        running, waiting = self._core.scheduler.get_request_counts()
        usage = self._core.scheduler.kv_cache_manager.usage
        drafting = None if self._speculation is None else self._speculation.drafter.counts
        return Load(running, waiting, usage, self._num_preemptions, drafting, self._kv_tokens)

    def load_weights(self, file: VersionFile, base: VersionFile | None = None) -> None:
        self._layouts.read(file, base)  # vLLM itself is silent about a missing tensor
        if base is not None:
            self._layouts.read_base(base)
        self._core.collective_rpc("lightrl_load", args=(file, base, self._lora))
        if self._lora is not None:
            self._api.lora_request = lora.request()
        if self._sleeps:
            self._sleeps = False
            self._core.collective_rpc("lightrl_wake", args=("kv_cache",))
        self._requeue()

    def sleep(self) -> int:
        self._sleeps = self.device == "cuda"
        return sum(self._core.collective_rpc("lightrl_sleep")) if self._sleeps else 0

    def wake(self) -> None:
        """Wake the weights first: with its KV cache beside them a load has less room to work in."""
        if self._sleeps:
            self._core.collective_rpc("lightrl_wake", args=("weights",))

    def leave_group(self, why: str) -> None:
        self._core.collective_rpc("lightrl_leave", args=(why,))

    def receive_weights(self, command: ReceiveWeights, is_unwanted: IsUnwanted) -> None:
        self._layouts.read(command.file)
        # a worker in another process than its engine cannot ask, and ends by itself
        is_here = self._core.vllm_config.parallel_config.distributed_executor_backend == "uni"
        args = command, is_unwanted if is_here else None
        for failure in self._core.collective_rpc("lightrl_receive", args=args):
            if failure:
                raise WeightsError(failure)
        self._requeue()

    def logprobs_of(self, token_ids: list[int]) -> list[float]:
        return self.scores_of(token_ids).logprobs

    def scores_of(self, token_ids: list[int]) -> Scores:
        check_text(token_ids, self._vocabulary, self._max_length)
        self._requeue()  # after a load nothing runs yet
        self._num_added += 1
        return scores_of(self._core, self._api, str(self._num_added), token_ids)

    def _requeue(self) -> None:
        """Move running responses back to the queue, to recompute their KV under the current
        weights."""
        before = self._num_preemptions
        self._core.reset_prefix_cache(reset_running_requests=True)
        self._num_preemptions = before
        if self._speculation is not None:
            self._speculation.restart()

    def close(self) -> None:
        self._core.shutdown()

    def _speculate(self, spec: EngineSpec) -> "VllmSpeculation | None":
        """Return None if this engine cannot speculate: it samples the same tokens, slower."""
        from lightrl.engine.vllm.speculation import VllmSpeculation, refusal

        reason = refusal(self._core)
        if reason is None:
            room = left_on_gpu(spec) / 2 if self.device == "cuda" else None
            return VllmSpeculation(spec, self._core, self._vocabulary, room)
        self.notes += (f"no speculation: {reason}",)
        return None

    def _count_preemptions(self) -> None:
        """Count preemptions: vLLM does so for each request only, and drops them with it."""
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted


def _engine_args(spec: EngineSpec, config: Any, dtype: Any, device: str) -> dict[str, Any]:
    """Return arguments for vLLM's EngineArgs; `spec.engine_args` overrides them."""
    args: dict[str, Any] = {
        "model": spec.model_dir,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        # vLLM ends a response one token early otherwise
        "max_model_len": spec.max_model_length + 1,
        "max_num_seqs": spec.slots,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": "lightrl.engine.vllm.worker.WorkerExtension",
        # a step's tokens are out before the next starts, so a load is a clean cut
        "async_scheduling": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    if spec.can_sleep and device == "cuda":
        args["enable_sleep_mode"] = True
    if spec.lora is not None:
        args |= lora.engine_args(spec.lora)
    if device == "cpu":
        args |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",  # the worker lives in this process, too
            "kv_cache_memory_bytes": _cpu_kv_bytes(spec, config, dtype),
        }
        return args
    # Its own default for an engine core is a quarter of this, and prompts take four times as many
    # steps.
    args["max_num_batched_tokens"] = max(ENGINE_STEP_TOKENS, spec.slots)
    if spec.kv_cache_gib:
        args["kv_cache_memory_bytes"] = int(spec.kv_cache_gib * 2**30)
    return args


def _cpu_kv_bytes(spec: EngineSpec, config: Any, dtype: Any) -> int:
    from lightrl.engine.model_dir import kv_bytes_per_token

    if spec.kv_cache_gib:
        return int(spec.kv_cache_gib * 2**30)
    blocks = math.ceil((spec.max_model_length + 1) / CPU_BLOCK_TOKENS)
    sequence = blocks * CPU_BLOCK_TOKENS * kv_bytes_per_token(config, dtype)
    spare = 2 * sequence // blocks  # vLLM keeps one block for itself
    return max(min(spec.slots * sequence, MAX_AUTO_KV_BYTES), sequence) + spare


def _finish_reason(out: Any) -> FinishReason:
    match str(out.finish_reason):
        case "stop":
            return "stop"
        case "length":
            return "length"
        case other:
            raise EngineError(f"{out.request_id}: vLLM ended it with {other!r}")


def _num_cached(out: Any) -> int | None:
    """Return the prompt tokens that the prefix cache held; newer releases give it with the first
    output of a request alone."""
    return getattr(getattr(out, "prefill_stats", out), "num_cached_tokens", None)


class Api:
    """The parts of vLLM that the engine uses, imported before anything is built. Raises
    EngineUnusable."""

    def __init__(self) -> None:
        version, self.lora_request = "(unknown version)", None
        try:
            from vllm import __version__ as version

            self.version_note = outside(version)
            if is_too_old(version):
                raise EngineUnusable(f"{self.version_note}{INSTEAD}")
            import torch
            from vllm import SamplingParams
            from vllm.engine.arg_utils import EngineArgs
            from vllm.model_executor.models import registry
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine import EngineCoreRequest
            from vllm.v1.engine.core import EngineCore
            from vllm.v1.executor import Executor

            if torch.cuda.is_available():
                _require_kernels(version)
            from lightrl.engine.vllm.worker import SEED
        except EngineUnusable:
            raise
        except Exception as e:  # of a library that was built for another torch anything can come
            reason = (str(e).strip().splitlines() or [""])[0][:200]
            raise EngineUnusable(
                f"vLLM cannot be used: {type(e).__name__}: {reason}{other_torch()}{INSTEAD}"
            ) from e
        if not torch.cuda.is_available():
            # vLLM inspects model classes in a subprocess, to keep CUDA uninitialised. Without CUDA
            # that only costs seconds, and a process that would outlive this one.
            registry._run_in_subprocess = lambda inspect: inspect()
            # Optional libraries are missing. A filter, since vLLM resets the levels later.
            for module in ("platforms.cpu", "triton_utils.importing", "v1.worker.cpu_worker"):
                logging.getLogger(f"vllm.{module}").addFilter(lambda r: r.levelno >= logging.ERROR)
        self.SamplingParams = SamplingParams
        self.EngineCoreRequest = EngineCoreRequest
        self.seed_key = SEED
        self._engine_args, self._context = EngineArgs, UsageContext.ENGINE_CONTEXT
        self._core, self._executor = EngineCore, Executor

    def build(self, args: dict[str, Any]) -> Any:
        """Return an EngineCore. Raises EngineError for arguments or a machine that vLLM refuses."""
        try:
            config = self._engine_args(**args).create_engine_config(self._context)
            if config.speculative_config is not None:
                raise ValueError("speculative_config is not supported: its sampling is not coupled")
            return self._core(config, self._executor.get_class(config), log_stats=False)
        except (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError) as e:
            # pydantic puts the reason before a line that only names its documentation.
            lines = [
                x.strip()
                for x in str(e).splitlines()
                if x.strip() and "errors.pydantic.dev" not in x
            ]
            raise EngineError(f"vLLM cannot start: {lines[-1] if lines else repr(e)}") from e


def _require_kernels(version: str) -> None:
    """Raise EngineUnusable for kernels that vLLM cannot load: it only warns, and fails later."""
    import torch
    from vllm import _custom_ops

    del _custom_ops  # its import loads them
    if not hasattr(torch.ops._C, "rms_norm"):
        raise EngineUnusable(
            f"the CUDA kernels of vLLM {version} cannot be loaded{other_torch()}{INSTEAD}"
        )
