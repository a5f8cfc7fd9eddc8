"""Shutdown: the final state, the nodes to stop, and the nodes that are still awaited.

A run that has done its steps waits for the trainer to write its last checkpoint; one that is
stopped still sends the trainer the step of which all groups are known.
"""

from collections.abc import Callable

from lightrl.core.commands import Finish, Outbox
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.rounds.round_scheduler import RoundScheduler
from lightrl.core.settings import Settings
from lightrl.core.state import RunState
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.nodes import Drain


class Shutdown:
    def __init__(
        self, settings: Settings, fleet: Fleet, steps: RoundScheduler, outbox: Outbox
    ) -> None:
        self.has_begun = False
        self.is_over = False  # all nodes have left
        self._outcome = RunState.FINISHED  # or stopped, or failed
        self._reason = ""
        self._dismissed: set[str] = set()  # trainer nodes that do not lead
        self._settings = settings
        self._fleet = fleet
        self._steps = steps
        self._trainer_feed = steps.trainer_feed
        self._outbox = outbox

    @property
    def state(self) -> RunState:
        """The state of a run that ends."""
        return self._outcome if self.is_over else RunState.FINISHING

    @property
    def _reason_text(self) -> str:
        """The reason sent to nodes. Example: run finished: 100 steps done"""
        return f"run {self._outcome}: {self._reason}"[:MAX_TEXT]

    def begin(self, outcome: RunState, reason: str) -> None:
        """Ask every node to leave; the run is over when all have. A failure outranks a success."""
        if self.has_begun:
            if outcome is RunState.FAILED and self._outcome is RunState.FINISHED:
                self._outcome, self._reason = outcome, reason
            return
        self.has_begun = True
        self._outcome, self._reason = outcome, reason
        self._outbox.report(reason)  # of a failure the last line is an error
        for name in self._fleet.nodes:
            if name not in self._fleet.trainers:
                self._outbox.send(name, Drain(name, self._reason_text))
        self.stop_trainer()

    def conclude(self) -> None:
        """End the run once all nodes have left. Other trainer nodes are asked after the leader has
        left: its last checkpoint needs them."""
        if self._fleet.trainer is None and not self.awaits_trainer:
            for name in self._fleet.trainers.names:
                if name not in self._dismissed:
                    self._dismissed.add(name)
                    self._outbox.send(name, Drain(name, self._reason_text))
        if not self._fleet.nodes and not self.awaits_trainer:
            self.is_over = True
            self._outbox.add(Finish(self._outcome, self._reason))

    def stop_trainer(self) -> None:
        """Ask the leader to leave; a run that finishes first lets it train all steps."""
        trainer = self._fleet.trainer
        is_behind = self._trainer_feed.trained_step != self._settings.num_steps
        has_work = self._ends_as(RunState.FINISHED) and is_behind
        if trainer is not None and not has_work and not self._hands_over:
            self._outbox.send(trainer, Drain(trainer, self._reason_text))

    @property
    def awaits_trainer(self) -> bool:
        """Return whether all steps are done and the last checkpoint is not yet written."""
        return self._ends_as(RunState.FINISHED) and not self._trainer_feed.has_finished

    @property
    def patience_ends_at(self) -> float | None:
        """Return the time at which a run without a trainer stops waiting for one."""
        since = self._trainer_feed.missing_since
        if since is None or (self.has_begun and not self.awaits_trainer):
            return None
        return since + self._settings.patience_s

    @property
    def _hands_over(self) -> bool:
        """Return whether a stopped run still trains the step of which all groups are known."""
        return self._ends_as(RunState.STOPPED) and self._steps.is_handing_over

    def flush(self, send: Callable[..., None], *args: int) -> None:
        """Call `send`, which sends shards, while shards still matter. Once a stopped run has sent
        its step, ask the trainer to leave."""
        before = self._hands_over
        if not self.has_begun or before:
            send(*args)
        if before and not self._hands_over:
            self.stop_trainer()

    def _ends_as(self, outcome: RunState) -> bool:
        return self.has_begun and self._outcome is outcome
