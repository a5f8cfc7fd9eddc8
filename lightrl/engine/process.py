"""An engine in a process of its own: the child's main loop.

Owns when tokens are sent (batched into chunks) and that none is sent for weights that were not
confirmed. Knows no engine's inner life. `start.py` starts it; torch or vLLM is imported here only.
"""

import gc
import logging
import socket
import sys
import time
import warnings
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from lightrl.engine.base import (
    Delta,
    DropBroadcast,
    Engine,
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineLoaded,
    EngineSlept,
    EngineSpec,
    EngineStarted,
    EngineWoken,
    LoadWeights,
    ReceiveWeights,
    ScoreText,
    Sleep,
    TextScored,
    Wake,
)
from lightrl.engine.inbox import EnginePipe, Inbox
from lightrl.engine.step_costs import measure
from lightrl.engine.stop_strings import with_stop_strings
from lightrl.errors import EngineError, EngineUnusable, LightRLError
from lightrl.messages.load import Load, StepCosts
from lightrl.messages.responses import Abort, FinishReason, Generate, ResponseTokens, TokenChunk
from lightrl.messages.weights import Canary
from lightrl.system.child import Pipe
from lightrl.system.process import importing
from lightrl.weights.broadcast.membership import UNWANTED
from lightrl.weights.canary import compare, tolerance
from lightrl.weights.version.manifest import VersionFile
from lightrl.wire import Codec, pack_f32, pack_i32, unpack_f32, unpack_i32

logger = logging.getLogger(__name__)

LOAD_EVERY_S = 0.5
FINISHED_SHARE = 5  # a finished response waits chunk_ms / 5 for others to finish with it


def main(sock: socket.socket) -> None:
    """Run the child: build the engine of the first command, serve until the pipe closes."""
    pipe: EnginePipe = Pipe(sock, Codec(EngineCommand), Codec(EngineEvent))
    warnings.simplefilter("ignore", FutureWarning)  # of what vLLM calls
    try:
        spec, *commands = pipe.receive()
        if not isinstance(spec, EngineSpec):
            raise SystemExit(f"first command must be EngineSpec, not {type(spec).__name__}")
        started = time.perf_counter()
        try:
            engine = build_engine(spec)
            costs = measure(engine, spec) if spec.parallel else None
            engine = with_stop_strings(engine, spec)
        except LightRLError as e:
            pipe.send(EngineFailed(str(e), is_unusable=isinstance(e, EngineUnusable)))
            logger.error("%s", e)
            raise SystemExit(1) from None
        gc.collect()
        gc.freeze()  # libraries' objects live as long as the process; scanning them takes time
        start_s = time.perf_counter() - started
        pipe.send(EngineStarted(engine.device, start_s, engine.notes, engine.num_workers))
        Server(engine, spec, pipe, Inbox(pipe, commands), costs).serve()
    except EOFError:
        sys.exit(0)  # the daemon closed the pipe; engines hold nothing that must be saved


def build_engine(spec: EngineSpec) -> Engine:
    """Import what the kind needs and build the engine. Raises EngineError or ConfigError."""
    match spec.kind:
        case "emulated":
            from lightrl.engine.emulated import EmulatedEngine

            return EmulatedEngine(spec)
        case "torch":
            with importing():
                from lightrl.engine.torch.engine import TorchEngine

            return TorchEngine(spec)
        case "vllm":
            from lightrl.engine.vllm.engine import VllmEngine

            return VllmEngine(spec)
        case _:
            assert_never(spec.kind)


@dataclass(slots=True)
class UnsentTokens:
    """Sampled tokens of one running attempt that have not been sent."""

    attempt: int
    offset: int  # of the first of them, in tokens of the response
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish_reason: FinishReason | None = None
    num_cached: int | None = None


