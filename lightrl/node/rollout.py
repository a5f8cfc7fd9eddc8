"""The rollout role of a daemon: an engine process, its weights, its tokens on their way to the coordinator.

Decides nothing about which responses run here; never touches a tensor.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from lightrl.child import Child, ChildDied
from lightrl.config import Config
from lightrl.engine.base import (
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineLoaded,
    EngineSpec,
    EngineStarted,
    LoadWeights,
)
from lightrl.engine.process import resolve_engine, start_engine
from lightrl.errors import EngineError, WeightsError
from lightrl.messages import (
    Abort,
    Generate,
    Load,
    Message,
    PublishWeights,
    TokenChunk,
    WeightsFailed,
    WeightsReady,
)
from lightrl.weights.manifest import num_bytes
from lightrl.weights.pull import pull

MAX_RESTARTS = 3  # of the engine process, then the daemon gives up


class Rollout:
    def __init__(
        self,
        config: Config,
        slots: int,
        model_dir: Path,
        scratch: Path,
        log: Path | None,
        send: Callable[[Message], None],
        rejoin: Callable[[], None],
    ) -> None:
        """`send` reaches the coordinator; `rejoin` tells it that all that ran here is gone."""
        self.load = Load()
        self.device = ""
        self._config = config
        self._slots = slots
        self._model_dir = model_dir
        self._scratch = scratch
        self._log = log
        self._send = send
        self._rejoin = rejoin
        self._engine: Child[EngineCommand, EngineEvent] | None = None
        self._wanted: PublishWeights | None = None
        self._wanted_changed = asyncio.Event()
        self._loaded: asyncio.Future[EngineLoaded | EngineFailed] | None = None

    async def run(self) -> None:
        """Serves until cancelled. Raises EngineError when the engine cannot be kept alive."""
        for attempt in range(MAX_RESTARTS + 1):
            try:
                await self._serve()
            except* ChildDied as died:
                reason = str(died.exceptions[0])
                if attempt == MAX_RESTARTS or self._engine is None:
                    raise EngineError(reason) from None
                print(f"engine ended, starting it again: {reason}", flush=True)
                self._rejoin()

    def handle(self, message: Generate | Abort | PublishWeights) -> None:
        """Takes a message of the coordinator."""
        if isinstance(message, PublishWeights):
            self._wanted = message
            self._wanted_changed.set()
        elif self._engine is not None:
            self._engine.send(message)

    async def _serve(self) -> None:
        kind = resolve_engine(self._config.rollout.engine)
        rollout = self._config.rollout
        spec = EngineSpec(
            kind=kind,
            model_dir=str(self._model_dir),
            dtype=self._config.model.dtype,
            max_model_length=self._config.max_model_length,
            slots=self._slots,
            kv_cache_gib=rollout.kv_cache_gib,
            chunk_tokens=rollout.chunk_tokens,
            chunk_ms=rollout.chunk_ms,
            engine_args=rollout.engine_args,
        )
        engine = await start_engine(spec, rollout.threads, self._log)
        started = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(engine, started), name="engine")
                tasks.create_task(self._keep_weights(engine, started), name="weights")
        finally:
            await engine.stop(self._config.node.grace_s)

    async def _receive(self, engine: Child[EngineCommand, EngineEvent], started: asyncio.Event) -> None:
        while True:
            match await engine.receive():
                case TokenChunk() as chunk:
                    self._send(chunk)
                case Load() as load:
                    self.load = load
                case EngineStarted(device, seconds):
                    print(f"engine started on {device} in {seconds:.1f} s", flush=True)
                    self.device = device
                    self._engine = engine
                    started.set()
                case EngineLoaded() as loaded:
                    if self._loaded is not None and not self._loaded.done():
                        self._loaded.set_result(loaded)
                case EngineFailed(reason, None):
                    raise EngineError(reason)
                case EngineFailed() as failed:
                    if self._loaded is not None and not self._loaded.done():
                        self._loaded.set_result(failed)

    async def _keep_weights(self, engine: Child[EngineCommand, EngineEvent], started: asyncio.Event) -> None:
        """Pulls and loads the newest version offered; pulling goes on while the engine starts."""
        while True:
            await self._wanted_changed.wait()
            self._wanted_changed.clear()
            offer = self._wanted
            assert offer is not None
            version = offer.manifest.policy_version
            path = self._scratch / f"version_{version}.bin"
            begin = time.monotonic()
            try:
                await pull(offer.manifest, offer.holders, offer.ticket, path)
            except WeightsError as e:
                self._send(WeightsFailed(version, str(e)))
                continue
            pulled = time.monotonic()
            await started.wait()
            self._loaded = asyncio.get_running_loop().create_future()
            engine.send(LoadWeights(str(path), offer.manifest))
            match await self._loaded:
                case EngineLoaded(_, digest, seconds):
                    ready = WeightsReady(version, digest, num_bytes(offer.manifest), pulled - begin, seconds)
                    self._send(ready)
                case EngineFailed(reason):
                    self._send(WeightsFailed(version, reason))
            for old in self._scratch.glob("version_*.bin"):
                if old != path:
                    old.unlink()
