"""The trainer and rollout roles of a node, as a client of the coordinator: hello, heartbeat, drain
and bye.

Owns whether the coordinator hears this node (state.py), and what is said when it does again; which
roles run here is in roles.py. Must never block the loop.

A node that is not heard goes on with its work. Nothing but a hello leaves before the coordinator
has answered it with a welcome: it says what still runs here, and whatever arrives before the answer
was sent by someone who did not know that.
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
from lightrl.daemon.parent import end_by_force
from lightrl.daemon.roles import Roles
from lightrl.daemon.state import AWAITS_ANSWER, EDGES, ConnectionEvent, ConnectionState
from lightrl.daemon.weights import MachineWeights, machine_weights, version_bytes
from lightrl.daemon.words import what_it_serves, why_it_leaves
from lightrl.devices.assign import Assignment
from lightrl.devices.plan import for_daemon
from lightrl.devices.sizes import slots_of
from lightrl.errors import LightRLError, PeerUnreachable, first_error
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
# a process that is gone has lost its name by then: longer than any lease that makes sense
TAKEN_S = 120.0


class Worker:
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
        self._roles = Roles(*place, *callbacks, shares, parallel)
        self._weights: MachineWeights | None = None  # while it takes part
        self._link: Link | None = None
        self._state = ConnectionState.OUT_OF_TOUCH
        self._admitted = asyncio.Event()  # for who waits until that is the state
        self._said = self._hello  # the last one, and when that was
        self._said_at = 0.0
        self._taken_since = 0.0  # another process has had our name; valid in NAME_TAKEN only
        self._heard_at = 0.0
        self._config: Config | None = None  # of the first welcome
        # To be asked to leave may happen in every state and changes none of them.
        self._drained = asyncio.Event()
        self.reason = "drained"

    def drain(self, reason: str) -> None:
        """Leave in order: take no more work, say what remains to be said, go."""
        if not self._drained.is_set():
            self.reason = reason
            logger.info("leaving: %s", why_it_leaves(reason))
            self._drained.set()
            self._send(Drain(self._name, reason))

    async def run(self) -> None:
        """Returns when the node has left. Raises LightRLError if it failed."""
        link = self._link = await Link.connect(
            self._address, self._name, self._key, on_break=self._lose_touch, on_back=self._say_hello
        )
        force: threading.Timer | None = None
        try:
            joined = await self._join(link)
            if joined is not None:
                welcome, early = joined
                config = self._config = config_of(welcome)
                log.configure_again(config.logging.level, config.logging.json_)
                logger.info(what_it_serves(config, self._address, self._hello))
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

    # What is said to the coordinator

    def _send(self, message: Message) -> None:
        """Lost if the coordinator does not hear us: rollout and trainer say it again when it
        does."""
        if self._link is not None and self._state is ConnectionState.ADMITTED:
            self._link.send(message)

    def _relay(self, message: Message) -> None:
        """To another trainer node: what it is about says itself whether it still counts."""
        if self._link is not None and self._link.is_up:
            self._link.send(message)

    def _move(self, event: ConnectionEvent) -> None:
        self._state = next_state(EDGES, self._state, event)
        if self._state is ConnectionState.ADMITTED:
            self._admitted.set()
        else:
            self._admitted.clear()

    def _lose_touch(self) -> None:
        """Messages may have been lost, in both directions, and nothing may be said until the next
        welcome."""
        self._roles.on_lost_messages()
        self._fall_silent()

    def _fall_silent(self) -> None:
        was_heard = self._state is ConnectionState.ADMITTED
        self._move(ConnectionEvent.TOUCH_LOST)
        self._roles.on_disconnect()
        if was_heard and not self._drained.is_set():
            logger.warning("lost touch with the coordinator; the work goes on")

    def _say_hello(self) -> None:
        if self._link is not None:
            self._move(ConnectionEvent.HELLO_SAID)
            self._said, self._said_at = self._hello_now(), time.monotonic()
            self._link.send(self._said)

    def _hello_now(self) -> Hello:
        return self._roles.complete(self._hello)

    def _rejoin(self, has_missed: bool = False) -> None:
        """The connection stands, but the coordinator does not know this node any more as it is."""
        if self._state in AWAITS_ANSWER or self._link is None:
            return  # it will be compared with what is true when the answer comes
        if has_missed:
            self._roles.on_lost_messages()
        self._fall_silent()
        if self._link.is_up:  # else on_back says hello
            self._say_hello()

    def _restarted(self) -> None:
        """What was trained since the last checkpoint is gone: this is another trainer."""
        self._hello = replace(
            self._hello, incarnation=max(time.time_ns(), self._hello.incarnation + 1)
        )
        self._rejoin()

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._state not in AWAITS_ANSWER:
            require_kept(welcome)
            return  # the connection has broken meanwhile, or it came twice
        if welcome.refused == ENDING:
            self._move(ConnectionEvent.DISMISSED)
            self.drain(ENDING)
            return
        if welcome.refused == TAKEN and self._may_wait_for_name():
            return  # `_beat` says it again
        require_welcome(welcome)
        if self._roles.has_trainer and not is_same_config(self._config, config_of(welcome)):
            self._move(ConnectionEvent.DISMISSED)
            self.drain("the config of the run has changed: restart this trainer")
            return
        said, now = self._said, self._hello_now()
        if replace(said, running=()) != replace(now, running=()):
            self._say_hello()  # it has become untrue
            return
        self._move(ConnectionEvent.WELCOMED)
        logger.info("the coordinator hears this node again")
        if self._weights is not None:
            self._send(self._weights.endpoint)
        self._roles.on_welcome()
        if self._drained.is_set():
            self._send(Drain(self._name, self.reason))

    def _may_wait_for_name(self) -> bool:
        """Another process has our name: most likely the one before us, which is gone but not yet
        given up."""
        now = time.monotonic()
        if self._state is not ConnectionState.NAME_TAKEN:
            self._taken_since = now
            logger.warning("%s: %s; waiting until it is gone", self._name, TAKEN)
        self._move(ConnectionEvent.NAME_REFUSED)
        return now - self._taken_since < TAKEN_S

    # Its life

    async def _join(self, link: Link) -> tuple[Welcome, list[Message]] | None:
        """The first welcome, and what came with it and is yet to be handled. None if drained
        before."""
        self._say_hello()
        joining = asyncio.ensure_future(self._first_welcome(link))
        drained = asyncio.ensure_future(self._drained.wait())
        try:
            waited = {joining, drained}
            await asyncio.wait(waited, timeout=WELCOME_S, return_when=asyncio.FIRST_COMPLETED)
            if self._state is ConnectionState.NAME_TAKEN:
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
                if isinstance(message, Welcome) and self._state in AWAITS_ANSWER:
                    if message.refused == ENDING:
                        self.drain(ENDING)
                        continue
                    if message.refused == TAKEN and self._may_wait_for_name():
                        await asyncio.sleep(TAKEN_PAUSE_S)
                        if link.is_up:  # else on_back says hello
                            self._say_hello()
                        continue
                    require_welcome(message)
                    self._move(ConnectionEvent.WELCOMED)
                    return message, messages[i + 1 :]

    async def _find_gpus(self, config: Config, model_files: dict[str, bytes]) -> Assignment:
        """For its ranks and its engine. Raises ConfigError, one line, if there is no room."""
        if self._gpus is not None:
            return Assignment(self._gpus.tokens, (self._gpus,))
        said = self._hello
        of_this = (self._role_names, model_files, said.slots, not self._is_alone)
        find = partial(for_daemon, config, *of_this, bool(said.shares), said.parallel)
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
        async with (
            scratch_dir_in_thread(self._name, need_bytes) as scratch,
            machine_weights(config, self._address, self._key, port) as self._weights,
        ):
            self._send(self._weights.endpoint)
            self._heard_at = time.monotonic()
            slots = self._hello.slots or slots_of(config, self._hello.parallel)
            what = (config, model_files, slots, scratch, self._weights, gpus)
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._roles.start(tasks, *what)
                    for message in early:
                        self._handle(message)
                    background = [
                        tasks.create_task(self._receive(link), name="receive"),
                        tasks.create_task(self._beat(link, config), name="heartbeat"),
                    ]
                    await self._drained.wait()
                    if force is not None:
                        # no thread to spare: it leaves without that
                        with contextlib.suppress(RuntimeError):
                            force.start()
                    await self._roles.leave(config.node.grace_s, self._admitted)
                    # until here the coordinator must see that this node lives
                    for task in background:
                        task.cancel()
            except* LightRLError as errors:
                raise first_error(errors) from None
            finally:
                await self._roles.close()

    async def _receive(self, link: Link) -> None:
        while True:
            for message in await link.receive():
                self._heard_at = time.monotonic()
                self._handle(message)

    def _handle(self, message: Message) -> None:
        is_admitted = self._state is ConnectionState.ADMITTED
        match message:
            case Generate() if self._drained.is_set() or not is_admitted:
                pass  # sent before the coordinator knew: it is sent once more, here or elsewhere
            case Drain(_, reason):
                self.drain(reason)
            case Welcome(refused=refused) if refused == REJOIN:
                self._rejoin(has_missed=True)
            case Welcome():
                self._on_welcome(message)
            case _ if is_admitted or isinstance(message, Abort | PublishWeights | TrainerRelay):
                self._roles.handle(message)
            case _:
                pass  # of the time before this node was welcomed

    async def _beat(self, link: Link, config: Config) -> None:
        """Says that this node lives and how late its loop is; loses patience with a silent
        coordinator."""
        period, patience_s = config.node.heartbeat_s, config.node.patience_s
        due = time.monotonic()
        while True:
            now = time.monotonic()
            lag = now - due
            self._send(self._roles.heartbeat(lag * 1000))
            silent_s = now - self._heard_at
            if silent_s > patience_s and lag < period:  # else it is this process that was stopped
                raise PeerUnreachable(
                    f"{self._address}: no word from the coordinator for {silent_s:.1f} s"
                )
            is_taken = self._state is ConnectionState.NAME_TAKEN
            is_due = now - self._said_at > (TAKEN_PAUSE_S if is_taken else WELCOME_S)
            if self._state in AWAITS_ANSWER and is_due and link.is_up:
                self._say_hello()  # it may have been too busy to keep it
            due = now + period
            await asyncio.sleep(period)
