"""One daemon: the roles of a node in one event loop, their heartbeat, and an orderly end.

Owns hello, heartbeat, drain and bye. What a role does is in coordinator.py, rollout.py and
trainer.py beside this file. Must never block the loop: heavy work is in child processes.
"""

import asyncio
import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from lightrl.config import Config
from lightrl.errors import LightRLError, PeerUnreachable, ProtocolError
from lightrl.messages import (
    PROTOCOL,
    REJOIN,
    Abort,
    Bye,
    Drain,
    Generate,
    Heartbeat,
    Hello,
    Load,
    Message,
    PublishWeights,
    Role,
    TrainShard,
    Welcome,
)
from lightrl.node.coordinator import Head
from lightrl.node.link import Link, own_address
from lightrl.node.rollout import Rollout
from lightrl.node.scratch import scratch_dir
from lightrl.node.trainer import Trainer

WELCOME_S = 20.0  # a coordinator that is busy loading data may take a while to answer


@dataclass(frozen=True)
class DaemonOptions:
    """`config` and `run_dir` are needed by the coordinator role, `join` by a daemon without that role.

    `slots` 0 = as the run's config says.
    """

    name: str
    roles: tuple[Role, ...]
    run_dir: Path | None = None
    config: Config | None = None
    join: str | None = None
    slots: int = 0


def run(options: DaemonOptions) -> int:
    """Runs a daemon until it is done; returns the exit status. Raises LightRLError, one line, if it fails."""
    return uvloop.run(_main(options))


async def _main(options: DaemonOptions) -> int:
    head: Head | None = None
    address = options.join
    if "coordinator" in options.roles:
        assert options.config is not None
        assert options.run_dir is not None
        head = Head(options.config, options.run_dir, options.name)
        address = head.address
    worker_roles: tuple[Role, ...] = tuple(r for r in options.roles if r != "coordinator")
    worker = Worker(options, worker_roles, address) if worker_roles and address else None

    def stop(reason: str) -> None:
        if head is not None:
            head.stop(reason)
        elif worker is not None:
            worker.drain(reason)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    try:
        async with asyncio.TaskGroup() as tasks:
            if head is not None:
                tasks.create_task(head.run())
            if worker is not None:
                tasks.create_task(_work(worker, beside=head))
    except* LightRLError as errors:
        raise first_error(errors) from None
    return 0 if head is None or head.succeeded else 1


async def _work(worker: "Worker", beside: Head | None) -> None:
    """A worker that fails has told the coordinator why; it ends its daemon unless that is here, too."""
    try:
        await worker.run()
    except LightRLError as e:
        if beside is None:
            raise
        print(f"lightrl: {e}", flush=True)


