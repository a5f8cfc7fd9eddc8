"""The rank processes of a trainer, from one start to their end: they are lost together.

Owns the processes and the order of their replies; `Trainer` decides what they do and whether
they restart. Must not import torch: the daemon imports this file.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from lightrl.config.schema import Config
from lightrl.devices.assign import environment
from lightrl.errors import TrainerError, WeightsError
from lightrl.log import environment as log_environment
from lightrl.system import files
from lightrl.system.child import Child, ChildDied, retry_on_resource_limit
from lightrl.system.process import huge_pages
from lightrl.system.threads import in_thread
from lightrl.system.timeouts import patient_timeout
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.followers import Followers, RanksLost, RemoteRank
from lightrl.trainer.protocol import (
    EMULATED_TARGET,
    EVALUATED_TARGET,
    RANK_COMMANDS,
    RANK_EVENTS,
    RANK_TARGET,
    Done,
    LeaveBroadcast,
    RankCommand,
    RankEvent,
    RankFailed,
    RankStarted,
    Saved,
    StartRank,
    StillAlive,
)

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=RankEvent)
Rank: TypeAlias = Child[RankCommand, RankEvent]

STOP_S = 5.0  # an idle rank ends sooner; one that hangs in a collective does not
PATIENCE_FACTOR = 3  # an engine sends every few tokens, a rank after several micro-batches
# older and newer name of one variable
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}


@dataclass(frozen=True)
class Place:
    """Where the ranks of this node run. `publish_dir`: for versions; `gpus`: the
    CUDA_VISIBLE_DEVICES of each rank, empty = that of the daemon; `host`: an address of this
    machine that engines and other nodes reach."""

    run_dir: Path
    publish_dir: Path
    gpus: Sequence[str] = ()
    host: str = "127.0.0.1"


class Ranks:
    """Runs the rank processes of a trainer. `await start(...)` once, always `await stop()` or
    `await kill()`; `watch` runs beside all other calls."""

    def __init__(
        self,
        config: Config,
        place: Place,
        on_save: Callable[[Saved], None],
        followers: Followers | None = None,
        devices: NodeDevices | None = None,
    ) -> None:
        """`on_save` gets what rank 0 reports of checkpoints. `followers`: have ranks on other
        nodes, numbered after those of this one. `devices` of this node follow the commands and
        events of its ranks.
        """
        self._config = config
        self._place = place
        self._on_save = on_save
        self._followers = followers
        self._devices = devices
        self.num_local = config.train.ranks  # on this machine
        self.is_packed = True  # micro-batches, once they have started
        self._checkpoints = config.checkpoints(place.run_dir)
        self._ranks: list[Rank | RemoteRank] = []
        self._replies: list[asyncio.Queue[RankEvent]] = []  # one for each rank
        self._awaited: set[int] = set()  # ranks that owe a reply soon
        # Where the ranks find each other. A new file for each start: the last one names dead ranks.
        # Nodes that train together share no other folder than that of the checkpoints.
        folder = self._checkpoints if followers else place.publish_dir
        self._rendezvous = folder / f".ranks-{secrets.token_hex(8)}"

    def __len__(self) -> int:
        return len(self._ranks)

    async def start(self, step: int) -> None:
        """Start all from the checkpoint of `step`; 0 = from what the run begins with. Raises
        RanksLost if a process cannot be created or a node is missing, TrainerError if the folder of
        checkpoints cannot be written."""
        starts = self._starts(step)
        if self._devices is not None:
            self._devices.starting(step)
        others: list[RemoteRank] = []
        if self._followers is not None:
            try:
                await in_thread(_touch, self._rendezvous)
            except OSError as e:
                why = f"{self._checkpoints}: cannot be written: {e.strerror or e}"
                raise TrainerError(why) from None
            others = self._followers.start(starts[self.num_local :], self.num_local)
        try:
            for k, command in enumerate(starts[: self.num_local]):
                self._add(await start_rank(self._config, self._place, command, k))
        except OSError as e:
            raise RanksLost(f"rank {len(self._ranks)} cannot be started: {e}") from e
        for rank in others:
            self._add(rank)

    def _add(self, rank: Rank | RemoteRank) -> None:
        self._ranks.append(rank)
        self._replies.append(asyncio.Queue())

    def _starts(self, step: int) -> list[StartRank]:
        world, host = self._config.train.world, self._place.host
        return [
            StartRank(
                config_json=self._config.model_dump_json(),
                model_dir=self._config.model.path,
                rank=rank,
                world=world,
                rendezvous=str(self._rendezvous),
                publish_dir=str(self._place.publish_dir),
                run_dir=str(self._checkpoints.parent),
                start_step=step,
                nccl_host=host if self._config.broadcast != "off" else "",
                host=host if self._followers is not None else "",
            )
            for rank in range(world)
        ]

    async def started(self) -> RankStarted:
        """Return the event of rank 0 when all of them are ready, which may take as long as a
        download."""
        waiting = asyncio.ensure_future(self.replies(RankStarted))
        begun, every_s = time.monotonic(), self._config.node.patience_s
        try:
            while not (await asyncio.wait({waiting}, timeout=every_s))[0]:
                logger.warning(
                    "the ranks have not all started after %.0f s: one downloads or loads, or they "
                    "do not reach each other; see their logs",
                    time.monotonic() - begun,
                )
            first = waiting.result()[0]
            self.is_packed = first.is_packed
            return first
        finally:
            waiting.cancel()

    async def watch(self) -> NoReturn:
        """Receive events. Raises RanksLost when a rank is gone or hangs, TrainerError if a restart
        would fail, too."""
        readers = [
            asyncio.ensure_future(self._receive(rank, number))
            for number, rank in enumerate(self._ranks)
        ]
        readers += [asyncio.ensure_future(self._require_answers(rank)) for rank in range(len(self))]
        if self._followers is not None:
            readers.append(asyncio.ensure_future(self._followers.watch()))
        try:
            ended, _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            raise worst(reader.exception() for reader in ended)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _receive(self, rank: Rank | RemoteRank, number: int) -> NoReturn:
        while True:
            try:
                event = await rank.receive()
            except ChildDied as e:
                raise RanksLost(str(e)) from None
            if isinstance(event, RankFailed):
                kind = TrainerError if event.is_final else RanksLost
                raise kind(f"{rank.name}: {event.reason}")
            if isinstance(event, Saved):
                self._on_save(event)
            elif not isinstance(event, StillAlive):
                if self._devices is not None and number < self.num_local:
                    self._devices.on_event(number, event)
                self._replies[number].put_nowait(event)

    async def _require_answers(self, rank: int) -> NoReturn:
        limit_s = PATIENCE_FACTOR * self._config.node.patience_s
        try:
            await self._ranks[rank].require_answers(lambda: rank in self._awaited, limit_s)
        except ChildDied as e:
            which = f", unless another of the {len(self)} ranks does" if len(self) > 1 else ""
            raise RanksLost(f"{e}{which}") from None

    def send(self, rank: int, command: RankCommand) -> None:
        """Send to one rank. Collectives must go to all ranks in the same order, Accumulate to all
        of a replica."""
        if self._devices is not None:
            self._devices.on_command(command)
        self._ranks[rank].send(command)

    def send_all(self, command: RankCommand) -> None:
        for rank in range(len(self)):
            self.send(rank, command)

    async def reply(self, rank: int, kind: type[Reply], has_limit: bool = True) -> Reply:
        """Wait for the next reply of a rank, which must be of this kind: a rank answers its
        commands in order. Without a limit the rank never counts as hung."""
        if has_limit:
            self._awaited.add(rank)
        try:
            reply = await self._replies[rank].get()
        finally:
            self._awaited.discard(rank)
        if not isinstance(reply, kind):
            what = type(reply).__name__
            raise TrainerError(f"rank {rank} answered {what} instead of {kind.__name__}")
        return reply

    async def replies(self, kind: type[Reply], ranks: Sequence[int] | None = None) -> list[Reply]:
        """Wait for a reply of each of these ranks, of all by default. Starting may take as long as
        a download."""
        asked = range(len(self)) if ranks is None else ranks
        return [await self.reply(rank, kind, kind is not RankStarted) for rank in asked]

    async def answer(self, over: asyncio.Future[str], limit_s: float, grace_s: float) -> Done:
        """Rank 0's reply to a command for a broadcast.

        The rank leaves its group with the reason of `over`, or after `limit_s`. Raises
        WeightsError with the reason once it has answered then, RanksLost when it does not within
        `grace_s` more.
        """
        answering = asyncio.ensure_future(self.reply(0, Done, has_limit=False))
        try:
            if await _any_done({answering, over}, limit_s) and not over.done():
                return answering.result()
            why = over.result() if over.done() else f"no answer within {limit_s:g} s"
            logger.info("rank 0 leaves its broadcast group: %s", why)
            self.send(0, LeaveBroadcast())
            if not await _any_done({answering}, grace_s):
                raise RanksLost(f"{self._ranks[0].name} hangs: it does not leave its group")
            answering.result()
            raise WeightsError(why)
        finally:
            answering.cancel()

    async def stop(self) -> None:
        if self._followers is not None:
            self._followers.end()
        await asyncio.gather(*(rank.stop(STOP_S) for rank in self._ranks))
        with contextlib.suppress(OSError):  # a later start removes it
            await in_thread(self._remove_rendezvous)

    def _remove_rendezvous(self) -> None:
        for left in self._rendezvous.parent.glob(f"{self._rendezvous.name}*"):
            left.unlink(missing_ok=True)

    async def kill(self) -> None:
        """End them without grace: those that are left of a set hang in a collective."""
        for rank in self._ranks:
            rank.kill()
        await self.stop()


async def start_rank(config: Config, place: Place, command: StartRank, number: int) -> Rank:
    """Start rank `number` of this machine. Raises OSError."""
    name = f"lightrl-rank-{command.rank}"
    start = partial(
        Rank.start,
        _target(config),
        name,
        RANK_COMMANDS,
        RANK_EVENTS,
        env=rank_environment(config, place.gpus[number : number + 1], os.environ),
        log=place.run_dir / "logs" / f"rank-{command.rank}.log",
    )
    rank = await retry_on_resource_limit(start, name, logger.warning)
    rank.send(command)
    return rank


def _touch(path: Path) -> None:
    """Create it empty: a node that does not see it has another folder."""
    files.make_folder(path.parent)
    path.touch()


def _target(config: Config) -> str:
    if config.train.engine == "emulated":
        return EMULATED_TARGET
    return EVALUATED_TARGET if config.eval.checkpoint else RANK_TARGET


def worst(errors: Iterable[BaseException | None]) -> BaseException:
    """Return the error to report of those that came together: one that a restart would meet again
    comes first. There must be one."""
    return min(filter(None, errors), key=lambda error: isinstance(error, RanksLost))


def rank_environment(
    config: Config, gpus: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return what a rank gets besides the daemon's environment, `environ`. It sees its GPU alone,
    as number 0."""
    added = environment(gpus, environ)
    if added and not ALLOCATOR.intersection(environ):
        # Micro-batches differ in shape: blocks that can grow leave fewer holes between them.
        added["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if config.rollout.placement == "shared":
        added |= huge_pages(environ)
    threads = {"OMP_NUM_THREADS": str(config.train.threads)}
    return {**threads, **log_environment("rank"), **added}


async def _any_done(futures: set[asyncio.Future[Any]], limit_s: float) -> bool:
    """Return whether one of them is done in time."""
    try:
        async with patient_timeout(limit_s):
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        return False
    return True
