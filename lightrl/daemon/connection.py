"""The roles of a node but the coordinator's, as a client of the coordinator: hello, heartbeat,
drain and bye.

Owns the state of the connection (state.py), and what is sent again after a reconnect; the roles
that run here are in roles.py. Must never block the loop.

A disconnected node continues its work. It sends nothing but a hello until the coordinator answers
with a welcome: the hello lists what still runs here, and any message that arrives before the answer
was sent without that information.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lightrl import log
from lightrl.config.schema import Config
from lightrl.daemon.admission import config_of, is_same_config, require_kept, require_welcome
from lightrl.daemon.parent import describe_reason, end_by_force
from lightrl.daemon.roles import Roles
from lightrl.daemon.state import EDGES, ConnectionEvent, ConnectionState
from lightrl.daemon.weights import MachineWeights, machine_weights, version_bytes
from lightrl.devices.assign import NO_GPUS, Assignment
from lightrl.devices.plan import for_daemon
from lightrl.devices.sizes import slots_of
from lightrl.errors import LightRLError, PeerUnreachable, first_error
from lightrl.messages.episodes import BeginEpisode, EndEpisode
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.message import Message
from lightrl.messages.nodes import ENDING, PROTOCOL, REJOIN, TAKEN, Bye, Drain, Hello, Role, Welcome
from lightrl.messages.responses import Abort, Generate
from lightrl.messages.trainers import TrainerRelay
from lightrl.messages.weights import PublishWeights
from lightrl.state_machine import next_state
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread
from lightrl.transport.link import Link
from lightrl.weights.machine.scratch import scratch_dir_in_thread

if TYPE_CHECKING:
    from lightrl.daemon.main import DaemonOptions

logger = logging.getLogger(__name__)

WELCOME_S = 20.0  # a coordinator that is busy loading data may take a while to answer
TAKEN_PAUSE_S = 0.5  # before the next hello under a name that another process still has
# by then the lease of a dead process has expired: longer than any lease that makes sense
TAKEN_S = 120.0


class NodeConnection:
    def __init__(self, options: "DaemonOptions", address: str, is_alone: bool = True) -> None:
        """`is_alone`: this process has no other purpose, and may end when a role cannot be
        ended."""
        name = options.name
        self._name = name
        self._role_names: tuple[Role, ...] = tuple(r for r in options.roles if r != "coordinator")
        self._address = address
        self._key = options.key
        self._is_alone = is_alone
        self._gpus = options.gpus
        shares, parallel = options.shares, options.parallel
        self._hello = Hello(
            node=name,
            incarnation=time.time_ns(),
            roles=self._role_names,
            protocol=PROTOCOL,
            pid=os.getpid(),
            host=socket.gethostname(),
            slots=options.slots,
            is_preemptible=options.is_preemptible,
            shares=shares,
            part=options.part,
            is_released=bool(shares or parallel),
            parallel=parallel,
        )
        callbacks = (self._send, self._restarted, self._relay, self.drain, self._rejoin)
        place = (name, self._role_names, address, options.run_dir)
        self._roles = Roles(*place, *callbacks, shares, parallel, options.workers, options.key)
        self._weights: MachineWeights | None = None  # while it takes part
        self._link: Link | None = None
        self._state = ConnectionState.DISCONNECTED
        self._admitted = asyncio.Event()  # set in that state only
        self._last_hello = self._hello  # that was sent, and when
        self._hello_at = 0.0
        self._taken_since: float | None = None  # another process has this name; None unless JOINING
        self._next_hello: asyncio.TimerHandle | None = None
        self._received_at = 0.0
        self._config: Config | None = None  # of the first welcome
        # A drain may start in every state and changes none of them.
        self._drained = asyncio.Event()
        self.reason = "drained"

    @property
    def _is_environment(self) -> bool:
        return "environment" in self._role_names

    def drain(self, reason: str) -> None:
        """Leave in order: take no more work, send what remains, stop."""
        if not self._drained.is_set():
            self.reason = reason
            logger.info("leaving: %s", describe_reason(reason))
            self._drained.set()
            self._send(Drain(self._name, reason))

    async def run(self) -> None:
        """Run until the node has left. Raises LightRLError if it failed."""
        link = self._link = await Link.connect(
            self._address, self._name, self._key, on_break=self._on_break, on_back=self._send_hello
        )
        force: threading.Timer | None = None
        try:
            joined = await self._join(link)
            if joined is not None:
                welcome, early = joined
                config = self._config = config_of(welcome)
                log.configure_again(config.logging.level, config.logging.json_)
                logger.info(describe_service(config, self._address, self._hello))
                # a checkpoint is worth waiting for
                if self._is_alone and "trainer" not in self._role_names:
                    force = threading.Timer(config.node.grace_s, end_by_force)
                    force.daemon = True
                gpus = await self._find_gpus(config, welcome.model_files)
                await self._take_part(link, config, welcome.model_files, early, force, gpus)
            link.send(Bye(self.reason))
        except LightRLError as e:
            link.send(Bye(str(e)[:MAX_TEXT], ok=False))
            raise
        finally:
            link.close()
            if force is not None:
                force.cancel()

    # Messages to the coordinator

    def _send(self, message: Message) -> None:
        """Send to the coordinator if admitted; else drop: rollout and trainer send again after a
        welcome."""
        if self._link is not None and self._state is ConnectionState.ADMITTED:
            self._link.send(message)

    def _relay(self, message: Message) -> None:
        """Send to another trainer node, admitted or not: the receiver drops frames that are out of
        date."""
        if self._link is not None and self._link.is_up:
            self._link.send(message)

    def _transition(self, event: ConnectionEvent) -> None:
        self._state = next_state(EDGES, self._state, event)
        if self._state is ConnectionState.ADMITTED:
            self._admitted.set()
        else:
            self._admitted.clear()
        if self._state is not ConnectionState.JOINING:
            self._taken_since = None

    def _on_break(self) -> None:
        """Send nothing until the next welcome: messages may be lost in both directions."""
        self._roles.on_lost_messages()
        self._disconnect()

    def _disconnect(self) -> None:
        was_admitted = self._state is ConnectionState.ADMITTED
        self._transition(ConnectionEvent.CONNECTION_LOST)
        self._roles.on_disconnect()
        if was_admitted and not self._drained.is_set():
            logger.warning("disconnected from the coordinator; the work continues")

    def _send_hello(self) -> None:
        if self._link is not None:
            self._transition(ConnectionEvent.HELLO_SENT)
            self._last_hello, self._hello_at = self._hello_now(), time.monotonic()
            self._link.send(self._last_hello)

    def _hello_now(self) -> Hello:
        return self._roles.complete(self._hello)

    def _rejoin(self, has_missed: bool = False) -> None:
        """Send a new hello over an open connection: the coordinator's record of this node is out of
        date."""
        if self._state is ConnectionState.JOINING or self._link is None:
            return  # `_on_welcome` compares the hello with the state of then
        if has_missed:
            self._roles.on_lost_messages()
        self._disconnect()
        if self._link.is_up:  # else on_back sends hello
            self._send_hello()

    def _restarted(self) -> None:
        """Join as another incarnation: what was trained since the last checkpoint is lost."""
        self._hello = replace(
            self._hello, incarnation=max(time.time_ns(), self._hello.incarnation + 1)
        )
        self._rejoin()

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._state is not ConnectionState.JOINING:
            require_kept(welcome)
            return  # the connection broke meanwhile, or the welcome is a duplicate
        if welcome.refused == ENDING:
            self._transition(ConnectionEvent.DISMISSED)
            self.drain(ENDING)
            return
        if welcome.refused == TAKEN and self._waits_for_name():
            return
        require_welcome(welcome)
        if self._roles.has_trainer and not is_same_config(self._config, config_of(welcome)):
            self._transition(ConnectionEvent.DISMISSED)
            self.drain("the config of the run has changed: restart this trainer")
            return
        sent, now = self._last_hello, self._hello_now()
        if replace(sent, running=()) != replace(now, running=()):
            self._send_hello()  # the last one is out of date
            return
        self._transition(ConnectionEvent.WELCOMED)
        logger.info("reconnected to the coordinator")
        if self._weights is not None:
            self._send(self._weights.endpoint)
        self._roles.on_welcome()
        if self._drained.is_set():
            self._send(Drain(self._name, self.reason))

    def _waits_for_name(self) -> bool:
        """Send Hello again soon: another process has this name, most likely the predecessor of this
        one, whose lease has not expired. Return False if that has lasted too long."""
        now = time.monotonic()
        if self._taken_since is None:
            self._taken_since = now
            logger.warning("%s: %s; waiting until it is gone", self._name, TAKEN)
        if now - self._taken_since >= TAKEN_S:
            return False
        if self._next_hello is not None:
            self._next_hello.cancel()  # two may have been answered
        loop = asyncio.get_running_loop()
        self._next_hello = loop.call_later(TAKEN_PAUSE_S, self._repeat_hello)
        return True

    def _repeat_hello(self) -> None:
        is_waiting = self._state is ConnectionState.JOINING
        if is_waiting and self._link is not None and self._link.is_up:  # else on_back sends hello
            self._send_hello()

    # From the first hello to the end

    async def _join(self, link: Link) -> tuple[Welcome, list[Message]] | None:
        """Return the first welcome, and the messages after it that are not yet handled; None if
        drained before."""
        self._send_hello()
        joining = asyncio.ensure_future(self._first_welcome(link))
        drained = asyncio.ensure_future(self._drained.wait())
        try:
            waited = {joining, drained}
            await asyncio.wait(waited, timeout=WELCOME_S, return_when=asyncio.FIRST_COMPLETED)
            if self._taken_since is not None:
                await asyncio.wait(waited, timeout=TAKEN_S, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                return joining.result()
        finally:
            joining.cancel()
            drained.cancel()
        if self._drained.is_set():
            return None
        raise PeerUnreachable(f"{self._address}: no welcome within {WELCOME_S:.0f} s")

    async def _first_welcome(self, link: Link) -> tuple[Welcome, list[Message]]:
        while True:
            messages = await link.receive()
            for i, message in enumerate(messages):
                if isinstance(message, Welcome) and self._state is ConnectionState.JOINING:
                    if message.refused == ENDING:
                        self.drain(ENDING)
                        continue
                    if message.refused == TAKEN and self._waits_for_name():
                        continue
                    require_welcome(message)
                    self._transition(ConnectionEvent.WELCOMED)
                    return message, messages[i + 1 :]

    async def _find_gpus(self, config: Config, model_files: dict[str, bytes]) -> Assignment:
        """Find devices for ranks and engine. Raises ConfigError, one line, if there is no room."""
        if self._gpus is not None:
            return Assignment(self._gpus.tokens, (self._gpus,))
        if self._is_environment:
            return NO_GPUS
        hello = self._hello
        of_this = (self._role_names, model_files, hello.slots, not self._is_alone)
        find = partial(for_daemon, config, *of_this, bool(hello.shares), hello.parallel)
        found = await retry_on_resource_limit(
            lambda: in_thread(find), "the search for devices", logger.warning
        )
        for note in found.notes:
            logger.info(note)
        return found

    async def _take_part(
        self,
        link: Link,
        config: Config,
        model_files: dict[str, bytes],
        early: list[Message],
        force: threading.Timer | None,
        gpus: Assignment,
    ) -> None:
        is_trainer = "trainer" in self._role_names
        need_bytes = version_bytes(config, model_files, bool(gpus.ranks)) if is_trainer else 0
        port = config.node.weights_port if is_trainer else 0
        weights = (
            contextlib.nullcontext()
            if self._is_environment
            else machine_weights(config, self._address, self._key, port)
        )
        async with (
            scratch_dir_in_thread(self._name, need_bytes) as scratch,
            weights as self._weights,
        ):
            if self._weights is not None:
                self._send(self._weights.endpoint)
            self._received_at = time.monotonic()
            slots = self._hello.slots or slots_of(config, self._hello.parallel)
            what = (config, model_files, slots, scratch, self._weights, gpus)
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._roles.start(tasks, *what)
                    for message in early:
                        self._handle(message)
                    background = [
                        tasks.create_task(self._receive(link), name="receive"),
                        tasks.create_task(self._beat(config), name="heartbeat"),
                    ]
                    await self._drained.wait()
                    if force is not None:
                        # without a free thread it leaves without a limit
                        with contextlib.suppress(RuntimeError):
                            force.start()
                    await self._roles.leave(config.node.grace_s, self._admitted)
                    # until here the coordinator must get heartbeats
                    for task in background:
                        task.cancel()
            except* LightRLError as errors:
                raise first_error(errors) from None
            finally:
                await self._roles.close()

    async def _receive(self, link: Link) -> None:
        while True:
            for message in await link.receive():
                self._received_at = time.monotonic()
                self._handle(message)

    def _handle(self, message: Message) -> None:
        is_admitted = self._state is ConnectionState.ADMITTED
        match message:
            case Generate() | BeginEpisode() if self._drained.is_set() or not is_admitted:
                pass  # sent before the coordinator got the hello or drain, and sent again after it
            case Drain(_, reason):
                self.drain(reason)
            case Welcome(refused=refused) if refused == REJOIN:
                self._rejoin(has_missed=True)
            case Welcome():
                self._on_welcome(message)
            case Abort() | EndEpisode() | PublishWeights() | TrainerRelay():
                self._roles.handle(message)
            case _ if is_admitted:
                self._roles.handle(message)
            case _:
                pass  # sent before this node was admitted

    async def _beat(self, config: Config) -> None:
        """Send heartbeats with the delay of the loop. Raises PeerUnreachable if the coordinator is
        silent for too long."""
        period, patience_s = config.node.heartbeat_s, config.node.patience_s
        due = time.monotonic()
        while True:
            now = time.monotonic()
            lag = now - due
            self._send(self._roles.heartbeat(lag * 1000))
            silent_s = now - self._received_at
            if silent_s > patience_s and lag < period:  # else this process itself was stopped
                raise PeerUnreachable(
                    f"{self._address}: nothing received from the coordinator for {silent_s:.1f} s"
                )
            if now - self._hello_at > WELCOME_S:
                self._repeat_hello()  # a busy coordinator may have dropped the last one
            due = now + period
            await asyncio.sleep(period)


def describe_service(config: Config, address: str, hello: Hello) -> str:
    """Return the run, roles and size of a node in one line.

    Example: serves run math at tcp://10.0.0.1:5600: rollout of Qwen/Qwen3-0.6B, 64 slots,
    preemptible
    """
    does: list[str] = []
    if "trainer" in hello.roles:
        does.append(f"trains {config.model.path}")
    if "rollout" in hello.roles:
        does.append(f"rollout of {config.model.path}")
        does.append(f"{hello.slots or slots_of(config, hello.parallel)} slots")
    if "environment" in hello.roles:
        does.append(f"environment {config.environment.named}")
        does.append(f"{hello.slots or config.environment.slots} episodes")
    does += ["preemptible"] * hello.is_preemptible
    does += [f"on the devices of {hello.shares}"] if hello.shares else []
    return f"serves run {config.run.name} at {address}: {', '.join(does)}"
