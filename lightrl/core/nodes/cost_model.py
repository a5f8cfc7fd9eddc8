"""How many preemptible nodes are worth having: what a step takes and costs with so many of them.

Owns the forecast, and which number is best by it. Pure functions of what was learned; who learns
it, and when, is in scaling.py.

A round samples R responses of S engine steps in all (tokens, unless engines draft), the longest of
L. An engine step of the fleet's mean node takes base + slope * B seconds with B responses, as
`placement` has it. While m nodes share the work evenly that is

    shared(m)  = base * max(S / (m * slots), S / R) + slope * S / m                seconds
    rollout(m) = max(shared(m) + over, alone)

where `alone`, (base + slope) * L, is what the longest response takes on a node of its own, and
`over` what the round took besides when it was seen: mostly its tail, in which nodes have nothing
left to share, whether the longest responses began with the others or had to wait for slots.
The trainer computes for `train` seconds, and begins when the first groups arrive. With the share y
of its work there after the share x(y) of the rollout,

    step(m) = max over y of (x(y) * rollout(m) + (1 - y) * train) + rest

since from the moment that it waited last, the trainer needs all the time for what was not there
yet. `rest` overlaps with nothing: the update, the weights.

Where N nodes share their devices with the trainer and n do not, the shared ones sample for a window
T, and the trainer computes behind it. The others go on alone; while all sample, work is done

    pace = rollout(n) / rollout(n + N)

times as fast. A window of T leaves a rollout of R(T) = rollout(n) - (pace - 1) * T, and the step is

    step(n) = max(T + train, max over y of (x(y) * R(T) + (1 - y) * train)) + rest

least where both are the same, or at T = 0. With W = m * rollout(m) and all groups complete at the
end that is T = (W - n * train) / (n + N), the equation of `sharing_rules`; from n = W / train on
one node more saves nothing. Here `rest` is also what a switch takes, and what the rule misses of
that.

Rejected: seconds for which nodes were busy, divided by m. As responses share a node's engine steps,
a node more makes steps shorter, not fewer: all of them stay busy until the longest response ends,
so that this would promise the same gain from every node, however many there are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HOUR_S = 3600.0
# where prices are unknown: a node more must save so much of a step
LEAST_SAVING = 0.01
# and what another number must save for nodes to be started or let go for it
HYSTERESIS = 0.01
# of the best: nothing
NOTHING = 0.001
MAX_NODES = 4096  # that are ever looked at


@dataclass(frozen=True, slots=True)
class Prices:
    """US$ for an hour of a node; 0 = free."""

    reserved: float
    preemptible: float

    def usd(self, reserved_s: float, preemptible_s: float) -> float:
        """Of so many seconds of nodes of both kinds."""
        return (reserved_s * self.reserved + preemptible_s * self.preemptible) / HOUR_S


@dataclass(frozen=True, slots=True)
class Engine:
    """The mean rollout node: seconds of an engine step with B responses are base + slope * B."""

    base: float
    slope: float
    # responses at once
    slots: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """What steps of one kind of round are like; means, the newest counting most."""

    # so many were seen
    num: int = 0
    # engine steps, of all responses together: S
    total: float = 0.0
    # of the mean response: S / R
    mean: float = 0.0
    # of the longest response; no more than the round took
    alone_s: float = 0.0
    # of the rollout, after which the shares 0, 1/8, ... 1 of what is trained were there: x(y)
    arrivals: tuple[float, ...] = ()
    # of the trainer
    train_s: float = 0.0
    # of the rollout, besides what nodes share
    over_s: float = 0.0
    # that overlap with nothing
    rest_s: float = 0.0

    def shared_s(self, engine: Engine, nodes: float) -> float:
        """With so many nodes, not none."""
        share = self.total / nodes
        return engine.base * max(share / engine.slots, self.mean) + engine.slope * share

    def rollout_s(self, engine: Engine, nodes: float) -> float:
        return max(self.alone_s, self.shared_s(engine, nodes) + self.over_s)

    def trained_s(self, rollout_s: float) -> float:
        """From the opening of the round on, until all of it is trained."""
        num = len(self.arrivals) - 1
        return max(
            x * rollout_s + (1 - k / num) * self.train_s for k, x in enumerate(self.arrivals)
        )

    def in_turns_s(self, engine: Engine, nodes: float, shared: int, leave: bool) -> float:
        """Likewise, if `shared` of all nodes train, too. `leave`: before the rollout is over, if
        others go on."""
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
        # With that window this is window + train, too; without one no less than train.
        return self.trained_s(alone_s - faster * max(0.0, window_s))

    def step_s(self, engine: Engine, nodes: float, shared: int = 0, leave: bool = True) -> float:
        """With so many nodes, of which `shared` train, too."""
        if nodes <= 0:
            return math.inf
        if not shared:
            return max(0.0, self.trained_s(self.rollout_s(engine, nodes)) + self.rest_s)
        # Less than nothing: half of them trained beside the rest, which pays while nobody goes on.
        rest_s = max(0.0, self.rest_s) if leave and nodes > shared else self.rest_s
        return max(0.0, self.in_turns_s(engine, nodes, shared, leave) + rest_s)


@dataclass(slots=True)
class Observed:
    """What outlives the coordinator."""

    # by kind of round
    kinds: dict[str, StepWork] = field(default_factory=dict[str, StepWork])
    # None: no step has been sampled yet
    engine: Engine | None = None
    # preemptible nodes
    wanted: int | None = None
    # of nodes, as long as they were there
    reserved_s: float = 0.0
    preemptible_s: float = 0.0

    def copy(self) -> "Observed":
        return replace(self, kinds=dict(self.kinds))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step with so many preemptible nodes: the mean of all kinds of rounds, as they come."""

    nodes: int
    # inf: nobody samples
    step_s: float
    # None: prices are not known
    usd: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of the fleet as it is, but for the number of preemptible nodes."""

    engine: Engine
    # by kind of round
    kinds: Mapping[str, StepWork]
    # reserved nodes that sample; and all that are paid for, those that only train too
    samplers: int
    reserved: int
    prices: Prices | None = None
    # of `samplers`, those that train, too; whether they leave the rollout before it is over
    shared: int = 0
    leave: bool = True
    _num: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_num", sum(work.num for work in self.kinds.values()))

    def step_s(self, nodes: float) -> float:
        """Seconds with so many preemptible nodes; rounds are weighted by how often they came, so
        that this is the mean over whole periods of tail batching."""
        fleet = self.samplers + nodes, self.shared, self.leave
        return sum(w.num * w.step_s(self.engine, *fleet) for w in self.kinds.values()) / self._num

    def outcome(self, nodes: int) -> Outcome:
        step_s, usd = self.step_s(nodes), None
        if self.prices is not None:
            usd = self.prices.usd(self.reserved, nodes) * step_s if step_s < math.inf else math.inf
        return Outcome(nodes, step_s, usd)

    def _weight(self, nodes: int) -> float:
        """What a second with so many nodes is worth avoiding: their price. Where that is not known
        each node counts LEAST_SAVING of a step; where all is free, time alone."""
        if self.prices is None:
            return (1 + LEAST_SAVING) ** nodes
        if self.prices.reserved * self.reserved + self.prices.preemptible <= 0:
            return 1.0
        return self.prices.usd(self.reserved, nodes)

    def _loss(self, nodes: int) -> float:
        """What is made least."""
        step_s = self.step_s(nodes)
        return step_s * self._weight(nodes) if step_s < math.inf else math.inf

    def enough(self) -> int:
        """From so many preemptible nodes on, at most MAX_NODES, one more saves nothing worth its
        price. Looks at no more numbers than matter."""
        least_s = self.step_s(math.inf)
        best, loss = 0, self._loss(0)
        for nodes in range(1, MAX_NODES + 1):
            if least_s * self._weight(nodes) >= loss * (1 - NOTHING):
                break
            if (here := self._loss(nodes)) < loss:
                best, loss = nodes, here
        return best

    def wanted(self, enough: int, before: int | None) -> int:
        """`enough`, or the number `before` while that is as good but for HYSTERESIS: what is
        learned varies from step to step, and a node that comes or goes costs, too."""
        if before is None:
            return enough
        return enough if self._loss(enough) < self._loss(before) * (1 - HYSTERESIS) else before
