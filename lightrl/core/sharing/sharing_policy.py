"""Decide by a rule which shared nodes train and which sample within a step; measure its inputs.

Owns the measurements: seconds of a switch, seconds of the trainer by tokens, the times of a step.
`colocation` reports events and carries out the changes. The trainer does not report its progress
within a step, which is estimated from the rate of the last steps. A decision is O(nodes + responses
of the round); larger runs decide less often. Evaluations change nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightrl.core.log_entries import SharingMemory, WindowMemory
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.nodes.line_fit import LineFit
from lightrl.core.nodes.scaling import TRAIN_METRICS
from lightrl.core.responses.length_predictor import LengthPredictor
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.rounds import mini_batches
from lightrl.core.settings import Settings
from lightrl.core.sharing.round_outlook import Rest, rest_of
from lightrl.core.sharing.sharing_rules import (
    ForecastRule,
    OffRule,
    Rule,
    StepTimes,
    View,
    WindowRule,
)
from lightrl.core.state import Round, RoundKind, RoundState

# Pause between decisions, which then use about 1 % of the time (60 ms at 10,000 responses on 1,000
# nodes).
LOOK_S_PER_NODE, LOOK_S_PER_RESPONSE = 0.002, 0.0005
FORGET = 0.8  # weight of earlier steps in the fit of training times
NEWEST = 0.5  # weight of the last switch in the mean


@dataclass(slots=True)
class _Step:
    """Measurements of the current step."""

    kind: RoundKind
    opened_at: float
    looked_at: float
    # now: nodes that share nothing, loading ones included; share of the devices in training
    others: int = 0
    share: float = 0.0
    # node-seconds of these; estimated seconds of training done by all devices
    other_s: float = 0.0
    worked_s: float = 0.0
    closed_at: float | None = None
    # when the trainer had all devices
    trains_at: float | None = None
    # when it had trained the step and released the devices
    trained_at: float | None = None
    num_tokens: int = 0
    # seconds until nodes were released
    window_s: float | None = None

    def look(self, now: float, ready_s: float = math.inf) -> None:
        """Add the elapsed time. `ready_s`: training that could be done by now."""
        elapsed = max(0.0, now - self.looked_at)
        self.other_s += elapsed * self.others
        done = self.worked_s + elapsed * self.share
        self.worked_s = max(self.worked_s, min(done, ready_s))
        self.looked_at = now


def rule_of(settings: Settings) -> Rule:
    rules: dict[str, type[Rule]] = {"off": OffRule, "foreseen": ForecastRule, "window": WindowRule}
    return rules[settings.offload]()


class SharingPolicy:
    def __init__(
        self, settings: Settings, fleet: Fleet, table: ResponseTable, predictor: LengthPredictor
    ) -> None:
        self.rule = rule_of(settings)
        self.released: set[str] = set()  # nodes released by the rule
        self.wanted: frozenset[str] = frozenset()  # `released` without nodes taken back
        self.look_again_at: float | None = None
        self.figures: dict[str, float] = {}  # of the step that was trained last
        self._look_pause = settings.look_pause
        # one in this many groups of a round can be trained before the round ends
        self._one_of = settings.mini_batches if mini_batches.is_shuffled(settings) else 1
        self._fleet = fleet
        self._devices = fleet.devices
        self._table = table
        self._predictor = predictor
        self._switch_s = 0.0  # mean; 0 = unknown
        self._training = LineFit()  # seconds of the trainer, by tokens of a step
        self._longest: dict[str, int] = {}  # trained response of the last round of a kind
        self._since: dict[str, float | None] = {}  # orders to change sides
        self._coming: set[str] = set()  # nodes of `_since` that are taken back
        self._step: _Step | None = None
        self._looked_at = self._look_at = 0.0  # the last decision, and the next at the earliest
        self._stamp: object = None  # counts at the last decision

    # Events

    def evaluate(self, now: float) -> None:
        """Decide if responses have finished, nodes have joined or left, or the rule asked for this
        time; called after every event."""
        round = self._table.round
        is_due = self.look_again_at is not None and now >= self.look_again_at
        if is_due:
            self.look_again_at = None
        if round is None or round.is_eval or round.state is not RoundState.RUNNING:
            self.look_again_at = None
            return
        stamp = self._table.num_finished, self._devices.num_transitions, round.step
        if self._since or (stamp == self._stamp and not is_due):
            return
        if self._looked_at <= now < self._look_at:  # False if the clock was set back
            self.look_again_at = self._look_at
            return
        self._stamp = stamp
        self._decide(round, now)

    def _decide(self, round: Round, now: float) -> None:
        rest = self.rest(round)
        self._measure(round, rest, now)
        view = self.view(round, rest)
        change = self.rule.decide(view, now)
        release, take_back = change.release, change.take_back
        if not (view.now_sampling() or self._fleet.updating):  # no other node samples
            take_back = tuple(node.name for node in view.released)
        pause_s = LOOK_S_PER_NODE * len(self._fleet.ready) + LOOK_S_PER_RESPONSE * len(view.left)
        self._looked_at, self._look_at = now, now + self._look_pause * pause_s
        if change.look_at is not None:
            self.look_again_at = max(change.look_at, self._look_at)
        if release and self._step is not None and self._step.window_s is None:
            self._step.window_s = now - round.opened_at
        self.released.update(release)
        self._since.update(dict.fromkeys((*release, *take_back), now))
        self._coming.update(take_back)
        self._update_wanted()

    @property
    def changing(self) -> tuple[str, ...]:
        """Nodes that were ordered to change sides and have not yet done so."""
        return tuple(self._since)

    def on_ordered(self, name: str, now: float | None) -> None:
        """Handle an order to sleep, by the rule or at the end of the rollout. `now` is None if the
        switch is not to be measured."""
        self._since.setdefault(name, now)

    def on_asleep(self, name: str, now: float) -> None:
        """Handle a node that sleeps: its devices are free to train."""
        if name not in self._coming:
            self._switched(name, now)
            if self._step is not None and self._all_train():
                self._step.trains_at = now

    def on_ready(self, name: str, now: float) -> None:
        """Handle a node that was taken back and samples again."""
        if name in self._coming:
            self._switched(name, now)
            self._forget(name)
            if self._step is not None:
                self._step.trains_at = None

    def on_lost(self, name: str) -> None:
        self._since.pop(name, None)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._coming.discard(name)
        self.released.discard(name)
        self._update_wanted()

    def _update_wanted(self) -> None:
        self.wanted = frozenset(self.released - self._coming)

    def on_rollout_ended(self, round: Round, now: float) -> None:
        """Handle the end of the rollout: all devices train now."""
        self.released.clear()
        self._since.clear()
        self._coming.clear()
        self._update_wanted()
        step = self._step
        if step is None or round.is_eval or step.opened_at != round.opened_at:
            return
        step.look(now)
        step.closed_at = now
        lengths = [(r.num_new, r.num_sampled) for g in round.accepted for r in g.kept]
        self._longest[round.kind] = max((new for new, _ in lengths), default=0)
        step.num_tokens = sum(tokens for _, tokens in lengths)
        if step.trains_at is None and self._all_train():
            step.trains_at = now

    def on_trainer_suspended(self, now: float) -> None:
        """Handle the release of all devices by the trainer; at the end of a step it precedes
        StepDone."""
        if self._step is not None and self._step.closed_at is not None:
            self._step.trained_at = now

    def on_step_done(self, now: float, metrics: Mapping[str, float]) -> None:
        """Handle the end of training of a step; `metrics` are of the trainer."""
        step, self._step = self._step, None
        has_times = TRAIN_METRICS[0] in metrics
        if step is None or step.closed_at is None or step.trains_at is None or not has_times:
            return
        worked_s = sum(metrics.get(name, 0.0) for name in TRAIN_METRICS)
        if not 0 <= worked_s < math.inf:
            return  # one such value would spoil every mean
        if step.num_tokens:
            self._training.add(float(step.num_tokens), worked_s, FORGET)
        ended = step.trained_at if step.trained_at is not None else now
        rollout_s = max(0.0, step.closed_at - step.opened_at)
        trainer_waited_s = max(0.0, ended - step.trains_at - worked_s)
        others_waited_s = max(0.0, ended - step.closed_at)
        self.figures = {
            "window_s": rollout_s if step.window_s is None else step.window_s,
            "waited_trainer_s": trainer_waited_s,
            "waited_remote_s": others_waited_s if step.others else 0.0,
        }
        nodes = (*self._fleet.ready.values(), *self._fleet.updating.values())
        self.rule.learn(
            StepTimes(
                kind=step.kind,
                others=step.other_s / rollout_s if rollout_s else 0.0,
                others_now=sum(not n.shares for n in nodes),
                rollout_s=rollout_s,
                trainer_waited_s=trainer_waited_s,
                others_waited_s=others_waited_s,
            )
        )

    # What outlives the coordinator

    def memory(self) -> SharingMemory:
        window = self.rule.memory() if isinstance(self.rule, WindowRule) else WindowMemory()
        return SharingMemory(self._switch_s, replace(self._training), dict(self._longest), window)

    def recall(self, known: SharingMemory) -> None:
        self._switch_s, self._training = known.switch_s, replace(known.training)
        self._longest = dict(known.longest)
        if isinstance(self.rule, WindowRule):
            self.rule.recall(known.window)

    # The view of the rule

    def rest(self, round: Round) -> Rest:
        return rest_of(round, self._predictor.expect, self._longest.get(round.kind, 0))

    def _train_s(self, rest: Rest) -> tuple[float, float]:
        """Return the seconds of training of the round, and of what could be trained by now."""
        num_tokens = rest.done + rest.to_come
        train_s = self._training.at(num_tokens) / self._one_of if self._training.n else 0.0
        return train_s, train_s * rest.done / max(1.0, num_tokens)

    def _measure(self, round: Round, rest: Rest, now: float) -> None:
        """Add the time since the last decision to the measurements of the step."""
        nodes = (*self._fleet.ready.values(), *self._fleet.updating.values())
        others, step = sum(not n.shares for n in nodes), self._step
        if step is None or step.opened_at != round.opened_at:
            step = self._step = _Step(round.kind, round.opened_at, round.opened_at, others)
        step.look(now, self._train_s(rest)[1])
        step.others, step.share = others, self._devices.share_free

    def view(self, round: Round, rest: Rest) -> View:
        """Return what the rule decides by, at the time of the last `_measure`."""
        ready, updating = self._fleet.ready.values(), self._fleet.updating.values()
        train_s, ready_s = self._train_s(rest)
        worked_s = self._step.worked_s if self._step is not None else 0.0
        return View(
            kind=round.kind,
            opened_at=round.opened_at,
            finished=rest.finished,
            sampling=[n for n in ready if n.shares],
            others=[n for n in ready if not n.shares],
            released=[n for n in self._devices.nodes.values() if n.name in self.released],
            train_s=max(0.0, train_s - worked_s) if self._training.n else None,
            ready_s=max(0.0, ready_s - worked_s),
            switch_s=self._switch_s,
            left=rest.left,
            kv_tokens=rest.kv_tokens,
            others_loading=sum(not n.shares for n in updating),
            in_parts=not self._devices.are_whole,
            unused=self._devices.share_unused,
        )

    def _all_train(self) -> bool:
        return all(node.is_asleep for node in self._devices.nodes.values())

    def _switched(self, name: str, now: float) -> None:
        since = self._since.pop(name, None)
        if since is not None and (seconds := now - since) >= 0:
            known = self._switch_s or seconds
            self._switch_s = known + NEWEST * (seconds - known)
