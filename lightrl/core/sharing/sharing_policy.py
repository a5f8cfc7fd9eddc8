"""Decide by a rule which shared nodes train and which sample within a step; measure its inputs.

Owns the measurements: seconds of a switch, seconds of the trainer per token, the times of a step.
`colocation` reports events and carries out the changes. The trainer does not report its progress
within a step, which is estimated from the rate of the last steps. A decision is O(nodes + responses
of the round); larger runs decide less often, unless nodes have joined or left. Evaluations change
nothing.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from lightrl.core.log_entries import SharingMemory
from lightrl.core.nodes.curve import LineFit
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.nodes.scaling import TRAIN_METRICS
from lightrl.core.responses.length_predictor import LengthPredictor
from lightrl.core.responses.placement import outlook
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.rounds import mini_batches
from lightrl.core.settings import Settings
from lightrl.core.sharing.round_outlook import (
    RoundCurve,
    in_waves,
    rest_of,
    shape_of,
    with_rest_at_end,
)
from lightrl.core.sharing.sharing_rules import (
    Change,
    ForecastRule,
    Never,
    Rule,
    StepTimes,
    View,
    Window,
    best_window_s,
)
from lightrl.core.state import (
    Response,
    Round,
    RoundKind,
    RoundState,
)

# Pause between decisions, which then use about 1 % of the time (60 ms at 10,000 responses on 1,000
# nodes). HURRY: share of the pause if nodes have joined or left, since several may do so together.
LOOK_S_PER_NODE, LOOK_S_PER_RESPONSE = 0.002, 0.0005
HURRY = 0.1
SOON_S = 0.05  # shortest delay of a decision
FORGET = 0.8  # weight of earlier steps in the fit of training times
PRIOR_WEIGHT = 0.01  # of proportionality to tokens, against steps that differ as much
REMEMBERED = 5  # measurements; their median ignores a single outlier
EVENLY = tuple((k / 8, k / 8) for k in range(1, 9))  # arrivals before the first round
WAVES = 2.0  # responses of a round per slot; below, all run concurrently


class Recent:
    """The newest measurements of one quantity."""

    def __init__(self, values: tuple[float, ...] = ()) -> None:
        self._values: deque[float] = deque(values, maxlen=REMEMBERED)

    def add(self, value: float) -> None:
        if value >= 0:
            self._values.append(value)

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self._values)

    @property
    def value(self) -> float | None:
        return median(self._values) if self._values else None


@dataclass(slots=True)
class _Step:
    """Measurements of the current step."""

    kind: RoundKind
    opened_at: float
    looked_at: float
    # now: sampling nodes, and nodes that share nothing, loading ones included
    nodes: int = 0
    others: int = 0
    # node-seconds of these
    node_s: float = 0.0
    other_s: float = 0.0
    closed_at: float | None = None
    # when the trainer had all devices
    trains_at: float | None = None
    # when it had trained the step and released the devices
    trained_at: float | None = None
    num_tokens: int = 0
    # seconds until nodes were released; T* of `sharing_rules`
    window_s: float | None = None
    foreseen_s: float | None = None
    # estimated seconds of training done, and when estimated
    worked_s: float = 0.0
    worked_at: float = 0.0

    def look(self, now: float) -> None:
        elapsed = max(0.0, now - self.looked_at)
        self.node_s += elapsed * self.nodes
        self.other_s += elapsed * self.others
        self.looked_at = now


def rule_of(settings: Settings) -> Rule:
    rules: dict[str, type[Rule]] = {"off": Never, "foreseen": ForecastRule, "window": Window}
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
        self._switch = Recent()
        self._training = LineFit()  # seconds of the trainer, by tokens of a step
        self._curves: dict[str, RoundCurve] = {}  # of the last round of a kind
        self._work: dict[str, tuple[float, float]] = {}  # W and t_train of the last step
        self._since: dict[str, float | None] = {}  # orders to change sides
        self._coming: set[str] = set()  # nodes of `_since` that are taken back
        self._share = 0.0  # of the devices, in training
        self._step: _Step | None = None
        self._looked_at = self._look_at = self._pause_s = 0.0
        self._stamp: object = None  # counts at the last evaluation
        self._moves = -1  # of nodes, at the last decision

    # Events

    def evaluate(self, now: float) -> None:
        """Decide if responses have finished, nodes have joined or left, or the rule asked for this
        time; called after every event."""
        round = self._table.round
        is_due = self.look_again_at is not None and now >= self.look_again_at
        if round is None or round.is_eval or round.state is not RoundState.RUNNING:
            self.look_again_at = None
            return
        moves = self._devices.num_moves
        stamp = self._table.num_finished, moves, round.step
        if stamp == self._stamp and not is_due:
            return
        self._stamp = stamp
        if is_due:
            self.look_again_at = None
        is_early = self._looked_at <= now < self._look_at  # False if the clock was set back
        if self._since or (is_early and moves == self._moves):
            return
        if is_early and now < (soon := self._looked_at + HURRY * self._pause_s):
            self.look_again_at = soon
            return
        self._decide(round, now)

    def _decide(self, round: Round, now: float) -> None:
        ready = self._fleet.ready
        view = self.view(round, now)
        self._account(round, view, now)
        change = self.rule.decide(view, now)
        if not (view.sampling or view.num_others or view.shared_loading or change.take_back):
            change = Change(take_back=tuple(n.name for n in view.released))  # no other node samples
        self._moves, self._looked_at = self._devices.num_moves, now
        look_s = LOOK_S_PER_NODE * len(ready) + LOOK_S_PER_RESPONSE * view.num
        self._pause_s = self._look_pause * look_s
        self._look_at = now + self._pause_s
        if change.look_at is not None:
            soon = self.look_again_at = max(change.look_at, now + SOON_S)
            self._look_at = min(self._look_at, soon)
            return
        step = self._step
        if change.release and step is not None and step.window_s is None:
            step.window_s = now - round.opened_at
        self.released.update(change.release)
        for name in (*change.release, *change.take_back):
            self._since[name] = now
        self._coming.update(change.take_back)
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
        self._curves[round.kind] = RoundCurve(shape_of(round))
        step.num_tokens = sum(len(r.tokens) for g in round.accepted for r in g.kept)
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
        ended = step.trained_at if step.trained_at is not None else now
        worked_s = sum(metrics.get(name, 0.0) for name in TRAIN_METRICS)
        if not 0 <= worked_s < math.inf:
            return  # one such value would spoil every mean
        if step.num_tokens:
            self._training.add(float(step.num_tokens), worked_s, FORGET)
        rollout_s = max(0.0, step.closed_at - step.opened_at)
        waited_s = max(0.0, ended - step.trains_at - worked_s), max(0.0, ended - step.closed_at)
        self.figures = {
            "window_s": rollout_s if step.window_s is None else step.window_s,
            "waited_trainer_s": waited_s[0],
            "waited_remote_s": waited_s[1] if step.others else 0.0,
        }
        if step.foreseen_s is not None:
            self.figures["foreseen_s"] = step.foreseen_s
        nodes = (*self._fleet.ready.values(), *self._fleet.updating.values())
        self._work[step.kind] = step.node_s, worked_s
        self.rule.learn(
            StepTimes(
                kind=step.kind,
                others=step.other_s / rollout_s if rollout_s else 0.0,
                others_now=sum(not n.shares for n in nodes),
                rollout_s=rollout_s,
                work_s=step.node_s,
                train_s=worked_s,
                trainer_waited_s=waited_s[0],
                others_waited_s=waited_s[1],
            )
        )

    # What outlives the coordinator

    def memory(self) -> SharingMemory:
        shapes = {kind: curve.shape for kind, curve in self._curves.items()}
        known = SharingMemory(
            self._switch.values, replace(self._training), shapes, dict(self._work)
        )
        return replace(known, window=self.rule.memory()) if isinstance(self.rule, Window) else known

    def recall(self, known: SharingMemory) -> None:
        self._switch, self._training = Recent(known.switches), replace(known.training)
        self._curves = {kind: RoundCurve(shape) for kind, shape in known.rounds.items()}
        self._work = dict(known.work)
        if isinstance(self.rule, Window):
            self.rule.recall(known.window, known.work)

    # The view of the rule

    def view(self, round: Round, now: float) -> View:
        rest = rest_of(round, self._predictor.expect)
        curve = self._curves.get(round.kind)
        # Nothing that runs longer than this is trained. Expected lengths are means: the longest of
        # many responses exceeds them.
        last = rest.groups[-1][0] if rest.groups else 0.0
        if curve is not None:
            last = max(last, curve.shape.longest - rest.most_held)

        def foresee(response: Response) -> float:
            tokens = rest.expected.get(response.id, 1.0)
            return min(tokens, len(response.tokens) + last) if round.races else tokens

        sampling = list(self._fleet.ready.values())
        loading = [bool(node.shares) for node in self._fleet.updating.values()]
        looks = [outlook(node, foresee) for node in sampling]
        waiting = [max(1.0, foresee(r) - len(r.tokens)) for r in self._table.queue.waiting()]
        group_s, token_s = self._train_s(round)
        launched = sum(len(group.responses) for group in round.groups.values())
        gain = max((n.gain.tokens for n in sampling if n.speculates), default=1.0)
        left = sorted((*(tokens / gain for tokens in waiting), *(s for o in looks for s in o.left)))
        if launched >= WAVES * sum(node.capacity for node in sampling):
            arrivals = in_waves(sum(waiting) / gain / sum(left) if left else 0.0)
        elif curve is not None:
            arrivals = curve.arrivals(rest.most_held)
        else:
            arrivals = EVENLY
        if left:
            left[-1] = max(left[-1], last / gain)
        ready_s = group_s * rest.num_done + token_s * rest.done
        open_s = sum(group_s + token_s * tokens for _, tokens in rest.groups)
        train_s, ready_s = ready_s + open_s, ready_s / self._one_of
        if self._one_of > 1 and train_s > ready_s:
            share = open_s / self._one_of / (train_s - ready_s)
            arrivals = with_rest_at_end(arrivals, share)
        worked_s = self._estimate_done(ready_s, now)
        return View(
            kind=round.kind,
            opened_at=round.opened_at,
            finished=rest.finished / max(1, launched),
            sampling=[o for o in looks if o.node.shares],
            others=[o for o in looks if not o.node.shares],
            released=[n for n in self._devices.nodes.values() if n.name in self.released],
            train_s=max(0.0, train_s - worked_s) if self._training.n else None,
            ready_s=max(0.0, ready_s - worked_s),
            arrivals=arrivals,
            switch_s=self._switch.value or 0.0,
            left=left,
            kv_tokens=rest.kv_tokens,
            caches={n.name: n.load.kv_tokens for n in self._fleet.nodes.values()},
            shared_loading=sum(loading),
            others_loading=len(loading) - sum(loading),
            in_parts=not self._devices.are_whole,
            unused=self._devices.share_unused,
        )

    def _estimate_done(self, ready_s: float, now: float) -> float:
        """Return the part of `ready_s` that is done, in seconds of all shared devices."""
        step, share = self._step, self._share
        self._share = self._devices.share_free
        if step is None:
            return 0.0
        done = step.worked_s + share * max(0.0, now - step.worked_at)
        step.worked_s, step.worked_at = max(step.worked_s, min(done, ready_s)), now
        return step.worked_s

    def _train_s(self, round: Round) -> tuple[float, float]:
        """Return seconds of the trainer per group, and per token."""
        if not self._training.n:
            return 0.0, 0.0
        tokens, seconds = self._training.means()
        slope = self._training.slope(seconds / tokens, PRIOR_WEIGHT * tokens * tokens)
        slope = min(max(0.0, slope), seconds / tokens)
        return (seconds - slope * tokens) / max(1, round.needed), slope

    def _account(self, round: Round, view: View, now: float) -> None:
        if self._step is None or self._step.opened_at != round.opened_at:
            opened = round.opened_at
            self._step = _Step(round.kind, opened, opened, len(view.now_sampling()))
            self._step.others = view.num_others
            self._step.worked_at = now
            shared = view.num_shared + view.shared_loading
            has_nodes = shared + view.num_others > 0  # none after a resume, until one joins
            if has_nodes and (work := self._work.get(round.kind)) is not None:
                self._step.foreseen_s = best_window_s(*work, shared, view.num_others)
        self._step.look(now)
        self._step.nodes, self._step.others = len(view.now_sampling()), view.num_others

    def _all_train(self) -> bool:
        return all(node.is_asleep for node in self._devices.nodes.values())

    def _switched(self, name: str, now: float) -> None:
        if (since := self._since.pop(name, None)) is not None:
            self._switch.add(now - since)
