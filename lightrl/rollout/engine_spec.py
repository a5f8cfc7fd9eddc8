"""Derive a rollout node and the spec of its engine from the config of the run. Pure."""

from dataclasses import dataclass
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.devices.assign import CPU, Part
from lightrl.engine.base import EngineSpec, Kind, LoraSpec


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """A node with the rollout role, from its command line and the coordinator's welcome."""

    node: str
    slots: int
    model_dir: Path
    # of the coordinator
    address: str
    # of its engine
    log: Path | None = None
    gpus: Part = CPU
    # the trainer node whose devices these are
    shares: str = ""
    # the number of devices, if engines of other sizes use them, too
    parallel: int = 0

    @property
    def takes_turns(self) -> bool:
        return bool(self.shares or self.parallel)


def engine_spec(config: Config, kind: Kind, options: RolloutOptions) -> EngineSpec:
    rollout, speculation, lora = config.rollout, config.speculation, config.model.lora
    parallel = options.parallel
    size = {"tensor_parallel_size": parallel} if parallel and kind == "vllm" else {}
    return EngineSpec(
        kind=kind,
        model_dir=str(options.model_dir),
        dtype=config.model.dtype,
        max_model_length=config.max_model_length,
        slots=options.slots,
        kv_cache_gib=rollout.kv_cache_gib,
        chunk_tokens=rollout.chunk_tokens,
        chunk_ms=rollout.chunk_ms,
        engine_args=rollout.engine_args | size,
        max_window=speculation.max_window if config.speculates else 0,
        prefer=speculation.prefer,
        gpu_memory=options.gpus.memory,
        is_deterministic=config.run.deterministic,
        canary=config.weights.canary,
        lora=LoraSpec(lora.rank, lora.alpha, lora.targets) if lora.rank else None,
        can_sleep=options.takes_turns,
        stop=rollout.stop,
        parallel=parallel,
    )
