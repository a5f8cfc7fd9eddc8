"""One life of the rank processes of a trainer: started together, told the same, lost together.

Owns the processes and the order of their replies. Decides neither what they are told nor whether
they are started again. Must not import torch: the daemon imports this file.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lightrl.config.schema import Config
from lightrl.devices.assign import environment
from lightrl.errors import TrainerError, WeightsError
from lightrl.log import environment as log_environment
from lightrl.system import pages
from lightrl.system.child import Child, ChildDied, retry_on_resource_limit
from lightrl.system.timeouts import patient_timeout
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.followers import Life, RanksLost, RemoteRank
from lightrl.trainer.protocol import (
    EMULATED_TARGET,
    EVALUATED_TARGET,
    RANK_COMMANDS,
    RANK_EVENTS,
    RANK_TARGET,
    Computing,
    Exported,
    GroupOpened,
    LeaveGroup,
    RankCommand,
    RankEvent,
    RankFailed,
    RankStarted,
    Saved,
    SaveEvent,
    SaveFailed,
    StartRank,
    WeightsSent,
)

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=RankEvent)
STOP_S = 5.0  # a rank that is idle ends at once; one that hangs in a collective does not
PATIENCE_FACTOR = 3  # an engine speaks every few tokens, a rank after several micro-batches
# older and newer name of one variable
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
# takes as long as a download does, or has a limit of its own
UNHURRIED = {RankStarted, GroupOpened, WeightsSent}


class Ranks:
    """`await start(...)` once, always `await stop()` or `await kill()`; `watch` beside all other
    calls."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        publish_dir: Path,
        on_save: Callable[[SaveEvent], None],
        gpus: Sequence[str] = (),
        host: str = "",
        life: Life | None = None,
        devices: NodeDevices | None = None,
    ) -> None:
        """`on_save` is told what rank 0 says of a checkpoint. `gpus`: what each rank's
        CUDA_VISIBLE_DEVICES says; empty = whatever it finds. `host`: where engines reach the ranks
        for broadcasts, and those of other nodes. `life`: with ranks on other nodes, which come
        after those of this one. `devices`: of this node, which hear what
        its ranks are told and say."""
        self._config = config
        self._run_dir = run_dir
        self._publish_dir = publish_dir
        self._on_save = on_save
        self._gpus = gpus
        self._host = host
        self._life = life
        self._devices = devices
        self.num_local = config.train.ranks  # on this machine
        self._checkpoints = config.checkpoints(run_dir)
        self._nccl_host = host if config.broadcast != "off" else ""
        self._ranks: list[Child[RankCommand, RankEvent] | RemoteRank] = []
        self._replies: list[asyncio.Queue[RankEvent]] = []  # one for each rank
        self._awaited: set[int] = set()  # ranks that owe a reply soon
        # Where the ranks find each other; another file in each life, as that of the last is full of
        # its dead. Nodes that train together see no other folder than that of the checkpoints.
        folder = self._checkpoints if life else publish_dir
        self._rendezvous = folder / f".ranks-{secrets.token_hex(8)}"

    def __len__(self) -> int:
        return len(self._ranks)

    async def start(self, step: int) -> None:
        """From the checkpoint of `step`; 0 = from what the run begins with. Raises RanksLost if a
        process cannot be made."""
        starts = self._starts(step)
        if self._devices is not None:
            self._devices.starting(step)
        try:
            if self._life is not None:
                others = starts[self.num_local :]
                await self._life.begin(others, self.num_local, self._checkpoints)
            for k, command in enumerate(starts[: self.num_local]):
                gpus = self._gpus[k : k + 1]
                self._add(await start_rank(self._config, self._run_dir, command, gpus))
        except OSError as e:
            raise RanksLost(f"rank {len(self._ranks)} cannot be started: {e}") from e
        for rank in self._life.ranks if self._life is not None else ():
            self._add(rank)

    def _add(self, rank: Child[RankCommand, RankEvent] | RemoteRank) -> None:
        self._ranks.append(rank)
        self._replies.append(asyncio.Queue())

    def _starts(self, step: int) -> list[StartRank]:
        """In the order of the ranks."""
        world = self.num_local * (1 + len(self._life.members) if self._life is not None else 1)
        return [
            StartRank(
                config_json=self._config.model_dump_json(),
                model_dir=self._config.model.path,
                rank=rank,
                world=world,
                rendezvous=str(self._rendezvous),
                publish_dir=str(self._publish_dir),
                run_dir=str(self._checkpoints.parent),
                start_step=step,
                nccl_host=self._nccl_host,
                host=self._host if self._life is not None else "",
            )
            for rank in range(world)
        ]

    async def started(self) -> RankStarted:
        """What rank 0 says when all of them are ready. That may take as long as a download, and is
        said if it takes long."""
        waiting = asyncio.ensure_future(self.replies(RankStarted))
        begun, every_s = time.monotonic(), self._config.node.patience_s
        try:
            while not (await asyncio.wait({waiting}, timeout=every_s))[0]:
                logger.warning(
                    "the ranks have not all started after %.0f s: one downloads or loads, or they "
                    "do not reach each other; their logs tell which",
                    time.monotonic() - begun,
                )
            return waiting.result()[0]
        finally:
            waiting.cancel()

    async def watch(self) -> NoReturn:
        """Hands the replies on. Raises RanksLost when a rank is gone or hangs, TrainerError if for
        good."""
        readers = [
            asyncio.ensure_future(self._receive(rank, number))
            for number, rank in enumerate(self._ranks)
        ]
        readers += [asyncio.ensure_future(self._require_answers(rank)) for rank in range(len(self))]
        if self._life is not None:
            readers.append(asyncio.ensure_future(self._life.watch()))
        try:
            ended, _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            raise worst(reader.exception() for reader in ended)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _receive(
        self,
        rank: Child[RankCommand, RankEvent] | RemoteRank,
        number: int,
    ) -> NoReturn:
        while True:
            try:
                event = await rank.receive()
            except ChildDied as e:
                raise RanksLost(str(e)) from None
            if isinstance(event, RankFailed):
                kind = TrainerError if event.is_final else RanksLost
                raise kind(f"{rank.name}: {event.reason}")
            if isinstance(event, Saved | SaveFailed | Exported):
                self._on_save(event)
            elif not isinstance(event, Computing):
                if self._devices is not None and number < self.num_local:
                    self._devices.heard(number, event)
                self._replies[number].put_nowait(event)

    async def _require_answers(self, rank: int) -> NoReturn:
        limit_s = PATIENCE_FACTOR * self._config.node.patience_s
        try:
            await self._ranks[rank].require_answers(lambda: rank in self._awaited, limit_s)
        except ChildDied as e:
            which = f", unless another of the {len(self)} ranks does" if len(self) > 1 else ""
            raise RanksLost(f"{e}{which}") from None

    def send(self, rank: int, command: RankCommand) -> None:
        """To one rank; but for Accumulate, all of them must get the same kinds of commands in the
        same order."""
        self._note(command)
        self._ranks[rank].send(command)

    def tell(self, command: RankCommand) -> None:
        """To all ranks."""
        self._note(command)
        for rank in self._ranks:
            rank.send(command)

    def _note(self, command: RankCommand) -> None:
        if self._devices is not None:
            self._devices.told(command)

    async def reply(self, rank: int, *kinds: type[Reply]) -> Reply:
        """The next reply of a rank, which must be of these kinds: a rank answers in the order it is
        told."""
        if not UNHURRIED.intersection(kinds):
            self._awaited.add(rank)
        try:
            reply = await self._replies[rank].get()
        finally:
            self._awaited.discard(rank)
        if not isinstance(reply, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise TrainerError(f"rank {rank} answered {type(reply).__name__} instead of {names}")
        return reply

    async def replies(self, *kinds: type[Reply], ranks: Sequence[int] | None = None) -> list[Reply]:
        """One of each of these ranks, of all by default."""
        asked = range(len(self)) if ranks is None else ranks
        return [await self.reply(rank, *kinds) for rank in asked]

    async def answer(
        self, kind: type[Reply], over: asyncio.Future[str], limit_s: float, grace_s: float
    ) -> Reply:
        """Rank 0's reply to a command for a broadcast.

        The rank is told to leave its group when `over` says why, or after `limit_s`. Raises
        WeightsError with the reason once it has answered then, RanksLost when it does not within
        `grace_s` more.
        """
        answering = asyncio.ensure_future(self.reply(0, kind))
        try:
            if await _any_done({answering, over}, limit_s) and not over.done():
                return answering.result()
            why = over.result() if over.done() else f"no {kind.__name__} within {limit_s:g} s"
            logger.info("rank 0 is told to leave its broadcast group: %s", why)
            self.send(0, LeaveGroup())
            if not await _any_done({answering}, grace_s):
                name = self._ranks[0].name
                raise RanksLost(f"{name} hangs: no {kind.__name__} when it was to leave its group")
            answering.result()
            raise WeightsError(why)
        finally:
            answering.cancel()

    async def stop(self, is_orderly: bool = True) -> None:
        if self._life is not None:
            await self._life.end(is_orderly)
        await asyncio.gather(*(rank.stop(STOP_S) for rank in self._ranks))
        self._rendezvous.unlink(missing_ok=True)

    async def kill(self) -> None:
        """Without waiting: those that are left of a set hang in a collective."""
        for rank in self._ranks:
            rank.kill()
        await self.stop(is_orderly=False)


async def start_rank(
    config: Config, run_dir: Path, command: StartRank, gpus: Sequence[str]
) -> Child[RankCommand, RankEvent]:
    """A rank on this machine, told to start. `gpus`: what its CUDA_VISIBLE_DEVICES says; empty =
    whatever it finds. Raises OSError."""
    name = f"lightrl-rank-{command.rank}"
    start = partial(
        Child[RankCommand, RankEvent].start,
        _target(config),
        name,
        RANK_COMMANDS,
        RANK_EVENTS,
        env=rank_environment(config, gpus, os.environ),
        log=run_dir / "logs" / f"rank-{command.rank}.log",
    )
    rank = await retry_on_resource_limit(start, name, logger.warning)
    rank.send(command)
    return rank


def _target(config: Config) -> str:
    """What a rank of this run computes."""
    if config.train.engine == "emulated":
        return EMULATED_TARGET
    return EVALUATED_TARGET if config.eval.checkpoint else RANK_TARGET


def worst(errors: Iterable[BaseException | None]) -> BaseException:
    """Of those that came at once: what ranks that are started again would meet again comes first,
    or what nobody expects. There must be one."""
    return min(filter(None, errors), key=lambda error: isinstance(error, RanksLost))


def rank_environment(
    config: Config, gpus: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """What is added to that of the daemon, `environ`. A rank sees its GPU and no other, and numbers
    it 0."""
    added = environment(gpus, environ)
    if added and not ALLOCATOR.intersection(environ):
        # Micro-batches differ in shape: blocks that can grow leave fewer holes between them.
        added["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if config.rollout.placement == "shared":
        added |= pages.huge_pages(environ)
    threads = {"OMP_NUM_THREADS": str(config.train.threads)}
    return {**threads, **log_environment("rank"), **added}


async def _any_done(futures: set[asyncio.Future[Any]], limit_s: float) -> bool:
    """Whether one of them is done in time."""
    try:
        async with patient_timeout(limit_s):
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        return False
    return True
