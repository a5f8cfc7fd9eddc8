"""Start an engine of the right kind in a process of its own (process.py).

Imports neither torch nor vLLM, even to check whether they are installed.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from lightrl.config.sections import EngineKind
from lightrl.engine.base import EngineCommand, EngineEvent, EngineSpec, Kind
from lightrl.errors import EngineError
from lightrl.log import environment as log_environment
from lightrl.system.child import Child
from lightrl.system.process import huge_pages
from lightrl.wire import Codec

EVERY_DEVICE: Mapping[str, str] = MappingProxyType({})

EngineChild: TypeAlias = Child[EngineCommand, EngineEvent]


def resolve_engine(kind: EngineKind) -> Kind:
    """Return the engine that `rollout.engine` selects here; imports nothing. Raises EngineError."""
    installed = importlib.util.find_spec("vllm") is not None
    if kind == "auto":
        return "vllm" if installed else "torch"
    if kind == "vllm" and not installed:
        raise EngineError(
            'rollout.engine = "vllm": not installed; run scripts/setup, or pip install '
            '"lightrl[gpu]" (NVIDIA) or "lightrl[cpu]"'
        )
    return kind


async def start_engine(
    spec: EngineSpec,
    threads: int,
    log: Path | None = None,
    devices: Mapping[str, str] = EVERY_DEVICE,
) -> EngineChild:
    """Start an engine with `threads` CPU threads; its first event is EngineStarted or EngineFailed.

    `devices`: its environment variables for the GPUs that it may use.

    The threads of all engines and trainers of a machine must not exceed its cores: waiting OpenMP
    threads spin, and a machine with one thread too many was seen to be ten times slower.
    """
    env = {**engine_environment(spec, threads, os.environ), **devices}
    target, name = "lightrl.engine.process:main", f"{spec.kind}-engine"
    child = await Child.start(target, name, Codec(EngineCommand), Codec(EngineEvent), env, log)
    child.send(spec)
    return child


def engine_environment(
    spec: EngineSpec, threads: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to add to the daemon's environment, `environ`."""
    gives_back = spec.can_sleep and spec.kind == "torch"  # vLLM on a CPU frees nothing
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **log_environment("engine"),
        **(huge_pages(environ) if gives_back else {}),
    }
