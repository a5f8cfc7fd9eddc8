"""The trainer role of a daemon: the order of its ranks' work, the versions they publish, and what
is done when ranks die or the coordinator was gone.

Which groups are trained is the coordinator's business, which of them at once `trainer.step`'s.
Never touches a tensor.

A step is begun anew as long as its version is not published, so that whoever is lost, coordinator
or ranks, no group counts twice: the coordinator sends all shards of the step again, from index 0.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lightrl.config.schema import Config
from lightrl.errors import TrainerError
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.message import Message
from lightrl.messages.sharing import AssignDevices, SuspendTrainer
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.state_machine import next_state
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.trainer.broadcasts import Broadcasts
from lightrl.trainer.checkpoint.start_point import where_to_start
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.followers import Followers, RanksLost
from lightrl.trainer.nonfinite import NonfiniteSteps
from lightrl.trainer.protocol import (
    DeltaMade,
    EncodeDelta,
    FinishStep,
    Published,
    RankParked,
    StepFinished,
)
from lightrl.trainer.rank_processes import Ranks, worst
from lightrl.trainer.saves import Saves
from lightrl.trainer.served import ServedVersions
from lightrl.trainer.state import EDGES, SILENT, UNHEARD, TrainerEvent, TrainerState
from lightrl.trainer.step import Step
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

Begun = TypeVar("Begun")

RESTARTS = RestartPolicy(max_restarts=3, first_pause_s=0.2, growth=3.0)  # without a new step


class Trainer:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        scratch: Path,
        versions: ServedVersions,
        send: Callable[[Message], None],
        on_restart: Callable[[], None],
        gpus: tuple[str, ...] = (),
        host: str = "127.0.0.1",
        relay: Callable[[Message], None] | None = None,
    ) -> None:
        """`versions` are served by this daemon's server. `send` reaches the coordinator.

        `on_restart` is called when the ranks run again after one had died: the coordinator must be
        told that this is another trainer, and then `rejoin` called. `gpus`: one for each rank, if
        it is settled. `host`: an address of this machine that other nodes reach. `relay` reaches
        the coordinator whenever there is a connection, for other trainer nodes.
        """
        self._config = config
        self._run_dir = run_dir
        self._checkpoints = config.checkpoints(run_dir)
        self._scratch = scratch
        self._gpus = gpus
        self._host = host
        self._send = send
        self._on_restart = on_restart
        self._versions = versions
        self.followers = Followers(config.train.nodes - 1, relay or send)
        self.device = ""
        self._state = TrainerState.STARTING
        # asked for once, in any state, and never taken back: no state of its own
        self._is_stopping = False
        self._is_packed = True  # micro-batches
        self._changed = asyncio.Event()  # shards have come, the step begins anew, or the end
        self._shards: deque[TrainShard] = deque()
        self._broadcasts = Broadcasts(config, host, self._say, self._changed)
        self._done = 0  # optimizer steps in the ranks' weights
        self._furthest = 0  # ever
        self.saves = Saves(self._checkpoints, config, self._say)
        self._crashes = CrashCounter(RESTARTS)
        self._standing: PublishWeights | None = None  # where the ranks are
        self._file: VersionFile  # of that version; there is one when there are ranks that started
        self._step_done: StepDone | None = None  # how they came there
        self._nonfinite = NonfiniteSteps()
        self.devices = NodeDevices(config, self._say, send)
        self._step: Step | None = None  # that is being trained

    @property
    def all_steps_done(self) -> bool:
        """The last version is published; a checkpoint may still be written."""
        return self._done >= self._config.eval.last_step(self._config.train.steps)

    def handle(self, message: TrainShard | VersionTaken | AssignDevices | SuspendTrainer) -> None:
        self.devices.hear(message)
        if self._state in UNHEARD:
            return
        if isinstance(message, TrainShard):
            self._shards.append(message)
        elif isinstance(message, SuspendTrainer):
            shards, step = self._shards, self._step
            ends_first = step.has_all if step else any(s.last for s in shards)
            self.devices.ask(message.number, ends_first)
        elif not isinstance(message, AssignDevices):
            self._broadcasts.handle(message)
        self._changed.set()

    def pause(self) -> None:
        """The coordinator does not hear us yet: say nothing, take nothing, until `rejoin`."""
        self._move(TrainerEvent.PAUSED)
        self._forget_orders()

    def rejoin(self) -> None:
        """The coordinator has welcomed this node again: say where we stand, begin the step anew."""
        self._move(TrainerEvent.WELCOMED)
        self._forget_orders()
        self._changed.set()
        if self._state is TrainerState.DOWN:
            self.devices.give()  # no shard comes before ranks say where they stand
            return  # when there are ranks again, `on_restart` says hello for another trainer
        if self._state not in SILENT:  # else it is said when the update has ended
            self._announce()

    def stop(self) -> None:
        """End after the step of which all groups have come, if any, and save the steps done."""
        self._is_stopping = True
        self.saves.stop()
        self._broadcasts.stop()
        self._changed.set()

    async def run(self) -> None:
        """Trains until the last step is saved, or `stop`; ranks that die are started again from the
        newest checkpoint. Raises TrainerError if that cannot be."""
        step = await self._where_to_start()
        while True:
            try:
                await self._live(step)
                return
            except RanksLost as e:
                lost = e
            self._move(TrainerEvent.RANKS_LOST)
            is_away = self.devices.lost()
            self._forget_orders()
            if is_away:  # ranks that start would find no memory
                logger.warning("%s; they start when their devices are given back", lost)
                await self._unless_stopped(self.devices.given())
            if self._is_stopping and not (self.all_steps_done and self._done > self.saves.step):
                logger.warning("%s; leaving with the checkpoint of step %d", lost, self.saves.step)
                return
            if self._is_stopping:  # nobody sends the last steps once more
                raise TrainerError(
                    f"{lost}; the last {self._done - self.saves.step} steps were not saved"
                )
            step = await self._recover_from(lost)

    async def close(self) -> None:
        """Stops serving its weights; call it when no node will pull any more."""
        await self._versions.close()

    def _forget_orders(self) -> None:
        """Whoever gave them does not count on us any more, or we are not who they were for."""
        self._shards.clear()
        self._broadcasts.clear()
        self.devices.forget_orders()

    async def _recover_from(self, lost: RanksLost) -> int:
        most, pause_s = RESTARTS.max_restarts, self._crashes.crashed()
        if pause_s is None:
            raise TrainerError(f"{lost}; started again {most} times without finishing a step")
        step = await self._where_to_start()
        again = self._crashes.in_a_row
        logger.warning("%s; starting again from step %d (%d/%d)", lost, step, again, most)
        await asyncio.sleep(pause_s)
        return step

    async def _where_to_start(self) -> int:
        return await where_to_start(self._config, self._checkpoints, lambda: not self._is_stopping)

    async def _live(self, step: int) -> None:
        """From the start of a set of ranks to its end. Raises RanksLost if that is not an orderly
        one."""
        life = None
        if self._config.train.nodes > 1:
            if not await self._unless_stopped(self.followers.wait()):
                self._require_saved()
                return
            life = self.followers.new_life()
        ranks = Ranks(
            self._config,
            self._run_dir,
            self._scratch,
            self.saves.handle,
            self._gpus,
            self._host,
            life,
            self.devices,
        )
        tasks: list[asyncio.Task[Any]] = []
        is_orderly = False
        try:
            await ranks.start(step)
            work = asyncio.ensure_future(self._work(ranks, step))
            watch = asyncio.ensure_future(ranks.watch())
            tasks += [work, watch]
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.exception() is not None:
                raise worst(task.exception() for task in ended)
            is_orderly = work.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await (ranks.stop() if is_orderly else ranks.kill())

    async def _work(self, ranks: Ranks, step: int) -> bool:
        """All that is to be done with ranks that start with the weights of `step`; whether they did
        start."""
        started = await self._unless_stopped(ranks.started())
        if started is None:
            self._require_saved()
            return False
        if started.published is None:
            raise TrainerError("rank 0 started without publishing its weights")
        self.device, took_s = started.device, started.start_s
        logger.info("ranks started: %d, on %s, in %.1f s", len(ranks), self.device, took_s)
        self._is_packed = started.is_packed
        for note in started.notes:
            logger.warning(note)
        self._done = step
        self.saves.begin_life(step)
        self._furthest = max(self._furthest, step)
        self._step_done = None
        self._file = started.published.file
        self._standing = await self._versions.serve(started.published)
        announce = self._on_restart if self._state is TrainerState.DOWN else self._announce
        self._move(TrainerEvent.RANKS_STARTED)
        announce()
        await self._train_all(ranks)
        return True

    def _require_saved(self) -> None:
        """Of a trainer that is to stop without ranks. Raises TrainerError."""
        if self.all_steps_done:  # by those before
            raise TrainerError(
                f"the last {self._done - self.saves.step} steps were not saved: ranks had died"
            )

    async def _unless_stopped(self, begun: Coroutine[Any, Any, Begun]) -> Begun | None:
        """What comes of it; None if the trainer is to stop before: nothing is to be saved."""
        starting = asyncio.ensure_future(begun)
        try:
            while not starting.done() and not self._is_stopping:
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({starting, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return starting.result() if starting.done() else None
        finally:
            starting.cancel()

    async def _train_all(self, ranks: Ranks) -> None:
        while not (self.all_steps_done or self._is_stopping) and await self._train(ranks):
            if not self.all_steps_done:
                await self.saves.after_step(ranks, self._done)
        if self._done > self.saves.step:
            await self._save_last(ranks)
        if self.all_steps_done:
            await self.saves.exported()

    async def _train(self, ranks: Ranks) -> bool:
        """One optimizer step: groups are accumulated while others still generate, see `Step`.

        False: stopped before all groups of the step had come; the weights are those of the last
        step. Raises TrainerError for any shard but the next of this step.
        """
        what = self._config, ranks, self._done, self._shards, self._is_packed
        self._step = step = Step(*what, self._say, self._changed.set, self.devices)
        try:
            if is_whole := await self._accumulate(ranks, step):
                await self._finish(ranks, step)
            return is_whole
        finally:
            await step.close()

    async def _accumulate(self, ranks: Ranks, step: Step) -> bool:
        """All groups of the step; False: stopped before they had come."""
        while True:
            while not (step.can_go_on or self._begins_anew or self._broadcasts.has_order):
                if self._is_stopping and not (step.is_busy or step.awaits_devices):
                    await step.begin_anew()  # what is saved are the weights of the last step
                    return False
                self._changed.clear()
                await self._changed.wait()
            if self._broadcasts.has_order:
                await step.settle()
                await self._broadcasts.perform(ranks, self._file)
            elif self._begins_anew or step.is_begun_anew:
                if self._begins_anew:
                    self._move(TrainerEvent.BEGAN_ANEW)
                await step.begin_anew()
            elif step.is_accumulated:
                return True
            else:
                await step.advance()

    async def _finish(self, ranks: Ranks, whole: Step) -> None:
        """The update, from where on the ranks stand at the next step."""
        queue, begun_at = whole.queue, asyncio.get_running_loop().time()
        step, version = queue.step, queue.step + 1
        self._move(TrainerEvent.UPDATE_BEGAN)
        await self._versions.make_room()
        ranks.tell(FinishStep(step, queue.num_responses, queue.num_tokens, version))
        if self.devices.are_shared:
            await ranks.replies(RankParked)
            self.devices.announce()
        self._step = None  # what comes from here on is of the next one
        published = await ranks.reply(0, Published)
        self._file = published.file
        replicas = queue.replicas if self._config.train.replicas > 1 else ()
        self._standing = await self._versions.serve(published, queue.portions, replicas)
        self._say(self._standing)
        self.devices.published()
        finished, *_ = await ranks.replies(StepFinished)
        metrics = finished.metrics | whole.times(begun_at) | whole.entropy(finished.metrics)
        self._step_done = StepDone(step, version, metrics)
        self._say(self._step_done)
        self._nonfinite.count(step, finished.metrics)
        self._done = version
        if self._done > self._furthest:
            self._furthest = self._done
            self._crashes.progressed()
        was_welcomed = self._state is TrainerState.UPDATING_WELCOMED  # meanwhile
        self._move(TrainerEvent.UPDATE_ENDED)
        if was_welcomed:
            self._announce()
        if not self.all_steps_done:
            await self._follow(ranks)

    async def _follow(self, ranks: Ranks) -> None:
        """What comes after a version before the ranks compute again, other than a checkpoint: it is
        sent to those who wait for that, and its difference is found for those who pull."""
        config, wants_delta = self._config, True
        if config.broadcast != "off" and not (self._is_stopping or self._state in SILENT):
            wants_delta = await self._broadcasts.follow(ranks, self._file)
        if config.has_deltas and wants_delta:
            await self._offer_delta(ranks)

    async def _offer_delta(self, ranks: Ranks) -> None:
        """The version is known: what is said now saves those bytes who are not far with it. The
        ranks find the difference before they compute again, which takes about as long as publishing
        did; most often there is nothing to be computed yet.
        """
        ranks.tell(EncodeDelta(self._done))
        made, *_ = await ranks.replies(DeltaMade)
        offer = await self._versions.serve_delta(made)
        if offer is not None and self._standing is not None:
            self._standing = replace(self._standing, deltas=(offer,))
            self._say(self._standing)

    async def _save_last(self, ranks: Ranks) -> None:
        problem = await self.saves.save_last(ranks, self._done, self.all_steps_done)
        if problem and (self.all_steps_done or not self._config.journal.enabled):
            raise TrainerError(problem)
        if problem:  # the steps since the last checkpoint can be trained again from the journal
            logger.warning(problem)

    def _announce(self) -> None:
        """Where we stand, and the news of it that may have been lost. The first of them counts."""
        self.devices.announce()
        if self._standing is not None:
            self._say(self._standing)
            self.devices.published()
        if self._step_done is not None:
            self._say(self._step_done)
        self.saves.announce()

    def _say(self, message: Message) -> None:
        if self._state not in SILENT:
            self._send(message)

    def _move(self, event: TrainerEvent) -> None:
        self._state = next_state(EDGES, self._state, event)

    @property
    def _begins_anew(self) -> bool:
        return self._state is TrainerState.BEGINNING_ANEW
