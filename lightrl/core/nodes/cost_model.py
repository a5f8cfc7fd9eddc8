"""Forecast the seconds and costs of a step by number of preemptible nodes; find the best number.

Owns the forecast and the choice of the number. Pure functions of learned values; scaling.py learns
the values.

A round samples R responses of S engine steps in all (each token counts as one), the longest of L.
An engine step of the fleet's mean node takes base + slope * B seconds with B responses, as in
`placement`. With m nodes that share the work evenly

    shared(m)  = base * max(S / (m * slots), S / R) + slope * S / m                seconds
    rollout(m) = max(shared(m) + over, alone)

where `alone`, (base + slope) * L, is the time of the longest response on a node of its own, and
`over` the observed rest of the round: mostly its tail, in which nodes have no work to share,
whether the longest responses began with the others or had to wait for slots.
The trainer computes for `train` seconds, and begins when the first groups arrive. If the share y
of its work is available after the share x(y) of the rollout,

    step(m) = max over y of (x(y) * rollout(m) + (1 - y) * train) + rest

since after its last wait the trainer still has to compute all work that was not available before.
`rest` does not overlap with other work: the update, the weights.

Where N nodes share their devices with the trainer and n do not, the shared ones sample for a window
T, after which the trainer computes. The others continue alone; while all sample, work is done

    pace = rollout(n) / rollout(n + N)

times as fast. A window of T leaves a rollout of R(T) = rollout(n) - (pace - 1) * T, and the step is

    step(n) = max(T + train, max over y of (x(y) * R(T) + (1 - y) * train)) + rest

minimal where both terms are equal, or at T = 0. With W = m * rollout(m) and all groups complete at
the end that is T = (W - n * train) / (n + N), the equation of `sharing_rules`; from n = W / train
on one node more saves nothing. Here `rest` also includes the time of a switch, and the part of it
that the rule omits.

Rejected: busy seconds of nodes, divided by m. Responses share a node's engine steps, so one more
node makes steps shorter, not fewer: all nodes stay busy until the longest response ends. The
rejected formula would predict the same gain for every additional node, regardless of their number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HOUR_S = 3600.0
# where prices are unknown: share of a step that one more node must save
LEAST_SAVING = 0.01
# share that another number must save before nodes are started or drained
HYSTERESIS = 0.01
# share of the best loss; smaller differences count as none
NOTHING = 0.001
MAX_NODES = 4096  # limit of the search


@dataclass(frozen=True, slots=True)
class Prices:
    """US$ for an hour of a node; 0 = free."""

    reserved: float
    preemptible: float

    def usd(self, reserved_s: float, preemptible_s: float) -> float:
        """Return the price of node seconds of both kinds."""
        return (reserved_s * self.reserved + preemptible_s * self.preemptible) / HOUR_S


@dataclass(frozen=True, slots=True)
class MeanNode:
    """The mean rollout node: seconds of an engine step with B responses are base + slope * B."""

    base: float
    slope: float
    # concurrent responses
    slots: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """Model of the steps of one kind of round; means, the newest weighted most."""

    # observed steps
    num: int = 0
    # engine steps, of all responses together: S
    total: float = 0.0
    # of the mean response: S / R
    mean: float = 0.0
    # of the longest response; at most the time of the round
    alone_s: float = 0.0
    # shares of the rollout after which the shares 0, 1/8, ... 1 of the work were available: x(y)
    arrivals: tuple[float, ...] = ()
    # of the trainer
    train_s: float = 0.0
    # of the rollout, in addition to `shared_s`
    over_s: float = 0.0
    # without overlap
    rest_s: float = 0.0

    def shared_s(self, engine: MeanNode, nodes: float) -> float:
        """Return the seconds of the work that `nodes` > 0 nodes share evenly."""
        share = self.total / nodes
        return engine.base * max(share / engine.slots, self.mean) + engine.slope * share

    def rollout_s(self, engine: MeanNode, nodes: float) -> float:
        return max(self.alone_s, self.shared_s(engine, nodes) + self.over_s)

    def trained_s(self, rollout_s: float) -> float:
        """Return the seconds from the opening of the round until all of it is trained."""
        num = len(self.arrivals) - 1
        return max(
            x * rollout_s + (1 - k / num) * self.train_s for k, x in enumerate(self.arrivals)
        )

    def in_turns_s(self, engine: MeanNode, nodes: float, shared: int, leave: bool) -> float:
        """Return the same if `shared` of all nodes also train. `leave`: these nodes leave before
        the rollout is over, if others continue."""
        together_s = self.rollout_s(engine, nodes)
        if not leave or nodes <= shared:
            return together_s + self.train_s
        alone_s = self.rollout_s(engine, nodes - shared)
        faster = alone_s / together_s - 1 if together_s else 0.0
        num = len(self.arrivals) - 1
        window_s = max(
            (x * alone_s - k / num * self.train_s) / (1 + x * faster)
            for k, x in enumerate(self.arrivals)
        )
        # With that window the result equals window + train; without one it is at least train.
        return self.trained_s(alone_s - faster * max(0.0, window_s))

    def step_s(self, engine: MeanNode, nodes: float, shared: int = 0, leave: bool = True) -> float:
        """Return the seconds of a step with `nodes` nodes, of which `shared` also train."""
        if nodes <= 0:
            return math.inf
        if not shared:
            return max(0.0, self.trained_s(self.rollout_s(engine, nodes)) + self.rest_s)
        # Negative if some shared nodes trained while others sampled; used only if none continues.
        rest_s = max(0.0, self.rest_s) if leave and nodes > shared else self.rest_s
        return max(0.0, self.in_turns_s(engine, nodes, shared, leave) + rest_s)


@dataclass(slots=True)
class LearnedTimes:
    """Learned values that the journal keeps."""

    # by kind of round
    kinds: dict[str, StepWork] = field(default_factory=dict[str, StepWork])
    # None before the first step is sampled
    engine: MeanNode | None = None
    # preemptible nodes
    wanted: int | None = None
    # node seconds in the run
    reserved_s: float = 0.0
    preemptible_s: float = 0.0

    def copy(self) -> "LearnedTimes":
        return replace(self, kinds=dict(self.kinds))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step with `nodes` preemptible nodes: the mean of all kinds of rounds by frequency."""

    nodes: int
    # inf: no node samples
    step_s: float
    # None: prices are unknown
    usd: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for the current fleet with any number of preemptible nodes."""

    engine: MeanNode
    # by kind of round
    kinds: Mapping[str, StepWork]
    # reserved nodes that sample; all reserved nodes that are paid for, including train-only ones
    samplers: int
    reserved: int
    prices: Prices | None = None
    # nodes of `samplers` that also train; whether they leave the rollout before it is over
    shared: int = 0
    leave: bool = True
    _num: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_num", sum(work.num for work in self.kinds.values()))

    def step_s(self, nodes: float) -> float:
        """Return the seconds of a step with `nodes` preemptible nodes: the mean over whole periods
        of tail batching, since rounds are weighted by frequency."""
        fleet = self.samplers + nodes, self.shared, self.leave
        return sum(w.num * w.step_s(self.engine, *fleet) for w in self.kinds.values()) / self._num

    def outcome(self, nodes: int) -> Outcome:
        step_s, usd = self.step_s(nodes), None
        if self.prices is not None:
            usd = self.prices.usd(self.reserved, nodes) * step_s if step_s < math.inf else math.inf
        return Outcome(nodes, step_s, usd)

    def _weight(self, nodes: int) -> float:
        """Return the weight of a second with `nodes` nodes: their price. If prices are unknown,
        each node costs LEAST_SAVING of a step; if all are free, only time counts."""
        if self.prices is None:
            return (1 + LEAST_SAVING) ** nodes
        if self.prices.reserved * self.reserved + self.prices.preemptible <= 0:
            return 1.0
        return self.prices.usd(self.reserved, nodes)

    def _loss(self, nodes: int) -> float:
        """Return the loss to be minimised."""
        step_s = self.step_s(nodes)
        return step_s * self._weight(nodes) if step_s < math.inf else math.inf

    def enough(self) -> int:
        """Return the number of preemptible nodes, at most MAX_NODES, beyond which one more costs
        more than it saves. Stops once no larger number can be better."""
        least_s = self.step_s(math.inf)
        best, loss = 0, self._loss(0)
        for nodes in range(1, MAX_NODES + 1):
            if least_s * self._weight(nodes) >= loss * (1 - NOTHING):
                break
            if (here := self._loss(nodes)) < loss:
                best, loss = nodes, here
        return best

    def wanted(self, enough: int, before: int | None) -> int:
        """Return `enough`, or `before` while its loss is within HYSTERESIS: learned values vary
        between steps, and starting or draining a node also costs."""
        if before is None:
            return enough
        return enough if self._loss(enough) < self._loss(before) * (1 - HYSTERESIS) else before