class Server:
    """Drives one engine from one pipe. Blocking; `serve` raises EOFError when the pipe closes."""

    def __init__(
        self,
        engine: Engine,
        spec: EngineSpec,
        pipe: EnginePipe,
        inbox: Inbox,
        costs: StepCosts | None = None,
    ) -> None:
        """`costs`: of its steps, if they were measured."""
        self._engine, self._costs = engine, costs
        self._inbox = inbox
        self._pipe = pipe
        self._canary = spec.canary
        self._chunk_tokens = spec.chunk_tokens
        self._chunk_s = spec.chunk_ms / 1000
        self._version: tuple[int, str] | None = None  # and digest, of all tokens that are unsent
        self._is_served = False  # that version; else nothing is generated, whatever runs
        self._can_sleep = spec.can_sleep
        self._is_asleep = False
        self._outboxes: dict[str, UnsentTokens] = {}  # by response; one for each that runs
        self._flushed_at = 0.0  # when all outboxes were last empty
        self._finished_at: float | None = None  # when the first unsent finish happened
        self._load = Load()
        self._load_sent_at = 0.0

    def serve(self) -> None:
        while True:
            for command in self._inbox.take_all():
                self._perform(command)
            if self._is_served and self._engine.num_unfinished():
                self._step(time.perf_counter())
                self._report_load(time.perf_counter(), LOAD_EVERY_S)
                self._inbox.wait(0.0)
            else:
                # what finished waits for another step; after an abort none comes
                self._send(self._outboxes)
                self._report_load(time.perf_counter(), 0.0)
                self._inbox.wait(None)

    def _perform(self, command: EngineCommand) -> None:
        match command:
            case Generate():
                self._generate(command)
            case Abort(attempts):
                self._abort(attempts)
            case LoadWeights():
                self._load_weights(command)
            case ReceiveWeights():
                self._receive_weights(command)
            case DropBroadcast():
                self._engine.leave_group(UNWANTED)
            case Sleep():
                self._sleep()
            case Wake():
                self._wake()
            case ScoreText():
                self._pipe.send(self._scored(command))
            case EngineSpec():
                self._pipe.send(EngineFailed("the engine is built already"))
            case _:
                assert_never(command)

    def _generate(self, command: Generate) -> None:
        served = self._version[0] if self._version and self._is_served else None
        if served != command.policy_version:
            held = "none" if served is None else served
            wanted = command.policy_version
            self._pipe.send(
                EngineFailed(f"asked to generate with version {wanted}, loaded is {held}")
            )
            return
        if not self._outboxes:
            self._flushed_at = time.perf_counter()
        self._engine.remember(command.histories)
        for r in command.requests:
            running = self._outboxes.get(r.response)
            if running is not None and running.attempt >= r.attempt:
                continue  # the command came twice, or late
            if running is not None:
                self._abort(((r.response, running.attempt),))
            try:
                self._engine.add(r, command.sampling)
            except LightRLError as e:
                self._pipe.send(EngineFailed(str(e)))
                continue
            self._outboxes[r.response] = UnsentTokens(r.attempt, len(r.prefix) // 4)

    def _scored(self, command: ScoreText) -> TextScored:
        if not self._is_served:
            return TextScored(command.name, error="no weights are loaded")
        try:
            scores = self._engine.scores_of(unpack_i32(command.token_ids))
        except LightRLError as e:
            return TextScored(command.name, error=str(e))
        return TextScored(
            command.name,
            pack_f32(scores.logprobs),
            pack_i32(scores.best),
            pack_f32(scores.best_logprobs),
        )

    def _abort(self, attempts: Iterable[tuple[str, int]]) -> None:
        aborted: list[str] = []
        for response, attempt in attempts:
            outbox = self._outboxes.get(response)
            if outbox is not None and outbox.attempt == attempt:
                self._engine.abort(response)
                outbox.finish_reason = outbox.finish_reason or "abort"
                aborted.append(response)
        self._send(aborted)

    def _load_weights(self, command: LoadWeights) -> None:
        """Load a version from its file, and report it. If this fails, responses are aborted."""
        self._send(self._outboxes)
        self._is_served = False
        begun_at = time.perf_counter()
        try:
            self._require_awake()
            self._engine.load_weights(command.file, command.base)
        except (LightRLError, OSError) as e:
            self._fail(command.file, e)
            return
        self._confirm(command.file, command.canary, begun_at)

    def _receive_weights(self, command: ReceiveWeights) -> None:
        """Receive a version by broadcast. Responses pause meanwhile; if it fails, they stay paused
        until another version loads."""
        self._send(self._outboxes)
        self._is_served = False
        begun_at = time.perf_counter()
        try:
            self._require_awake()
            self._engine.receive_weights(command, self._inbox.is_unwanted)
        except (LightRLError, OSError) as e:
            self._fail(command.file, e, is_dropped=True)
            self._engine.leave_group("the version could not be received")
            return
        self._confirm(command.file, command.canary, begun_at)

    def _sleep(self) -> None:
        if self._is_asleep or not self._can_sleep:
            why = "it sleeps already" if self._is_asleep else "it was not built to"
            self._pipe.send(EngineFailed(f"the engine cannot sleep: {why}"))
            return
        begun_at = time.perf_counter()
        self._abort([(response, outbox.attempt) for response, outbox in self._outboxes.items()])
        self._version, self._is_served, self._is_asleep = None, False, True
        num_bytes = self._engine.sleep()
        self._pipe.send(EngineSlept(num_bytes, time.perf_counter() - begun_at))

    def _wake(self) -> None:
        if not self._is_asleep:
            self._pipe.send(EngineFailed("the engine cannot wake: it does not sleep"))
            return
        begun_at = time.perf_counter()
        try:
            self._engine.wake()
        except (LightRLError, RuntimeError, MemoryError) as e:
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
            logger.error("the engine cannot wake: %s", reason)
            raise SystemExit(1) from None
        self._is_asleep = False
        self._pipe.send(EngineWoken(time.perf_counter() - begun_at))

    def _require_awake(self) -> None:
        if self._is_asleep:
            raise EngineError("the engine sleeps: Wake must come first")

    def _confirm(self, file: VersionFile, canary: Canary | None, begun_at: float) -> None:
        """Serve the loaded version, if it passes its canary. Responses continue under it."""
        try:
            difference = self._compare(canary) if canary else None
        except LightRLError as e:
            self._fail(file, e)
            return
        self._version, self._is_served = (file.policy_version, file.digest), True
        load_s = time.perf_counter() - begun_at
        self._pipe.send(EngineLoaded(file.policy_version, file.digest, load_s, difference))

    def _fail(self, file: VersionFile, why: object, *, is_dropped: bool = False) -> None:
        """There is no version that could be served. Nothing runs any more, unless `is_dropped`."""
        if not is_dropped:
            for response in self._outboxes:
                self._engine.abort(response)
            self._outboxes.clear()
        reason = f"version {file.policy_version} was not loaded: {why}"
        self._pipe.send(EngineFailed(reason, file.policy_version, is_dropped=is_dropped))

    def _compare(self, canary: Canary) -> float:
        """Return by how much logprobs differ from the trainer's. Raises WeightsError if it is too
        much."""
        found = self._engine.logprobs_of(unpack_i32(canary.token_ids))
        most = tolerance(self._canary, canary.dtype, self._engine.dtype)
        return compare(unpack_f32(canary.logprobs), found, most)

    def _step(self, now: float) -> None:
        full = False
        for delta in self._engine.step():
            full |= self._buffer(delta, now)
        now = time.perf_counter()
        if full or now - self._flushed_at >= self._chunk_s or not self._engine.num_unfinished():
            self._send(self._outboxes)
            self._flushed_at, self._finished_at = now, None
        elif (
            self._finished_at is not None
            and now - self._finished_at >= self._chunk_s / FINISHED_SHARE
        ):
            self._send([r for r, outbox in self._outboxes.items() if outbox.finish_reason])
            self._finished_at = None

    def _buffer(self, delta: Delta, now: float) -> bool:
        """Store new tokens and return whether their response now has a whole chunk."""
        outbox = self._outboxes[delta.response]
        outbox.token_ids.extend(delta.token_ids)
        outbox.logprobs.extend(delta.logprobs)
        if delta.num_cached is not None:
            outbox.num_cached = delta.num_cached
        if delta.finish_reason is not None:
            outbox.finish_reason = delta.finish_reason
            if self._finished_at is None:
                self._finished_at = now
        return len(outbox.token_ids) >= self._chunk_tokens

    def _send(self, responses: Iterable[str]) -> None:
        """Send the tokens of these responses in one chunk and drop those that have finished."""
        chunk: list[ResponseTokens] = []
        for response in list(responses):
            box = self._outboxes[response]
            if box.token_ids or box.finish_reason:
                chunk.append(
                    ResponseTokens(
                        response,
                        box.attempt,
                        box.offset,
                        pack_i32(box.token_ids),
                        pack_f32(box.logprobs),
                        box.finish_reason,
                        box.num_cached if box.finish_reason else None,
                    )
                )
            if box.finish_reason:
                del self._outboxes[response]
            elif box.token_ids:
                box.offset += len(box.token_ids)
                box.token_ids, box.logprobs = array("i"), array("f")
        if chunk:
            assert self._version is not None  # nothing runs without one
            self._pipe.send(TokenChunk(*self._version, tuple(chunk)))

    def _report_load(self, now: float, every_s: float) -> None:
        if now - self._load_sent_at >= every_s:
            load = replace(self._engine.load(), costs=self._costs)
            if load != self._load:
                self._load, self._load_sent_at = load, now
                self._pipe.send(load)
