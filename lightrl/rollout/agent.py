"""The rollout role of a daemon: supervises an engine process, its weights, and its tokens on their
way to the coordinator.

The coordinator decides which responses run here; the engine runs on while it cannot be reached.
Never touches a tensor.
"""

import asyncio
import logging
import os
from collections.abc import Callable

from lightrl.config.schema import Config
from lightrl.devices.assign import environment
from lightrl.engine.base import (
    EngineFailed,
    EngineLoaded,
    EngineSlept,
    EngineSpec,
    EngineStarted,
    EngineWoken,
    Kind,
)
from lightrl.engine.start import EngineChild, resolve_engine, start_engine
from lightrl.errors import EngineError, EngineUnusable, first_error
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.load import Load
from lightrl.messages.message import Message
from lightrl.messages.responses import Abort, Generate, TokenChunk
from lightrl.messages.sharing import SetDevices
from lightrl.messages.weights import PublishWeights, WeightsFailed, WeightsProgress
from lightrl.rollout.broadcast import BroadcastMember
from lightrl.rollout.engine_spec import RolloutOptions, engine_spec
from lightrl.rollout.orders import EngineOrders
from lightrl.rollout.resend_buffer import ResendBuffer
from lightrl.rollout.state import EDGES, EngineChange, EngineState
from lightrl.rollout.turns import Turns
from lightrl.rollout.weights import Callbacks, NodeWeights
from lightrl.state_machine import next_state
from lightrl.system.addresses import host_and_port
from lightrl.system.child import ChildDied, retry_on_resource_limit
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.system.threads import cancel
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer

logger = logging.getLogger(__name__)

RESTARTS = RestartPolicy(max_restarts=2)  # of engine processes that never loaded a version
STOP_S = 2.0  # for an engine, which has nothing to save
FLUSH_S = 2.0  # for the last tokens of what runs here


