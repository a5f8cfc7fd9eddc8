"""On which side each shared device is, and what the rules of `offload` must know for a decision.

Owns what is learned by measuring: how long a switch takes, how long a trained token takes the
trainer, what a step has come to. Whoever drives it (the simulator, for now) says what happens and
carries out the changes. A decision is O(nodes + responses of the round), and the more there are,
the less often it is made, unless the nodes have changed. Not in evaluations.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from lightrl.core.coordinator import Coordinator
from lightrl.core.line_fit import LineFit
from lightrl.core.offload import NOTHING, Change, Rule, StepTimes, View
from lightrl.core.placement import outlook
from lightrl.core.round_curve import RoundCurve
from lightrl.core.state import (
    GroupState,
    Node,
    Response,
    ResponseState,
    Round,
    RoundKind,
    RoundState,
)

# Between two looks: looking then takes about one percent of the time (60 ms at 10,000 responses on
# 1,000 nodes). Less, if nodes have come or gone; they may do so together.
LOOK_S_PER_NODE, LOOK_S_PER_RESPONSE = 0.002, 0.0005
HURRY = 0.1
SOON_S = 0.05  # a decision is not put off for less
FORGET = 0.8  # weight of earlier steps in what training takes
PRIOR_WEIGHT = 0.01  # that it is proportional to tokens, against steps that differ as much
EVENLY = tuple((k / 8, k / 8) for k in range(1, 9))  # of what no round has told yet
REMEMBERED = 5  # measurements; their median stands for all: one that a clock spoilt does no harm


class Recent:
    """The newest measurements of one thing."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, value: float) -> None:
        if value >= 0:
            self._values.append(value)

    @property
    def value(self) -> float | None:
        return median(self._values) if self._values else None


@dataclass(slots=True)
class _Step:
    """The step at hand, as it is measured."""

    kind: RoundKind
    opened_at: float
    looked_at: float
    # now: nodes that sample, and those that share nothing, loading or not
    nodes: int = 0
    others: int = 0
    # times seconds
    node_s: float = 0.0
    other_s: float = 0.0
    closed_at: float | None = None
    # the trainer has all devices
    trains_at: float | None = None
    num_tokens: int = 0

    def look(self, now: float) -> None:
        elapsed = max(0.0, now - self.looked_at)
        self.node_s += elapsed * self.nodes
        self.other_s += elapsed * self.others
        self.looked_at = now


@dataclass(slots=True)
class _Rest:
    """Of a round: what goes on, and when it will be complete. Lengths in tokens."""

    expected: dict[str, float] = field(default_factory=dict[str, float])
    # groups that are complete, and what is trained of them
    num_done: int = 0
    done: int = 0
    # of each open group that will be trained, first first: (until it is complete, trained then)
    groups: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    finished: int = 0
    # that a response has which goes on
    most_held: int = 0
    kv_tokens: float = 0.0


