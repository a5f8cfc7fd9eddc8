"""The trainer role of a daemon: in which order its ranks work, which versions they publish, and how
it continues after lost ranks or a lost coordinator.

The coordinator decides which groups are trained, `trainer.step` which of them at a time. Must not
import torch: the daemon imports this file.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from lightrl.config.schema import Config
from lightrl.errors import TrainerError
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.message import Message
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.state_machine import next_state
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.trainer.broadcasts import BroadcastOrders
from lightrl.trainer.checkpoint.initial import where_to_start
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.followers import Followers, RanksLost
from lightrl.trainer.protocol import Done, EncodeDelta, RankStarted, StepFinished, Update
from lightrl.trainer.rank_processes import Place, Ranks, worst
from lightrl.trainer.saves import Saves
from lightrl.trainer.served import ServedVersions
from lightrl.trainer.state import EDGES, TrainerEvent, TrainerState
from lightrl.trainer.step import Step
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RESTARTS = RestartPolicy(max_restarts=3, first_pause_s=0.2, growth=3.0)  # without a new step
MAX_NONFINITE = 5  # steps in a row


class NonfiniteSteps:
    """Counts steps in a row that left the weights as they were, as no gradient was finite."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn at the first in a row. Raise TrainerError, which ends the run, at the last that is
        tolerated."""
        if not metrics.get("train/skipped_nonfinite") or metrics.get("train/updates"):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        what = f"the gradient of step {step} is not finite: the weights stay as they were"
        if self._in_a_row == 1:
            logger.warning("%s", what)
        if self._in_a_row == MAX_NONFINITE:
            raise TrainerError(
                f"{what}, as in the {MAX_NONFINITE - 1} steps before: look at rewards, at "
                "train_rollout_logprob_abs_diff and at train.optim.lr"
            )


class Trainer:
    """Trains the steps of the run by rank processes, and publishes their versions. Owns the ranks,
    also after restarts; decides when a step advances, is reset and ends.

    A step can be reset as long as its version is not published, so that no group counts twice:
    after a loss the coordinator sends all its shards again, from index 0.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        versions: ServedVersions,
        send: Callable[[Message], None],
        on_restart: Callable[[], None],
        relay: Callable[[Message], None] | None = None,
    ) -> None:
        """`versions` are served by this daemon's server. `send` reaches the coordinator; `relay`
        does, for other trainer nodes, also before the coordinator has welcomed this node.

        `on_restart` is called when the ranks run again after a loss: it sends a Hello for another
        trainer, and calls `rejoin` after the Welcome.
        """
        self._config = config
        self._place = place
        self._checkpoints = config.checkpoints(place.run_dir)
        self._send = send
        self._on_restart = on_restart
        self._versions = versions
        self.followers = Followers(config.train.nodes - 1, relay or send)
        self.device = ""
        self._state = TrainerState.STARTING
        self._connected = True  # to the coordinator
        self._rejoined = False  # the step must be reset; during an update: and announced after it
        self._is_stopping = False
        self._changed = asyncio.Event()  # something may have to be done
        self._shards: deque[TrainShard] = deque()
        send_if = self._send_if_connected
        self._broadcasts = BroadcastOrders(config, place.host, send_if, self._changed)
        self._done = 0  # optimizer steps in the ranks' weights
        self._furthest = 0  # optimizer steps ever done by this process
        self.saves = Saves(self._checkpoints, config, send_if)
        self._crashes = CrashCounter(RESTARTS)
        self._published: PublishWeights | None = None  # the ranks' version
        self._file: VersionFile  # of that version; set once ranks have started
        self._step_done: StepDone | None = None  # the step that made it
        self._nonfinite = NonfiniteSteps()
        self.devices = NodeDevices(config, send_if)
        self._step: Step | None = None  # that is being trained

    @property
    def all_steps_done(self) -> bool:
        """The last version is published; a checkpoint may still be written."""
        return self._done >= self._config.eval.last_step(self._config.train.steps)

    def handle(self, message: TrainShard | VersionTaken | SetDevices) -> None:
        """Handle a message of the coordinator. Without a connection, or without ranks, it was meant
        for the trainer that this one was before."""
        self.devices.on_message(message)
        if not self._connected or self._state is TrainerState.DOWN:
            if isinstance(message, SetDevices) and not message.active and self._waits_for_devices:
                self.devices.ask(message.number)
            return
        if isinstance(message, TrainShard):
            self._shards.append(message)
        elif isinstance(message, VersionTaken):
            self._broadcasts.handle(message)
        elif not message.active:
            shards, step = self._shards, self._step
            ends_first = step.has_all if step else any(s.last for s in shards)
            self.devices.ask(message.number, ends_first)
        self._changed.set()

    def pause(self) -> None:
        """The connection to the coordinator is lost: send and accept nothing until `rejoin`."""
        self._connected = self._rejoined = False
        self._forget_orders()

    def rejoin(self) -> None:
        """The coordinator has welcomed this node again: announce its version, reset the step."""
        self._forget_orders()
        self._changed.set()
        if self._state is TrainerState.DOWN:
            self.devices.give()  # no shard comes before ranks announce their version
            return  # the Hello of `on_restart` is for another trainer
        self._connected = True
        self._rejoined = self._state is not TrainerState.STARTING
        self._announce()  # during an update it waits for its end

    def stop(self) -> None:
        """End after the step of which all groups have arrived, if any, and save."""
        self._is_stopping = True
        self.saves.stop()
        self._broadcasts.stop()
        self._changed.set()

    async def run(self) -> None:
        """Train until the last step is saved, or until `stop`; restart lost ranks from the newest
        checkpoint. Raises TrainerError if that is impossible."""
        step = await self._where_to_start()
        while True:
            try:
                await self._run_ranks(step)
                return
            except RanksLost as e:
                lost = e
            self._move(TrainerEvent.RANKS_LOST)
            self._connected = self._rejoined = False
            is_away = self.devices.lost()
            self._forget_orders()
            if is_away:  # ranks that start would find no memory
                logger.warning("%s; they start when their devices are given back", lost)
                await self._unless_stopped(self.devices.given())
            if self._is_stopping and not (self.all_steps_done and self._done > self.saves.step):
                logger.warning("%s; leaving with the checkpoint of step %d", lost, self.saves.step)
                return
            if self._is_stopping:  # the coordinator does not send the last steps again
                raise TrainerError(
                    f"{lost}; the last {self._done - self.saves.step} steps were not saved"
                )
            step = await self._recover_from(lost)

    async def close(self) -> None:
        """Stop serving weights."""
        await self._versions.close()

    def _forget_orders(self) -> None:
        """Drop what a coordinator sent before its connection or the ranks were lost."""
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

    async def _run_ranks(self, step: int) -> None:
        """Start ranks and work with them until they end. Raises RanksLost if they are lost."""
        followers = self.followers if self._config.train.nodes > 1 else None
        if followers and not await self._unless_stopped(followers.wait()):
            self._require_saved()
            return
        ranks = Ranks(self._config, self._place, self.saves.handle, followers, self.devices)
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
        """Train with ranks that start with the weights of `step`. Return whether they started."""
        started = await self._unless_stopped(ranks.started())
        if started is None:
            self._require_saved()
            return False
        await self._begin(ranks, step, started)
        while not (self.all_steps_done or self._is_stopping) and await self._train(ranks):
            if not self.all_steps_done:
                await self.saves.after_step(ranks, self._done)
        if self._done > self.saves.step:
            await self._save_last(ranks)
        if self.all_steps_done:
            await self.saves.exported()
        return True

    async def _begin(self, ranks: Ranks, step: int, started: RankStarted) -> None:
        if started.published is None:
            raise TrainerError("rank 0 started without publishing its weights")
        self.device, took_s = started.device, started.start_s
        logger.info("ranks started: %d, on %s, in %.1f s", len(ranks), self.device, took_s)
        for note in started.notes:
            logger.warning(note)
        self._done = step
        self.saves.begin_life(step)
        self._furthest = max(self._furthest, step)
        self._step_done = None
        self._file = started.published.file
        self._published = await self._versions.serve(started.published)
        announce = self._on_restart if self._state is TrainerState.DOWN else self._announce
        self._move(TrainerEvent.RANKS_STARTED)
        announce()

    def _require_saved(self) -> None:
        """Raise TrainerError if steps are lost when the trainer stops without ranks."""
        if self.all_steps_done:
            raise TrainerError(
                f"the last {self._done - self.saves.step} steps were not saved: ranks had died"
            )

    async def _unless_stopped(self, coroutine: Coroutine[Any, Any, Result]) -> Result | None:
        """Return its result; None if the trainer is to stop before."""
        running = asyncio.ensure_future(coroutine)
        try:
            while not running.done() and not self._is_stopping:
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({running, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return running.result() if running.done() else None
        finally:
            running.cancel()

    async def _train(self, ranks: Ranks) -> bool:
        """Train one step. Return False if stopped before all of its groups arrived; the weights are
        those of the last step. Raises TrainerError for any shard but the next of this step."""
        what = self._config, ranks, self._done, self._shards, self.devices
        self._step = step = Step(*what, self._send_if_connected, self._changed.set)
        try:
            if is_whole := await self._accumulate(ranks, step):
                await self._finish(ranks, step)
            return is_whole
        finally:
            await step.close()

    async def _accumulate(self, ranks: Ranks, step: Step) -> bool:
        """Accumulate all groups of the step. Return False if stopped before they arrived."""
        while True:
            while not (step.can_advance or self._rejoined or self._broadcasts.has_order):
                if self._is_stopping and not (step.is_busy or step.awaits_devices):
                    await step.reset()  # the weights of the last step are saved
                    return False
                self._changed.clear()
                await self._changed.wait()
            if self._broadcasts.has_order:
                await step.settle()
                await self._broadcasts.perform(ranks, self._file)
            elif self._rejoined or step.is_restarted:
                self._rejoined = False
                await step.reset()
            elif step.is_accumulated:
                return True
            else:
                await step.advance()

    async def _finish(self, ranks: Ranks, whole: Step) -> None:
        """Update, and publish the version of the next step."""
        queue, began_at = whole.queue, asyncio.get_running_loop().time()
        step, version = queue.step, queue.step + 1
        self._move(TrainerEvent.UPDATE_BEGAN)
        await self._versions.make_room()
        ranks.send_all(Update(step, queue.num_responses, queue.num_tokens, version))
        finished, *_ = await ranks.replies(StepFinished)
        if finished.published is None:
            raise TrainerError("rank 0 finished a step without publishing its weights")
        self.devices.announce()
        self._step = None  # what arrives from here on is of the next one
        self._file = finished.published.file
        replicas = queue.replicas if self._config.train.replicas > 1 else ()
        self._published = await self._versions.serve(finished.published, queue.portions, replicas)
        self._send_if_connected(self._published)
        self.devices.published()
        metrics = finished.metrics | whole.times(began_at) | whole.entropy(finished.metrics)
        self._step_done = StepDone(step, version, metrics)
        self._send_if_connected(self._step_done)
        self._nonfinite.count(step, finished.metrics)
        self._done = version
        if self._done > self._furthest:
            self._furthest = self._done
            self._crashes.progressed()
        self._move(TrainerEvent.UPDATE_ENDED)
        if self._rejoined:  # shards of the next step follow from what is announced
            self._rejoined = False
            self._announce()
        if not self.all_steps_done:
            await self._follow(ranks)

    async def _follow(self, ranks: Ranks) -> None:
        """Broadcast the version to nodes that wait for it, and encode its difference for nodes that
        pull, before the ranks compute again."""
        config, wants_delta = self._config, True
        if config.broadcast != "off" and self._connected and not self._is_stopping:
            wants_delta = await self._broadcasts.follow(ranks, self._file)
        if config.has_deltas and wants_delta:
            await self._offer_delta(ranks)

    async def _offer_delta(self, ranks: Ranks) -> None:
        """Encoding takes about as long as publishing did; nodes that have not got far with the
        version save those bytes."""
        ranks.send_all(EncodeDelta(self._done))
        encoded, *_ = await ranks.replies(Done)
        if encoded.delta is None:
            return
        offer = await self._versions.serve_delta(encoded.delta)
        if offer is not None and self._published is not None:
            self._published = replace(self._published, deltas=(offer,))
            self._send_if_connected(self._published)

    async def _save_last(self, ranks: Ranks) -> None:
        problem = await self.saves.save_last(ranks, self._done, self.all_steps_done)
        if problem and (self.all_steps_done or not self._config.journal.enabled):
            raise TrainerError(problem)
        if problem:  # the steps since the last checkpoint can be trained again from the journal
            logger.warning(problem)

    def _announce(self) -> None:
        """Send the version of the ranks, and reports that may have been lost; the coordinator
        counts the first of each."""
        self.devices.announce()
        if self._published is not None:
            self._send_if_connected(self._published)
            self.devices.published()
        if self._step_done is not None:
            self._send_if_connected(self._step_done)
        self.saves.announce()

    def _send_if_connected(self, message: Message) -> None:
        """Send if the coordinator is connected, and was connected when a running update began.
        Without ranks, send only that engines may have the devices."""
        is_waited_for = isinstance(message, DevicesReleased) and self._waits_for_devices
        is_late = self._rejoined and self._state is TrainerState.UPDATING
        if is_waited_for or (self._connected and not is_late):
            self._send(message)

    @property
    def _waits_for_devices(self) -> bool:
        return self._state is TrainerState.DOWN and self.devices.are_away

    def _move(self, event: TrainerEvent) -> None:
        self._state = next_state(EDGES, self._state, event)