def first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first exception in a group of groups: the one that ended the others."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Worker:
    """The trainer and rollout roles of a node, as a client of the coordinator."""

    def __init__(self, options: DaemonOptions, roles: tuple[Role, ...], address: str) -> None:
        self._name = options.name
        self._roles = roles
        self._address = address
        self._run_dir = options.run_dir
        self._hello = Hello(
            node=options.name,
            incarnation=time.time_ns(),
            roles=roles,
            protocol=PROTOCOL,
            pid=os.getpid(),
            host=socket.gethostname(),
            slots=options.slots,
        )
        self._rollout: Rollout | None = None
        self._trainer: Trainer | None = None
        self._drained = asyncio.Event()
        self._heard_at = time.monotonic()
        self._reason = "drained"
        self._broken = ""  # why this node cannot go on
        self._is_rejoining = False  # said hello again, not yet welcomed
        self._link: Link | None = None

    def drain(self, reason: str) -> None:
        """Leave in order: take no more work, say what remains to be said, go."""
        if not self._drained.is_set():
            self._reason = reason
            if self._link is not None:
                self._link.send(Drain(self._name, reason))
            self._drained.set()

    async def run(self) -> None:
        """Returns when the node has left. Raises LightRLError if it failed."""
        link = self._link = await Link.connect(
            self._address, self._name, on_break=lambda: self._rejoin("the connection broke")
        )
        try:
            welcome, early = await self._join(link)
            config = Config.model_validate_json(welcome.config_json)
            with scratch_dir(self._name) as scratch:
                await self._serve(link, config, welcome.model_files, early, scratch)
            link.send(Bye(self._reason))
        except LightRLError as e:
            link.send(Bye(str(e), ok=False))
            raise
        finally:
            link.close()

    async def _join(self, link: Link) -> tuple[Welcome, list[Message]]:
        """The coordinator's welcome, and what came with it and is yet to be handled."""
        link.send(self._hello)
        try:
            async with asyncio.timeout(WELCOME_S):
                while True:
                    messages = await link.receive()
                    for i, message in enumerate(messages):
                        if isinstance(message, Welcome):
                            _raise_if_refused(message)
                            self._is_rejoining = False  # the connection may have broken meanwhile
                            return message, messages[i + 1 :]
        except TimeoutError:
            raise PeerUnreachable(f"{self._address}: no welcome within {WELCOME_S:.0f} s") from None

    async def _serve(
        self,
        link: Link,
        config: Config,
        model_files: dict[str, bytes],
        early: list[Message],
        scratch: Path,
    ) -> None:
        self._heard_at = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                roles = self._start_roles(tasks, link, config, model_files, scratch)
                for message in early:
                    self._handle(message)
                background = [
                    tasks.create_task(self._receive(link), name="receive"),
                    tasks.create_task(self._beat(link, config), name="heartbeat"),
                ]
                await self._drained.wait()
                await self._leave(roles, config)
                for task in background:  # until here the coordinator must see that this node lives
                    task.cancel()
        except* LightRLError as errors:
            raise first_error(errors) from None
        finally:
            if self._trainer is not None:
                await self._trainer.close()

    def _start_roles(
        self,
        tasks: asyncio.TaskGroup,
        link: Link,
        config: Config,
        model_files: dict[str, bytes],
        scratch: Path,
    ) -> list[asyncio.Task[None]]:
        started: list[asyncio.Task[None]] = []
        if "rollout" in self._roles:
            # A node that joined from elsewhere has no run directory: its engine writes where the daemon does.
            log = self._run_dir / "logs" / f"{self._name}-engine.log" if self._run_dir is not None else None
            model_dir, pulled = scratch / "model", scratch / "pulled"
            _write_model_files(model_dir, model_files)
            pulled.mkdir()
            slots = self._hello.slots or config.rollout.slots
            self._rollout = Rollout(config, slots, model_dir, pulled, log, self._address, link.send)
            started.append(tasks.create_task(self._rollout.run(), name="rollout"))
        if "trainer" in self._roles:
            run_dir = self._run_dir or _run_dir_here(config)
            published = scratch / "published"
            published.mkdir()
            self._trainer = Trainer(config, run_dir, published, own_address(self._address), link.send)
            started.append(tasks.create_task(self._trainer.run(), name="trainer"))
        return started

    async def _leave(self, roles: list[asyncio.Task[None]], config: Config) -> None:
        """The last tokens are sent and a checkpoint is written before the roles end."""
        if self._rollout is not None:
            await self._rollout.flush()
        if self._trainer is not None:
            limit_s = None if self._trainer.all_steps_done else config.node.grace_s
            self._trainer.stop()
            await asyncio.wait([t for t in roles if t.get_name() == "trainer"], timeout=limit_s)
        for task in roles:
            task.cancel()
        await asyncio.wait(roles)

    async def _receive(self, link: Link) -> None:
        while True:
            for message in await link.receive():
                self._heard_at = time.monotonic()
                self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Generate() if self._drained.is_set():
                pass  # sent before the coordinator knew; it hands it to another node when this one has left
            case Generate() | Abort() | PublishWeights() if self._rollout is not None:
                self._rollout.handle(message)
            case TrainShard() if self._trainer is not None:
                self._trainer.handle(message)
            case Drain(_, reason):
                self.drain(reason)
            case Welcome(refused=refused) if refused == REJOIN:
                self._rejoin("given up by the coordinator")
            case Welcome():
                _raise_if_refused(message)
                self._is_rejoining = False
            case _:
                pass  # a heartbeat, or news for a role that this daemon does not have

    async def _beat(self, link: Link, config: Config) -> None:
        """Says that this node lives, how late its event loop is, and notices a silent coordinator."""
        period = config.node.heartbeat_s
        due = time.monotonic()
        while True:
            lag = time.monotonic() - due
            parts = [part for part in (self._rollout, self._trainer) if part is not None]
            load = self._rollout.load if self._rollout is not None else Load()
            link.send(Heartbeat(load, lag * 1000, next((p.device for p in parts if p.device), "")))
            if self._broken:
                raise PeerUnreachable(f"{self._address}: {self._broken}")
            silent = time.monotonic() - self._heard_at
            if silent > config.node.lease_s and lag < period:  # else it is this process that was stopped
                raise PeerUnreachable(f"{self._address}: coordinator not heard of for {silent:.1f} s")
            due = time.monotonic() + period
            await asyncio.sleep(period)

    def _rejoin(self, why: str) -> None:
        """Messages may be lost: introduce this node as a new one, with nothing running.

        A trainer cannot: what it has trained on is not known any more.
        """
        if self._drained.is_set() or self._is_rejoining:
            return
        if "trainer" in self._roles:
            self._broken = why
            return
        print(f"joining again: {why}", flush=True)
        if self._rollout is not None:
            self._rollout.forget()
        self._is_rejoining = True
        self._hello = replace(self._hello, incarnation=time.time_ns())
        if self._link is not None:
            self._link.send(self._hello)


def _run_dir_here(config: Config) -> Path:
    """On a machine that does not share the coordinator's: checkpoints and logs under the same name."""
    run_dir = config.run_dir.resolve()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return run_dir


def _raise_if_refused(welcome: Welcome) -> None:
    if welcome.refused:
        raise PeerUnreachable(f"the coordinator refuses this node: {welcome.refused}")


def _write_model_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        if Path(name).name != name:
            raise ProtocolError(f"model file {name!r} is not a plain name")
        (folder / name).write_bytes(data)