class Sides:
    def __init__(
        self, core: Coordinator, rule: Rule, shares: Callable[[Node], bool], caches: dict[str, int]
    ) -> None:
        """`shares`: whether a node's devices also train; `caches`: tokens of KV by node."""
        self.rule = rule
        self.released: dict[str, Node] = {}
        self._core = core
        self._shares = shares
        self._caches = caches
        self._switch = Recent()
        self._training = LineFit()  # seconds of the trainer, by tokens of a step
        self._curves: dict[RoundKind, RoundCurve] = {}  # of the last round
        self._longest: dict[RoundKind, int] = {}  # trained response of the last round
        self._since: dict[str, float] = {}  # nodes on their way to the other side
        self._step: _Step | None = None
        self._looked_at = self._look_at = self._pause_s = 0.0
        self._nodes: frozenset[str] = frozenset()  # that sampled at the last look

    # What happens

    def look(self, now: float, worked_s: float) -> Change:
        """Responses have finished, or nodes have come or gone; the trainer has worked so long at
        this step, with all shared devices."""
        round, ready = self._core.table.round, self._core.fleet.ready
        if round is None or round.is_eval or round.state is not RoundState.RUNNING:
            return NOTHING
        changed = ready.keys() != self._nodes
        is_early = self._looked_at <= now < self._look_at  # else the clock has been set back
        if self._since or (is_early and not changed):
            return NOTHING
        if is_early and now < (soon := self._looked_at + HURRY * self._pause_s):
            return Change(look_at=soon)
        view = self.view(round, worked_s)
        self._account(round, view, now)
        change = self.rule.decide(view, now)
        self._nodes, self._looked_at = frozenset(ready), now
        self._pause_s = LOOK_S_PER_NODE * len(ready) + LOOK_S_PER_RESPONSE * view.num
        self._look_at = now + self._pause_s
        if change.look_at is not None:
            soon = max(change.look_at, now + SOON_S)
            self._look_at = min(self._look_at, soon)
            return Change(look_at=soon)
        for name in change.release:
            self.released[name] = ready[name]
        for name in (*change.release, *change.take_back):
            self._since[name] = now
        return change

    def trains(self, name: str, now: float) -> None:
        """A released node's devices have begun to train."""
        self._switched(name, now)
        if self._step is not None and self._all_train():
            self._step.trains_at = now

    def samples(self, name: str, now: float) -> None:
        """A node that was taken back samples again."""
        self._switched(name, now)
        self.released.pop(name, None)
        if self._step is not None:
            self._step.trains_at = None

    def rollout_ended(self, round: Round, now: float) -> None:
        """All responses have come; now all devices train."""
        self.released.clear()
        self._since.clear()
        step = self._step
        if step is None or round.is_eval or step.opened_at != round.opened_at:
            return
        step.look(now)
        step.closed_at = now
        self._curves[round.kind] = RoundCurve(round)
        self._longest[round.kind] = round.finishing_tokens
        step.num_tokens = sum(len(r.tokens) for g in round.accepted for r in g.kept)
        if step.trains_at is None:
            step.trains_at = now

    def step_trained(self, now: float, worked_s: float) -> None:
        """The step is over for the trainer."""
        step, self._step = self._step, None
        if step is None or step.closed_at is None or step.trains_at is None:
            return
        if step.num_tokens:
            self._training.add(float(step.num_tokens), worked_s, FORGET)
        rollout_s = max(0.0, step.closed_at - step.opened_at)
        fleet = self._core.fleet
        nodes = (*fleet.ready.values(), *fleet.updating.values())
        others = sum(not self._shares(n) for n in nodes)
        self.rule.learn(
            StepTimes(
                kind=step.kind,
                others=step.other_s / rollout_s if rollout_s else 0.0,
                others_now=others,
                rollout_s=rollout_s,
                work_s=step.node_s,
                train_s=worked_s,
                trainer_waited_s=max(0.0, now - step.trains_at - worked_s),
                others_waited_s=max(0.0, now - step.closed_at),
            )
        )

    # What is known

    def view(self, round: Round, worked_s: float) -> View:
        rest = self._rest(round)
        # Nothing that goes on longer than this is trained.
        last = rest.groups[-1][0] if rest.groups else 0.0

        def foresee(response: Response) -> float:
            tokens = rest.expected.get(response.id, 1.0)
            return min(tokens, len(response.tokens) + last) if round.races else tokens

        sampling = [n for n in self._core.fleet.ready.values() if n.name not in self.released]
        loading = [self._shares(node) for node in self._core.fleet.updating.values()]
        looks = [outlook(node, foresee) for node in sampling]
        waiting = [max(1.0, foresee(r) - len(r.tokens)) for r in self._core.table.queue.waiting()]
        group_s, token_s = self._train_s(round)
        gain = max((n.gain.tokens for n in sampling if n.speculates), default=1.0)
        left = sorted((*(tokens / gain for tokens in waiting), *(s for o in looks for s in o.left)))
        if left:
            # Each is foreseen as the mean of what it may become; the longest of many is longer.
            longest = max(last, self._longest.get(round.kind, 0) - rest.most_held)
            left[-1] = max(left[-1], longest / gain)
        ready_s = group_s * rest.num_done + token_s * rest.done
        train_s = ready_s + sum(group_s + token_s * tokens for _, tokens in rest.groups)
        curve = self._curves.get(round.kind)
        return View(
            kind=round.kind,
            opened_at=round.opened_at,
            finished=rest.finished / max(1, len(round.groups) * round.responses_launched),
            sampling=[o for o in looks if self._shares(o.node)],
            others=[o for o in looks if not self._shares(o.node)],
            released=list(self.released.values()),
            train_s=max(0.0, train_s - worked_s) if self._training.n else None,
            ready_s=max(0.0, ready_s - worked_s),
            arrivals=curve.arrivals(rest.most_held) if curve is not None else EVENLY,
            switch_s=self._switch.value or 0.0,
            left=left,
            kv_tokens=rest.kv_tokens,
            caches=self._caches,
            shared_loading=sum(loading),
            others_loading=len(loading) - sum(loading),
        )

    def _rest(self, round: Round) -> _Rest:
        expect, rest = self._core.predictor.expect, _Rest()
        for group in round.groups.values():
            lengths: list[float] = []
            left: list[float] = []
            for r in group.responses:
                rest.finished += r.finish_reason is not None
                held = len(r.tokens)
                if r.state in {ResponseState.RUNNING, ResponseState.QUEUED}:
                    tokens = rest.expected[r.id] = max(held + 1.0, expect(r))
                    rest.kv_tokens += len(group.prompt.tokens) // 4 + tokens
                    rest.most_held = max(rest.most_held, held)
                    lengths.append(tokens)
                    left.append(tokens - held)
                elif r.state is ResponseState.DONE:
                    lengths.append(float(held))
                    left.append(0.0)
            if group.state in {GroupState.COMPLETE, GroupState.ACCEPTED}:
                rest.num_done += 1
                rest.done += sum(len(r.tokens) for r in group.kept)
            elif group.state is GroupState.OPEN and lengths:
                left.sort()
                kept = min(round.group_size, len(lengths))
                until = left[kept - 1]
                rest.groups.append((until, sum(sorted(lengths)[:kept])))
        rest.groups.sort()
        del rest.groups[max(0, round.needed - rest.num_done) :]
        return rest

    def _train_s(self, round: Round) -> tuple[float, float]:
        """What the trainer takes for a group, and for a token of it."""
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
        self._step.look(now)
        self._step.nodes, self._step.others = len(view.now_sampling()), view.num_others

    def _all_train(self) -> bool:
        nodes = self._core.fleet.ready.values()
        return not any(map(self._shares, nodes)) and not self._since

    def _switched(self, name: str, now: float) -> None:
        if (since := self._since.pop(name, None)) is not None:
            self._switch.add(now - since)
