"""Real daemons on loopback for tests: a coordinator in the test's own loop, rollout daemons as
processes, and a trainer node that speaks the protocol but has no model, so that no test waits for
torch.
"""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

from lightrl.config.run_file import parse_config
from lightrl.config.schema import Config
from lightrl.coordinator.daemon import CoordinatorDaemon
from lightrl.core.events import Event
from lightrl.engine.base import EngineSpec
from lightrl.engine.emulated import EmulatedEngine
from lightrl.journal.write import MAX_TROUBLE_S
from lightrl.keys import read_key, write_keys
from lightrl.messages.nodes import PROTOCOL, REJOIN, Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import ResponseRequest, Sampling
from lightrl.messages.snapshot import Snapshot
from lightrl.messages.training import Checkpointed, ShardsTaken, StepDone, TrainShard
from lightrl.messages.weights import PublishWeights, WeightsEndpoint, WeightsSource
from lightrl.system.addresses import host_and_port
from lightrl.system.threads import cancel
from lightrl.transport.link import Link
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.write import TensorBytes, write_version
from tests.support.listener import Listener
from tests.support.relay import address_of, bound_socket, pass_on

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
LOOK_S = 0.05  # at what changes with time alone
DEADLINE_S = 120.0  # generous: the machine may be busy; nothing waits that long when all is well


