"""The engines of `lightrl serve`: processes that load weights, sample turns and score texts.

Owns which engine samples a turn, and where a stop string ends it: those of requests differ, and an
engine process has those of its run alone. Must not import torch.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from lightrl.config.schema import Config
from lightrl.devices.assign import CPU, Assignment, environment
from lightrl.engine.base import (
    EngineFailed,
    EngineLoaded,
    EngineStarted,
    LoadWeights,
    Scores,
    ScoreText,
    TextScored,
)
from lightrl.engine.start import EngineChild, resolve_engine, start_engine
from lightrl.engine.stop_strings import StopStrings
from lightrl.errors import EngineError, TrainerError, WeightsError
from lightrl.messages.responses import (
    Abort,
    FinishReason,
    Generate,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    TokenChunk,
)
from lightrl.rollout.engine_spec import RolloutOptions, engine_spec
from lightrl.system.threads import in_thread
from lightrl.trainer.protocol import Published, RankFailed, RankStarted, StartRank
from lightrl.trainer.rank_processes import Place, start_rank
from lightrl.wire import pack_i32, unpack_f32, unpack_i32

CHUNK_TOKENS = 4  # sampled beyond a stop string, at most
STOP_S = 2.0


@dataclass(slots=True)
class ServedTurn:
    """A turn that is sampled. `version`: that of its last token."""

    stop: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    version: int = 0
    ended: asyncio.Future[FinishReason] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def add(self, new: ResponseTokens, version: int) -> None:
        """Add tokens, up to the one that completes a stop string."""
        ids, finish = unpack_i32(new.token_ids), new.finish_reason
        at = self.stop.first(self.token_ids[-self.stop.num_tokens :], ids) if self.stop else None
        if at is not None:
            finish = "stop"
        end = None if at is None else at + 1
        self.token_ids += ids[:end]
        self.logprobs += unpack_f32(new.logprobs)[:end]
        self.version = version
        if finish is not None:
            self.ended.set_result(finish)


class ServedEngine:
    """One engine process. `run` beside all other calls, which wait until weights are loaded."""

    def __init__(self, child: EngineChild) -> None:
        self._child = child
        self._version = 0
        self._is_loaded = asyncio.Event()
        self._started = asyncio.Event()
        self._loads: asyncio.Queue[EngineLoaded | EngineFailed] = asyncio.Queue()
        self._turns: dict[str, ServedTurn] = {}
        self._scores: dict[str, asyncio.Future[TextScored]] = {}
        self._names = map(str, itertools.count())

    @property
    def num_running(self) -> int:
        return len(self._turns) + len(self._scores)

    async def run(self) -> NoReturn:
        """Receive from the engine. Raises ChildDied, EngineError."""
        while True:
            match await self._child.receive():
                case EngineStarted():
                    self._started.set()
                case TokenChunk(version, _, responses):
                    for each in responses:
                        turn = self._turns.get(each.response)
                        if turn is not None and not turn.ended.done():
                            turn.add(each, version)
                case TextScored() as scored if scored.name in self._scores:
                    self._scores.pop(scored.name).set_result(scored)
                case EngineFailed(reason, None) if (turn := self._turn_of(reason)) is not None:
                    turn.ended.set_exception(EngineError(reason))
                case EngineFailed(reason, None):
                    raise EngineError(reason)
                case EngineLoaded() | EngineFailed() as answer:
                    self._loads.put_nowait(answer)
                case _:
                    pass

    def _turn_of(self, reason: str) -> ServedTurn | None:
        """Return the turn that an engine's line is about: it begins with its name."""
        turn = self._turns.get(reason.partition(":")[0])
        return None if turn is None or turn.ended.done() else turn

    async def load(self, published: Published) -> None:
        """Turns that are sampled continue with these weights. Raises WeightsError."""
        await self._started.wait()
        self._is_loaded.clear()
        self._child.send(LoadWeights(published.file, published.canary, published.base))
        if isinstance(answer := await self._loads.get(), EngineFailed):
            raise WeightsError(answer.reason)
        self._version = answer.policy_version
        self._is_loaded.set()

    async def sample(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        max_tokens: int,
        stop: StopStrings | None,
    ) -> ServedTurn:
        """Return the turn when it has ended. Raises EngineError."""
        name, turn = next(self._names), ServedTurn(stop)
        self._turns[name] = turn
        try:
            await self._is_loaded.wait()
            request = ResponseRequest(name, 1, seed, pack_i32(prompt), b"", max_tokens)
            self._child.send(Generate(self._version, sampling, (request,)))
            await turn.ended
        finally:
            del self._turns[name]
            self._child.send(Abort(((name, 1),)))  # else a turn that was cut or left would run on
        return turn

    async def score(self, token_ids: Sequence[int]) -> Scores:
        """Raises EngineError."""
        await self._is_loaded.wait()
        name = next(self._names)
        found = self._scores[name] = asyncio.get_running_loop().create_future()
        try:
            self._child.send(ScoreText(name, pack_i32(token_ids)))
            scored = await found
        finally:
            self._scores.pop(name, None)
        if scored.error:
            raise EngineError(scored.error)
        best = unpack_i32(scored.best), unpack_f32(scored.best_logprobs)
        return Scores(unpack_f32(scored.logprobs), *best)

    async def stop(self) -> None:
        await self._child.stop(STOP_S)


async def start_engines(
    config: Config, model_dir: Path, gpus: Assignment, max_length: int, folder: Path
) -> list[ServedEngine]:
    """Start `rollout.nodes` of them. `folder`: of their logs. Raises EngineError."""
    kind, slots = resolve_engine(config.rollout.engine), config.rollout.slots
    found: list[ServedEngine] = []
    try:
        for k in range(config.rollout.nodes):
            part = gpus.engines[k] if k < len(gpus.engines) else CPU
            spec = engine_spec(config, kind, RolloutOptions("", slots, model_dir, "", gpus=part))
            spec = replace(
                spec, max_model_length=max_length, chunk_tokens=CHUNK_TOKENS, stop=(), max_window=0
            )
            devices = environment(part.tokens, os.environ)
            log = folder / "logs" / f"engine-{k}.log"
            child = await start_engine(spec, config.rollout.threads, log, devices)
            found.append(ServedEngine(child))
    except OSError as e:
        await asyncio.gather(*(each.stop() for each in found))
        raise EngineError(f"an engine cannot be started: {e.strerror or e}") from None
    return found


@contextlib.asynccontextmanager
async def published_weights(config: Config, folder: Path) -> AsyncIterator[Published]:
    """Publish the weights of `eval.checkpoint` below `folder`, as `lightrl eval` does; they are
    there until the end of the block. Raises TrainerError."""
    step, place = config.eval.step, folder / f"weights-{config.eval.step}"
    await in_thread(place.mkdir)
    command = StartRank(
        *(config.model_dump_json(), config.model.path, 0, 1, str(place / ".ranks"), str(place)),
        run_dir=str(folder),
        start_step=step,
    )
    rank = await start_rank(config, Place(folder, place), command, 0)
    try:
        match await rank.receive():
            case RankStarted(published=Published() as published):
                yield published
            case RankFailed(reason):
                raise TrainerError(reason)
            case event:
                raise TrainerError(f"the weights were not published: {type(event).__name__}")
    finally:
        await rank.stop(STOP_S)
        await in_thread(lambda: shutil.rmtree(place, ignore_errors=True))
