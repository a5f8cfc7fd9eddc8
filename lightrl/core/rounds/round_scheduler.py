"""The order of rounds and steps: when rounds are opened, closed and sent to the trainer.

Owns the states of the open rounds, and the prompts between rounds. `rounds` decides what a round
holds, `race` which groups win; this module does not depend on which node does the work.
"""

from collections import deque
from statistics import median

from lightrl.core.commands import CloseRound, CloseStep, DrawPrompts, Outbox
from lightrl.core.events import PromptsDrawn
from lightrl.core.log_entries import RoundOpened
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.nodes.scaling import Scaling
from lightrl.core.responses.length_predictor import LengthPredictor
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.rounds import mini_batches, race, rounds
from lightrl.core.rounds.backlog import Deferred
from lightrl.core.rounds.group_lifecycle import GroupLifecycle
from lightrl.core.rounds.rounds import admissible
from lightrl.core.state import DrawnPrompt, GroupState, Round, RoundKind, RoundState
from lightrl.core.training.trainer_feed import TrainerFeed
from lightrl.messages.training import StepDone

STEPS_REMEMBERED = 8


class RoundScheduler:
    def __init__(
        self,
        fleet: Fleet,
        table: ResponseTable,
        lifecycle: GroupLifecycle,
        predictor: LengthPredictor,
        scaling: Scaling,
        feed: TrainerFeed,
        outbox: Outbox,
    ) -> None:
        self._settings = settings = table.settings
        self.step = settings.first_step  # optimizer steps done
        self.opened = settings.first_step  # training rounds, with those before the run
        self.evaluated: int | None = None  # the policy version evaluated last
        self.finished = False  # no round remains to be opened
        self.last_cut = 0  # tokens, of the newest short round that closed
        self.draws: deque[Round] = deque()  # rounds that asked for prompts, in order
        self.trainer_feed = feed
        self._fleet = fleet
        self._table = table
        self._lifecycle = lifecycle
        self._backlog = lifecycle.backlog
        self._predictor = predictor
        self._scaling = scaling
        self._outbox = outbox
        self.step_began = 0.0
        self._step_done: StepDone | None = None
        self._train_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)  # of the newest steps

    def set_published_at(self, now: float) -> None:
        """Store the time at which a new version was published."""
        if (round := self._table.training) is not None:
            round.published_at = now

    # Rounds

    def advance(self, now: float) -> None:
        """Close the rounds and the step that are complete; open the next rounds, if possible."""
        self.close_finished_rounds(now)
        published = self._fleet.published
        if published is None:
            return
        version = published.policy_version
        if self.is_step_done and (
            self._fleet.ready or self._settings.max_staleness or self._ends_with(version)
        ):
            self._close_step(now)
            if self.step < self._settings.num_steps:
                self._scaling.decide()
            self.trainer_feed.send()  # of the next round, which may have closed before its turn
        self._open_next(version, now)

    def close_finished_rounds(self, now: float) -> None:
        """Close the groups that are settled and the rounds that are over; open none."""
        # All groups are closed first: one that waited may be ahead of others.
        for round in self._lifecycle.close_settled_groups():
            if round.state is RoundState.RUNNING:
                self._draw_more(round)  # replacements for groups that are out
            self._accept(round)
        for round in tuple(self._table.rounds):
            is_over = round.state is RoundState.RUNNING and not round.num_open
            if is_over and not self.num_missing(round):
                self.close_round(round, now)

    def _accept(self, round: Round) -> None:
        """Accept the groups that are certain to belong to the step, and send the trainer those
        whose turn it is. No group is certain while its round is still being filled."""
        if round.is_eval or round.state is RoundState.FILLING:
            return
        if round.state is RoundState.RUNNING:
            if not race.is_recheck_due(round):
                return
            self._lifecycle.accept_decided(round)
        mini_batches.assign(self._settings, round)
        self._scaling.accept(round)
        if round is self._table.training:
            self.trainer_feed.send()

    def finish_step(self, now: float) -> None:
        """Close the step of an ending run, if the trainer has finished it."""
        if self.is_step_done:
            self._close_step(now)

    def _ends_with(self, version: int) -> bool:
        """Return whether no round follows the publication of this version."""
        return version == self._settings.num_steps and not rounds.is_eval_due(
            self._settings, version, self.evaluated
        )

    def _open_next(self, version: int, now: float) -> None:
        """Open rounds: evaluations between steps, training up to max_staleness ahead."""
        while not self.draws:  # the kind of the next round depends on what this one takes
            if self._table.rounds and not self._settings.max_staleness:
                return
            step = self.opened
            if rounds.is_eval_due(self._settings, step, self.evaluated):
                if self._table.rounds or version != step or not self._fleet.ready:
                    # the evaluation waits for its version, and the next round for the evaluation
                    return
                self.open(rounds.new_round(self._settings, "eval", step, now))
                return
            if step == self._settings.num_steps:
                self.finished = not self._table.rounds
                return
            batch = self._settings.prompts_per_step
            if admissible(self._settings.max_staleness, version, batch, step * batch) < batch:
                return
            if not self._fleet.ready:
                return
            self.open(rounds.new_round(self._settings, self.next_kind(), step, now))

    def next_kind(self) -> RoundKind:
        """Return the kind of the training round that is opened next."""
        rounds_open = self._table.rounds
        return rounds.next_kind(self._settings, self._backlog, self.opened, rounds_open)

    def open(self, round: Round) -> None:
        """Open a round: start the prompts that wait for it, and draw the others."""
        self._outbox.record(RoundOpened(round.step, round.kind))
        self.opened += not round.is_eval
        self._table.open(round)
        self._scaling.open(round)
        if len(self._table.rounds) == 1:
            self.step_began = round.opened_at
        if round.is_eval:
            self._draw(round, round.needed)
            return
        if round.kind in {"long", "flush"}:
            self._start(round, self._backlog.pop_oldest(round.needed))
        self._draw_more(round)

    def _draw_more(self, round: Round) -> None:
        """Draw the prompts that a round still needs; start the round when it has all."""
        if round.is_eval or round in self.draws:
            return
        missing = self.num_missing(round)
        if missing > 0:
            held_back = self._backlog.pop_held_back(missing, self._busy(round))
            self._start(round, [Deferred(p, 0, round.step) for p in held_back])
            missing -= len(held_back)
        if missing > 0:
            self._draw(round, missing)
        elif round.state is RoundState.FILLING:
            round.transition(RoundState.RUNNING)

    def _draw(self, round: Round, count: int) -> None:
        self.draws.append(round)
        self._outbox.add(DrawPrompts(round.source, count))

    def fill(self, prompts: tuple[DrawnPrompt, ...]) -> None:
        """Start the prompts that answer the oldest DrawPrompts."""
        self._outbox.record(PromptsDrawn(prompts))
        round = self.draws.popleft()
        if round.is_eval:
            self._start(round, [Deferred(p, 0, round.step) for p in prompts])
            round.transition(RoundState.RUNNING)
            return
        usable = self._backlog.draw(prompts, self._busy(round))
        if round.state is RoundState.FILLING:
            unseen = rounds.foreseen_losers(
                self._settings, round, usable, self._predictor, self.last_cut
            )
            for prompt in unseen:
                usable.remove(prompt)
                self._lifecycle.defer(Deferred(prompt, 0, round.step))
            round.prompts_launched -= len(unseen)
        self._start(round, [Deferred(p, 0, round.step) for p in usable])
        self._draw_more(round)

    def num_missing(self, round: Round) -> int:
        """Return the number of prompts that a round must still draw, at most those it can draw."""
        missing = rounds.num_missing(self._settings, round)
        return min(missing, self._settings.num_prompts - len(self._busy(round))) if missing else 0

    def _busy(self, round: Round) -> set[str]:
        """Return the prompts that this round must not draw: its own and deferred ones."""
        deferred = {p.prompt.id for p in self._backlog.deferred}
        return {g.prompt.id for g in round.groups.values()} | deferred

    def _start(self, round: Round, prompts: list[Deferred]) -> None:
        started = rounds.add(self._settings, round, prompts, self._predictor)
        self._table.start(started)
        self._lifecycle.count_finished(started)

    def close_round(self, round: Round, now: float) -> None:
        round.closed_at = now
        self._lifecycle.check_scores(round)
        if round.is_eval:
            self.evaluated = round.step
            self._predictor.learn_evaluation(round)
            round.transition(RoundState.CLOSED)
            self._outbox.add(CloseRound(round))
            self._table.retire()
            return
        self._accept(round)
        self._lifecycle.end(round)
        round.transition(RoundState.CLOSED)
        self._accept(round)
        self._predictor.learn(round)
        self._scaling.close(round)
        if round.races:
            self.last_cut = round.finishing_tokens
        self._outbox.add(CloseRound(round))

    def _close_step(self, now: float) -> None:
        round, done = self._table.rounds[0], self._step_done
        assert done is not None
        for group in round.accepted:
            group.transition(GroupState.TRAINED)
            self._table.counters.groups_trained += 1
            self._table.counters.trained_responses += len(group.kept)
        round.transition(RoundState.TRAINED)
        self.step = round.step + 1
        self._step_done = None
        closed_at = max(round.closed_at, self.step_began)
        self._train_s.append(round.published_at - closed_at)
        self._outbox.add(
            CloseStep(
                step=round.step,
                rollout_s=closed_at - self.step_began,
                train_s=round.published_at - closed_at,
                weights_s=now - round.published_at,
                metrics=done.metrics,
            )
        )
        self._scaling.learn(round, now - self.step_began, done.metrics)
        self.step_began = now
        self._table.retire()

    @property
    def usual_train_s(self) -> float | None:
        """The median seconds in which only training was left, of the newest steps; or None."""
        return median(self._train_s) if self._train_s else None

    @property
    def is_step_done(self) -> bool:
        """Return whether the step is over: its round is closed and trained, and its version
        published. Nodes may still have to load the version."""
        round, published = self._table.training, self._fleet.published
        if round is None or published is None or round.state is not RoundState.CLOSED:
            return False
        return published.policy_version == round.step + 1 and self._step_done is not None

    # The trainer

    def on_step_done(self, done: StepDone) -> None:
        """Store the StepDone of the current closed round; ignore that of any other step."""
        round = self._table.training
        if round is not None and round.state is RoundState.CLOSED and done.step == round.step:
            if self._step_done is None:
                self._outbox.record(done)
            self._step_done = done

    def has_closed(self, step: int) -> bool:
        """Return whether this step is being trained and all of its groups are known."""
        round = self._table.training
        return round is not None and round.step == step and round.state is RoundState.CLOSED

    def why_not_at(self, version: int) -> str | None:
        """Return why a trainer cannot join at this version, in one line; None if it can."""
        published = self._fleet.published
        newest = published.policy_version if published is not None else -1
        if version <= newest or (newest < 0 and version == self.step):
            return None
        if version == newest + 1 == self.step + 1 and self.has_closed(self.step):
            return None  # it trained the step, and the coordinator was down when it reported that
        return (
            f"the trainer is at step {version}, the run at step {self.step}: its checkpoints "
            "belong to another journal"
        )

    @property
    def is_handing_over(self) -> bool:
        """Return whether all groups of the step are known, but not yet all sent to the trainer."""
        round = self._table.training
        if round is None or round.state is not RoundState.CLOSED:
            return False
        return self.trainer_feed.is_owed(round)

    def feed_trainer(self, has_joined: bool) -> None:
        """Feed the trainer, which has reported another step, or, if it `has_joined`, its own."""
        trained_step, round = self.trainer_feed.trained_step, self._table.training
        if (
            has_joined
            and trained_step is not None
            and round is not None
            and trained_step > round.step
        ):
            # Its StepDone is lost if the trainer or the coordinator was down then; otherwise the
            # trainer sends it again.
            self._step_done = self._step_done or StepDone(round.step, trained_step, {})
        self.trainer_feed.feed()