def make_config(tmp_path: Path, **changes: dict[str, Any]) -> Config:
    """A small run on the emulated engine; `changes` are sections."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "dir": str(tmp_path), "bind": "tcp://127.0.0.1:*"},
        "model": {"path": str(QUICKSTART / "model")},
        "data": {"path": str(QUICKSTART / "train.jsonl"), "max_prompt_length": 8},
        "rollout": {
            "engine": "emulated",
            "slots": 8,
            "group_size": 4,
            "max_response_length": 60,
            "engine_args": {"t0_ms": 1.0, "mean_length": 20.0},
        },
        "train": {"steps": 2, "prompts_per_step": 4},
        "reward": {"functions": str(QUICKSTART / "reward.py") + ":reward"},
        "node": {"heartbeat_s": 0.1, "lease_s": 3.0, "grace_s": 5.0},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return parse_config(tree)


def uniform_version(folder: Path, version: int, salt: int = 0) -> VersionFile:
    """One small tensor, other bytes for each version."""
    tensor = TensorBytes("w", "uint8", (1000,), memoryview(bytes([version + salt]) * 1000))
    return write_version(folder / f"version_{version}.{salt}.bin", version, [tensor])


def published(
    file: VersionFile,
    sources: tuple[WeightsSource, ...] = (),
    portions: tuple[int, ...] = (),
) -> PublishWeights:
    """From a trainer, or, with sources, to a node."""
    return PublishWeights(
        file.policy_version,
        file.digest,
        file.num_bytes,
        file.manifest_bytes(),
        sources,
        portions=portions,
    )


class ScriptedTrainer:
    """A trainer node that publishes arbitrary bytes as weights and keeps every shard it is sent."""

    def __init__(self, scratch: Path) -> None:
        self.shards: list[TrainShard] = []
        self.files: list[VersionFile] = []
        self.scratch = scratch
        self.may_publish = asyncio.Event()  # a test may hold the end of a step back
        self.may_publish.set()
        self.holds_at = -1  # the end of this step is held back
        self.begins_at = 0  # steps done, as if from a checkpoint
        self.rounds_otherwise = False  # what it trains has other bytes
        self.kept: dict[int, int] = {}  # step of a checkpoint -> that of the oldest one kept then
        self._server = WeightServer()

    @property
    def address(self) -> str:
        """Where it serves weights, once it runs."""
        return self._server.addresses[0]

    async def run(self, address: str, key: str) -> None:
        hello = Hello("trainer", 1, ("trainer",), PROTOCOL, pid=0, host="test")
        link = await Link.connect(address, "trainer", key)
        await self._server.start("127.0.0.1")
        link.send(hello)
        beating = asyncio.create_task(self._beat(link))
        try:
            while True:
                for message in await link.receive():
                    match message:
                        case Welcome(refused=why) if why == REJOIN:  # the hello was lost
                            link.send(hello)
                        case Welcome(refused=why) if why:
                            raise AssertionError(f"the trainer was refused: {why}")
                        case Welcome() if not self.files:
                            server = self._server
                            link.send(WeightsEndpoint(server.addresses, server.secret))
                            await self._publish(link, self.begins_at)
                        case TrainShard():
                            self.shards.append(message)
                            link.send(ShardsTaken(message.step, message.index))
                            if message.last:
                                if message.step == self.holds_at:
                                    self.may_publish.clear()
                                await self.may_publish.wait()
                                sizes = [
                                    len(s.groups) for s in self.shards if s.step == message.step
                                ]
                                portions = tuple(n for n in sizes if n)
                                await self._publish(link, message.step + 1, portions)
                                link.send(
                                    StepDone(message.step, message.step + 1, {"loss/policy": 0.0})
                                )
                                if (oldest := self.kept.get(message.step + 1)) is not None:
                                    link.send(Checkpointed(message.step + 1, oldest))
                        case Drain():
                            link.send(Bye("drained"))
                            return
                        case _:
                            pass
        finally:
            beating.cancel()
            link.close()
            await self._server.close()

    async def _publish(self, link: Link, version: int, portions: tuple[int, ...] = ()) -> None:
        """In a thread: on a busy machine a large file takes seconds, and this is the coordinator's
        loop, too, which would answer nobody meanwhile."""
        salt = 100 if self.rounds_otherwise and version > self.begins_at else 0
        file = await asyncio.to_thread(uniform_version, self.scratch, version, salt)
        for old in self.files[:-1]:
            if old.digest != file.digest:
                self._server.retire(old.digest)
        self.files.append(file)
        self._server.serve(file)
        link.send(published(file, portions=portions))

    async def _beat(self, link: Link) -> None:
        while True:
            link.send(Heartbeat())
            await asyncio.sleep(0.1)


class SeenCoordinator(CoordinatorDaemon):
    """A coordinator that a test looks at after every event: what a watcher, to whom a snapshot goes
    now and then, may miss."""

    def __init__(self, *args: Any) -> None:
        self.looks: list[Callable[[], None]] = []
        super().__init__(*args)

    def feed(self, event: Event) -> None:
        super().feed(event)
        for look in tuple(self.looks):
            look()

    def snapshot(self) -> Snapshot:
        return self._records.snapshot(self._core, time.monotonic())


class Running:
    """A run under test."""

    def __init__(self, config: Config, head: SeenCoordinator, trainer: ScriptedTrainer) -> None:
        self.config = config
        self.head = head
        self.key_file = config.run_dir / "key"
        self.join_file = config.run_dir / "join"
        self.key = read_key(self.key_file)
        self.trainer = trainer
        self.finished = asyncio.create_task(head.run())
        self.training = asyncio.create_task(trainer.run(head.address, self.key))
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.silenced = False

    async def add_rollout(
        self, name: str, through: str | None = None, *options: str
    ) -> asyncio.subprocess.Process:
        """A rollout daemon; `through` is the address of a proxy in front of the coordinator,
        `options` are more of `lightrl up`."""
        join = ("--join", through or self.head.address, "--key", str(self.join_file), *options)
        command = ("-m", "lightrl.cli", "up", *join, "--name", name)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=pipe, stderr=pipe
        )
        self.processes[name] = process
        return process

    async def until(self, holds: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot for which `holds`, of those after every event and as time passes."""
        found: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()

        def look() -> None:
            if not found.done() and holds(snapshot := self.head.snapshot()):
                found.set_result(snapshot)

        self.head.looks.append(look)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not found.done():
                    assert not self.finished.done(), "the run was over before that held"
                    look()
                    await asyncio.wait({found, self.finished}, timeout=LOOK_S)
        finally:
            self.head.looks.remove(look)
        return found.result()

    async def replace_trainer(
        self, begins_at: int, rounds_otherwise: bool = False
    ) -> ScriptedTrainer:
        """The trainer vanishes without a word; returns the one before. Another one begins at this
        step."""
        before = self.trainer
        self.training.cancel()
        await asyncio.gather(self.training, return_exceptions=True)
        self.trainer = ScriptedTrainer(before.scratch)
        self.trainer.begins_at, self.trainer.rounds_otherwise = begins_at, rounds_otherwise
        self.training = asyncio.create_task(self.trainer.run(self.head.address, self.key))
        return before

    async def silence(self) -> None:
        """The coordinator vanishes without a word to anybody."""
        self.silenced = True
        for task in (self.finished, self.training):
            task.cancel()
        await asyncio.gather(self.finished, self.training, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if not is_listened_at(self.head.address):  # ZeroMQ closes in a thread of its own
                    return
                await asyncio.sleep(LOOK_S)

    async def until_finished(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait((self.finished, self.training), return_when=asyncio.FIRST_COMPLETED)
            if self.training.done():
                await self.training  # which may have failed
            await asyncio.shield(self.finished)


def is_listened_at(address: str) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(host_and_port(address))
        except OSError:
            return True
    return False


class Proxy:
    """A TCP proxy whose connections can be cut."""

    def __init__(self, target: str) -> None:
        self._target = host_and_port(target)
        self._piping: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        sock = bound_socket()
        self.address = f"tcp://{address_of(sock)}"
        self._listener = Listener(sock, self._serve)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._listener.close()

    def cut(self) -> None:
        """Closes every connection; new ones are let through."""
        for pipe in self._piping:
            pipe.cancel()

    async def _serve(self, sock: socket.socket) -> None:
        with socket.socket() as back:
            back.setblocking(False)
            await asyncio.get_running_loop().sock_connect(back, self._target)
            pipes = {
                asyncio.create_task(self.passes(*ends)) for ends in ((sock, back), (back, sock))
            }
            self._piping |= pipes
            try:
                await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._piping -= pipes
                await cancel(*pipes)  # they use both sockets

    async def passes(self, source: socket.socket, sink: socket.socket) -> None:
        await pass_on(source, sink)


@contextlib.asynccontextmanager
async def a_run(
    tmp_path: Path,
    max_trouble_s: float = MAX_TROUBLE_S,
    resume: bool = False,
    **changes: dict[str, Any],
) -> AsyncIterator[Running]:
    """A coordinator and a scripted trainer; afterwards every process that was started is gone."""
    config = make_config(tmp_path, **changes)
    config.run_dir.mkdir(parents=True, exist_ok=resume)
    key = read_key(config.run_dir / "key") if resume else write_keys(config.run_dir)
    head = SeenCoordinator(config, config.run_dir, "head", key, resume, max_trouble_s)
    trainer = ScriptedTrainer(tmp_path)
    running = Running(config, head, trainer)
    try:
        yield running
    finally:
        trainer.may_publish.set()
        if not running.finished.done():
            head.stop("the test is over")
        for process in running.processes.values():
            if process.returncode is None:
                process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(p.communicate() for p in running.processes.values()))
            await asyncio.gather(
                running.finished, running.training, return_exceptions=running.silenced
            )


def expected_tokens(config: Config, weights: VersionFile, seed: int, prompt: bytes) -> list[int]:
    """What the emulated engine samples when nothing ever disturbs it."""
    r = config.rollout
    args = {**r.engine_args, "t0_ms": 0.0}
    engine = EmulatedEngine(
        EngineSpec(
            "emulated",
            config.model.path,
            "auto",
            config.max_model_length,
            r.slots,
            engine_args=args,
        )
    )
    engine.load_weights(weights)
    request = ResponseRequest("r", 1, seed, prompt, b"", r.max_response_length)
    engine.add(request, Sampling(r.temperature, r.top_p, r.top_k, (1,)))
    tokens: list[int] = []
    while engine.num_unfinished():
        tokens += [t for delta in engine.step() for t in delta.token_ids]
    return tokens
