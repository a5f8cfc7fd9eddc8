"""The roles that run under a node's connection: rollout, trainer, or both in one daemon; or
environment.

Owns which of them exist, and starts and ends them. The state of the connection is in
`connection.py`; the work of a role is in rollout/agent.py, trainer/trainer.py and
environments/agent.py.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.daemon.admission import (
    require_environment,
    require_shared,
    require_size,
    write_model_files,
)
from lightrl.daemon.weights import MachineWeights
from lightrl.data.template import template_kwargs
from lightrl.devices.assign import CPU, Assignment
from lightrl.environments.agent import EnvironmentAgent
from lightrl.environments.programs import environments_of
from lightrl.environments.rendering import Renderer
from lightrl.keys import environment_key
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.episodes import BeginEpisode, EndEpisode, StepEpisode
from lightrl.messages.load import Load
from lightrl.messages.message import Message
from lightrl.messages.nodes import Heartbeat, Hello, Role
from lightrl.messages.responses import Abort, Generate
from lightrl.messages.sharing import SetDevices
from lightrl.messages.trainers import TrainerRelay, TrainerSet
from lightrl.messages.training import TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.rollout.agent import FLUSH_S, RolloutAgent
from lightrl.rollout.engine_spec import RolloutOptions
from lightrl.system.addresses import WILDCARD, own_host, split_address
from lightrl.trainer.nodes.node import FollowerNode, TrainerNode
from lightrl.trainer.rank_processes import Place
from lightrl.trainer.served import ServedVersions
from lightrl.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Roles:
    """Runs the roles of this node. Empty until `start`; always `await close()` after that.

    `coordinator` is its address; `send`, `on_restart`, `relay` and `rejoin` are as
    `RolloutAgent` and `Trainer` want them, `drain` as `TrainerNode` does. `shares` and
    `parallel` are those of the hello; `workers` are environment workers, 0 = as the config has it;
    `key` is the text of the node's key.
    """

    _node: str
    _names: tuple[Role, ...]
    _coordinator: str
    _run_dir: Path | None
    _send: Callable[[Message], None]
    _on_restart: Callable[[], None]
    _relay: Callable[[Message], None]
    _drain: Callable[[str], None]
    _rejoin: Callable[[], None]
    _shares: str = ""
    _parallel: int = 0
    _workers: int = 0
    _key: str = ""
    _environment: EnvironmentAgent | None = field(default=None, init=False)
    _rollout: RolloutAgent | None = field(default=None, init=False)
    _trainer: Trainer | TrainerNode | None = field(default=None, init=False)
    _tasks: dict[Role, asyncio.Task[None]] = field(default_factory=dict, init=False)

    @property
    def has_trainer(self) -> bool:
        return self._trainer is not None

    def complete(self, hello: Hello) -> Hello:
        """Return `hello` with what runs here now."""
        leads = isinstance(self._trainer, TrainerNode) and self._trainer.leads
        if self._trainer is not None:
            hello = replace(hello, is_released=not self._trainer.devices.has_devices)
        if self._environment is not None:
            return replace(hello, running=self._environment.held)
        if (rollout := self._rollout) is None:
            return replace(hello, leads=leads)
        return replace(
            hello,
            leads=leads,
            serves=rollout.serves,
            running=rollout.unacked,
            has_file=rollout.has_file,
            is_released=rollout.is_released,
        )

    def heartbeat(self, lag_ms: float) -> Heartbeat:
        """Return a heartbeat. `lag_ms`: how late the loop of this process is."""
        parts = [part for part in (self._rollout, self._trainer) if part is not None]
        device = next((part.device for part in parts if part.device), "")
        if self._environment is not None:
            return Heartbeat(Load(running=len(self._environment.held)), lag_ms)
        saves = self._trainer.saves if self._trainer is not None else None
        is_saving = saves is not None and saves.num_awaited > 0
        if (rollout := self._rollout) is None:
            return Heartbeat(Load(), lag_ms, device, is_saving=is_saving)
        pulls, workers = rollout.pulls, rollout.num_workers
        return Heartbeat(rollout.load, lag_ms, device, pulls, workers, is_saving)

    def start(
        self,
        tasks: asyncio.TaskGroup,
        config: Config,
        model_files: dict[str, bytes],
        slots: int,
        scratch: Path,
        weights: MachineWeights | None,
        gpus: Assignment,
    ) -> None:
        """`weights`: those of a node that trains or samples; other roles have none."""
        model_dir = scratch / "model"
        if "environment" in self._names:
            require_environment(config)
            write_model_files(model_dir, model_files)
            agent = self._environment = self._environment_agent(config, model_dir)
            self._tasks["environment"] = tasks.create_task(agent.run(), name="environment")
            return
        assert weights is not None
        if "rollout" in self._names:
            require_shared(config, self._shares)
            require_size(config, self._parallel)
            write_model_files(model_dir, model_files)
            options = RolloutOptions(
                self._node,
                slots,
                model_dir,
                self._coordinator,
                self._engine_log(),
                gpus.engines[0] if gpus.engines else CPU,
                self._shares,
                self._parallel,
            )
            self._rollout = RolloutAgent(
                options, config, self._send, weights.store, weights.server, self._rejoin
            )
            self._tasks["rollout"] = tasks.create_task(self._rollout.run(), name="rollout")
        if "trainer" in self._names:
            run_dir = self._run_dir or _run_dir_here(config)
            published = scratch / "published"
            published.mkdir()
            host = _host_of(weights.server.addresses)
            if config.train.nodes > 1 and host == WILDCARD:
                host = own_host()

            place = Place(run_dir, published, gpus.ranks, host)

            def new_trainer() -> Trainer:
                versions = ServedVersions(weights.server, weights.store.point)
                return Trainer(config, place, versions, self._send, self._on_restart, self._relay)

            if config.train.nodes > 1:
                follower = FollowerNode(config, place, self._relay, self._send)
                self._trainer = TrainerNode(self._node, follower, new_trainer, self._drain)
            else:
                self._trainer = new_trainer()
            self._tasks["trainer"] = tasks.create_task(self._trainer.run(), name="trainer")

    def _environment_agent(self, config: Config, model_dir: Path) -> EnvironmentAgent:
        settings = config.environment
        if self._workers:
            settings = settings.model_copy(update={"workers": self._workers})
        logs = (self._run_dir or _run_dir_here(config)) / "logs" / self._node
        logs.mkdir(exist_ok=True)
        key = environment_key(self._key)
        place = str(model_dir), logs
        new_pool = partial(environments_of, config, settings, key, *place, report=logger.warning)
        kwargs = template_kwargs(config.data)
        new_renderer = partial(Renderer, model_dir, settings.tool_format, kwargs)
        return EnvironmentAgent(config, new_pool, new_renderer, self._send)

    def _engine_log(self) -> Path | None:
        """Return the engine's log; None without a run directory: the engine then writes to the
        daemon's."""
        if self._run_dir is None:
            return None
        return self._run_dir / "logs" / f"{self._node}-engine.log"

    def handle(self, message: Message) -> None:
        """Pass a message of the coordinator to its role, if this node has that role."""
        match message:
            case TrainShard() | VersionTaken() | SetDevices("trainer"):
                if self._trainer is not None:
                    self._trainer.handle(message)
            case Generate() | Abort() | PublishWeights() | SetDevices():
                if self._rollout is not None:
                    self._rollout.handle(message)
            case BeginEpisode() | StepEpisode() | EndEpisode():
                if self._environment is not None:
                    self._environment.handle(message)
            case TrainerSet() | TrainerRelay():
                if isinstance(self._trainer, TrainerNode):
                    self._trainer.handle(message)
            case _:
                pass  # a heartbeat

    def on_disconnect(self) -> None:
        """Pause what needs the coordinator. The work itself continues."""
        if self._rollout is not None:
            self._rollout.on_disconnect()
        if self._trainer is not None:
            self._trainer.pause()

    def on_lost_messages(self) -> None:
        """Break off exchanges with other trainer nodes: messages may be lost in both directions."""
        if isinstance(self._trainer, TrainerNode):
            self._trainer.disconnect()

    def on_welcome(self) -> None:
        """Send what the coordinator may have missed while it was disconnected."""
        if self._rollout is not None:
            self._rollout.resend()
        if self._environment is not None:
            self._environment.resend()
        if self._trainer is not None:
            self._trainer.rejoin()

    async def leave(self, grace_s: float, admitted: asyncio.Event) -> None:
        """Send the last tokens and write a checkpoint, then end the roles."""
        if self._rollout is not None:
            if not admitted.is_set():  # messages would be lost now
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(admitted.wait(), grace_s / 4)
            await self._rollout.flush(min(FLUSH_S, grace_s / 4))
        if self._trainer is not None:
            limit_s = None if self._trainer.all_steps_done else grace_s
            self._trainer.stop()
            await asyncio.wait([self._tasks["trainer"]], timeout=limit_s)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        if self._trainer is not None:
            await self._trainer.close()


def _host_of(addresses: tuple[str, ...]) -> str:
    """Return the host by which others reach this daemon, see `WeightServer.addresses`; 0.0.0.0 =
    any."""
    found = split_address(addresses[0])
    assert found is not None
    return found[0]


def _run_dir_here(config: Config) -> Path:
    """Create and return the run directory on a machine that does not share the coordinator's
    disk."""
    run_dir = config.run_dir.resolve()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return run_dir
