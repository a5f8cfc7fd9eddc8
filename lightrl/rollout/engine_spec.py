"""The spec of an engine, from the config of the run. Pure."""

from pathlib import Path

from lightrl.config.schema import Config
from lightrl.devices.assign import Part
from lightrl.engine.base import EngineSpec, Kind, LoraSpec


def engine_spec(
    config: Config,
    kind: Kind,
    model_dir: Path,
    slots: int,
    gpus: Part,
    can_sleep: bool = False,
    parallel: int = 0,
) -> EngineSpec:
    """`parallel`: the number of GPUs of the engine, if engines of other sizes use them, too."""
    rollout, speculation, lora = config.rollout, config.speculation, config.model.lora
    size = {"tensor_parallel_size": parallel} if parallel and kind == "vllm" else {}
    return EngineSpec(
        kind=kind,
        model_dir=str(model_dir),
        dtype=config.model.dtype,
        max_model_length=config.max_model_length,
        slots=slots,
        kv_cache_gib=rollout.kv_cache_gib,
        chunk_tokens=rollout.chunk_tokens,
        chunk_ms=rollout.chunk_ms,
        engine_args=rollout.engine_args | size,
        max_window=speculation.max_window if config.speculates else 0,
        prefer=speculation.prefer,
        gpu_memory=gpus.memory,
        is_deterministic=config.run.deterministic,
        canary=config.weights.canary,
        lora=LoraSpec(lora.rank, lora.alpha, lora.targets) if lora.rank else None,
        can_sleep=can_sleep,
        stop=rollout.stop,
        parallel=parallel,
    )