class RolloutAgent:
    """Runs the engine of this node, and sends its tokens to the coordinator. Owns the process, the
    versions that are here, and the tokens that the coordinator may lack. Decides when the engine is
    started again, and when it is given up."""

    def __init__(
        self,
        options: RolloutOptions,
        config: Config,
        send: Callable[[Message], None],
        store: Store,
        server: WeightServer,
        rejoin: Callable[[], None] = lambda: None,
    ) -> None:
        """`store` and `server`: this daemon's, open. Messages given to `send` may be lost if
        `on_disconnect` is called; `resend` sends them again. `rejoin`: see turns.py.
        """
        self.load = Load()
        self.device = ""
        self.num_workers = 0  # of the engine, once it has started
        self._options = options
        self._config = config
        self._kind: Kind | None = None  # of the engine, once it is chosen
        self._send = send
        host, _ = host_and_port(options.address)
        self._member = BroadcastMember(send, host, config.weights.timeout_s)
        self._weights = NodeWeights(
            options.node,
            config.weights,
            store,
            server,
            host,
            Callbacks(send, lambda: self.serves, self._member.fail),
        )
        takes_turns, has_sizes = options.takes_turns, bool(options.parallel)
        self._turns = Turns(takes_turns, send, rejoin, self._weights.again, has_sizes)
        self.state = EngineState.STARTING
        # the process; `state` is whether it takes commands
        self._engine: EngineChild | None = None
        self._crashes = CrashCounter(RESTARTS)
        # This process was useful, so the next one may be, too. Deaths of sleeping ones are counted
        # in turns.py.
        self._was_useful = False
        self._running: dict[str, int] = {}  # response -> attempt
        self._unacked = ResendBuffer(config.async_.max_staleness)
        self._drained = asyncio.Event()  # set while nothing runs here
        self._drained.set()
        self._loaded: tuple[int, str] | None = None  # the version loaded last, and its digest
        # Whether the coordinator can be reached. No part of the state: every state is possible
        # with it and without, and only what the resend buffer may drop depends on it.
        self._is_connected = True

    @property
    def serves(self) -> tuple[int, str] | None:
        """The version that the engine has loaded, and its digest; None while it loads another."""
        return self._loaded if self.state is EngineState.SERVING else None

    @property
    def is_released(self) -> bool:
        """Return whether other processes have the devices: there is no engine, or it sleeps."""
        return self._turns.is_released

    @property
    def has_file(self) -> bool:
        """Return whether other nodes can pull from here the version that it `serves`."""
        return self._weights.has_file

    @property
    def unacked(self) -> tuple[tuple[str, int], ...]:
        """(response, attempt) of all responses whose tokens the coordinator may lack."""
        return self._unacked.unacked()

    def on_disconnect(self) -> None:
        """Messages may have been lost, and are until `resend`."""
        self._is_connected = False

    def resend(self) -> None:
        """The coordinator is back and has got `serves` and `unacked`: send all tokens that it may
        lack."""
        self._is_connected = True
        self._turns.welcomed()
        for chunk in self._unacked.chunks():
            self._send(chunk)

    @property
    def pulls(self) -> WeightsProgress | None:
        """The progress of the version that it pulls."""
        return self._weights.progress

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineError when the engine cannot be kept alive."""
        fetching = asyncio.create_task(self._weights.run(), name="weights")
        serving = asyncio.create_task(self._serve_always(), name="engines")
        try:
            await asyncio.wait({fetching, serving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, fetching):
                if task.done():
                    task.result()
        finally:
            await cancel(serving, fetching)
            await self._weights.close()

    async def _serve_always(self) -> None:
        while True:
            self._turns.gone()
            await self._turns.ours.wait()
            if not self._turns.ours.is_set():
                continue  # released before a start had begun
            try:
                # In a task of its own: its task group leaves its own cancellations counted.
                await asyncio.create_task(self._serve(), name="serve")
            except* EngineUnusable as failed:
                reason = str(first_error(failed))
                if self._kind != "vllm" or self._config.rollout.engine != "auto":
                    raise EngineError(reason) from None
                self._kind = "torch"
                logger.warning("the torch engine takes over: %s", reason)
            except* ChildDied as died:
                reason = str(died.exceptions[0])
                why = self._turns.refusal if self._options.parallel else ""  # others do its work
                if why or self._crashes.is_given_up:
                    raise EngineError(why or reason) from None
                logger.warning("starting the engine again: %s", reason)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # a group drops one that comes with an error

    def handle(
        self,
        message: Generate | Abort | PublishWeights | SetDevices,
    ) -> None:
        """Handle a message of the coordinator."""
        match message:
            case SetDevices():
                self._turns.order(message, self.state is EngineState.STARTING)
                if message.active and self._turns.refusal:
                    self._refuse(self._turns.refusal)
            case PublishWeights(version) if reason := self._turns.refusal:
                self._send(WeightsFailed(version, reason[:MAX_TEXT]))
            case PublishWeights():
                self._member.offered(message)
                self._weights.offer(message)
            case Abort(attempts):
                self._unacked.forget(attempts)
                if self.state is not EngineState.STARTING:
                    self._order(message)
            case Generate():
                self._generate(message)

    def _generate(self, message: Generate) -> None:
        if (served := self.serves) is None:
            return
        version = served[0]
        # a mistake of the coordinator, which offers the version again
        if message.policy_version != version:
            reason = f"asked to generate with version {message.policy_version}, {version} is loaded"
            self._send(WeightsFailed(message.policy_version, reason))
            return
        self._running |= {r.response: r.attempt for r in message.requests}
        self._drained.clear()
        self._unacked.start(message.requests)
        self._order(message)

    async def flush(self, limit_s: float = FLUSH_S) -> None:
        """Abort all responses; returns when their last tokens were sent, or after `limit_s`."""
        if self._running:
            self._order(Abort(tuple(self._running.items())))
            try:
                await asyncio.wait_for(self._drained.wait(), limit_s)
            except TimeoutError:
                logger.warning(
                    "%d responses: their last tokens could not be sent", len(self._running)
                )

    def _order(self, command: Generate | Abort) -> None:
        assert self._engine is not None  # nothing runs or is served in STARTING
        self._engine.send(command)

    def move(self, change: EngineChange) -> None:
        self.state = next_state(EDGES, self.state, change)

    def _forget_running(self) -> None:
        """The engine runs nothing any more."""
        self._running.clear()
        self._drained.set()
        self._unacked.end_all()

    async def _serve(self) -> None:
        self._kind = self._kind or resolve_engine(self._config.rollout.engine)
        spec = engine_spec(self._config, self._kind, self._options)
        engine = self._engine = await self._start(spec)
        started = asyncio.Event()
        orders = EngineOrders(self, engine, self._weights, self._member, self._turns, self._send)
        node, member = self._config.node, self._member
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(engine, started, orders), name="engine")
                tasks.create_task(orders.run(started), name="orders")
                for is_due, limit_s in (
                    (self._is_reply_due, node.patience_s),
                    (lambda: member.is_ending, member.patience_s),
                    (self._is_start_due, node.patience_s),
                    (self._is_release_due, node.grace_s),
                ):
                    tasks.create_task(engine.require_answers(is_due, limit_s), name="deadline")
        except* ChildDied as died:
            # before `stop`: an engine that hangs may be slow to kill
            self._give_up_engine(str(died.exceptions[0]))
            raise
        finally:
            await engine.stop(STOP_S)

    def _give_up_engine(self, reason: str) -> None:
        """The engine has died with all that it ran. A version that is wanted is reported as failed,
        unless other processes have the devices."""
        if self._was_useful:
            self._crashes.progressed()
        else:
            self._crashes.crashed()
        was_ours = self._turns.ours.is_set()
        self._turns.died(reason)
        self._was_useful = False
        self.move(EngineChange.DIED)
        self._forget_running()
        self.num_workers, self.device = 0, ""
        if was_ours:
            self._refuse(self._turns.refusal or reason)
        self._member.ended()

    def _refuse(self, reason: str) -> None:
        """Report that the version that is wanted is not served."""
        if (wanted := self._weights.wanted) is not None:
            self._send(WeightsFailed(wanted.policy_version, reason[:MAX_TEXT]))

    # Deadlines: an engine that is silent for longer than one of them allows is killed.

    def _is_reply_due(self) -> bool:
        """Return whether the engine sends tokens or loads a version. False during a broadcast,
        which has other deadlines."""
        if self.state is EngineState.LOADING:
            return not (self._member.is_receiving or self._member.is_ending)
        return self.state is EngineState.SERVING and bool(self._running)

    def _is_start_due(self) -> bool:
        """Other processes wait for the devices. A start is not cut short: where turns are shorter
        than a start, the engine would never be up."""
        return self._turns.due.is_set() and self.state is EngineState.STARTING

    def _is_release_due(self) -> bool:
        return self._turns.due.is_set() and self.state is not EngineState.STARTING

    async def _start(self, spec: EngineSpec) -> EngineChild:
        """Try again while this machine lacks descriptors, processes or memory. Raises
        EngineError."""
        threads = self._config.rollout.threads
        devices = environment(self._options.gpus.tokens, os.environ)
        try:
            return await retry_on_resource_limit(
                lambda: start_engine(spec, threads, self._options.log, devices),
                "the engine",
                logger.warning,
            )
        except OSError as e:
            raise EngineError(f"the engine cannot be started: {e.strerror or e}") from None

    async def _receive(
        self, engine: EngineChild, started: asyncio.Event, orders: EngineOrders
    ) -> None:
        """Receive from the engine: send tokens to the coordinator, pass answers to `orders`."""
        while True:
            match await engine.receive():
                case TokenChunk() as chunk:
                    self._unacked.add(chunk)
                    self._send(chunk)
                    self._note_finished(chunk)
                case Load() as load:
                    self.load = load
                case EngineStarted(device, seconds, notes, num_workers):
                    logger.info("engine started on %s in %.1f s", device, seconds)
                    for note in notes:
                        logger.warning("engine: %s", note)
                    self.device = device
                    if not self._options.takes_turns:  # two on a device are in no group together
                        self.num_workers = num_workers
                        self._member.started(engine.send)
                    self.move(EngineChange.STARTED)
                    started.set()
                case EngineLoaded(version, digest) as loaded:
                    self.move(EngineChange.LOADED)
                    self._was_useful = True
                    self._loaded = version, digest
                    self._unacked.loaded(version, self._is_connected)
                    orders.answers.put_nowait(loaded)
                case EngineSlept() as slept:
                    self.move(EngineChange.SLEPT)
                    self._was_useful = True
                    orders.answers.put_nowait(slept)
                case EngineWoken(seconds):
                    logger.debug("the engine woke in %.2f s", seconds)
                case EngineFailed(reason, None, is_unusable):
                    raise EngineUnusable(reason) if is_unusable else EngineError(reason)
                case EngineFailed() as failed:
                    self.move(EngineChange.LOAD_FAILED)
                    if not failed.is_dropped:
                        self._forget_running()
                    orders.answers.put_nowait(failed)

    def _note_finished(self, chunk: TokenChunk) -> None:
        for item in chunk.responses:
            if item.finish_reason is not None and self._running.get(item.response) == item.attempt:
                del self._running[item.response]
        if not self._running:
            self._drained.set()
