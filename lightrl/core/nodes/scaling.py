"""How many preemptible nodes the run wants, and what all nodes have been paid for so far.

Owns what is learned of the steps for that, the number wanted, and who goes if there are more. The
forecast itself is in worth.py. Looks at all nodes once a step; between, it adds up seconds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from lightrl.core.commands import Outbox, Scale
from lightrl.core.nodes.cost_model import Engine, Forecast, Observed, StepWork
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.placement import LengthForecast, outlook
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState, Round
from lightrl.messages.nodes import Drain

# what the trainer computes for a step, by its own word
TRAIN_METRICS = ("timing_s/forward_backward", "timing_s/optimizer")
KEEP = 0.8  # weight of the past at every step, once there is one
NUM_SHARES = 8  # of what is trained, for when it arrives
# so many steps in a row must want fewer nodes: what young nodes are like is hardly known yet, and
# who is let go for nothing has to be started again
FEWER_STEPS = 3
OUTLIER = 3.0  # times what was foreseen: a step that took longer, nobody worked at


@dataclass(slots=True)
class _Seen:
    """What is seen of a round, from its opening on."""

    began_at: float
    # seconds of nodes, until then; of these, of such that do not train, too
    node_s: float
    other_s: float
    # (when, tokens of all groups that could be trained by then)
    accepted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    num_accepted: int = 0
    # Once it has closed:
    rollout_s: float = 0.0
    nodes: float = 0.0
    others: float = 0.0
    # engine steps of the longest response
    longest: float = 0.0
    work: StepWork | None = None


class Scaling:
    def __init__(
        self, settings: Settings, fleet: Fleet, expect: LengthForecast, outbox: Outbox, now: float
    ) -> None:
        self.learned = Observed()
        self._settings = settings
        self._fleet = fleet
        self._expect = expect
        self._outbox = outbox
        self._num_fewer = 0  # steps in a row that wanted fewer
        self._enough: tuple[tuple[int, ...], int] | None = None
        self._at = now
        self._node_s = self._other_s = 0.0  # of nodes that could sample
        self._rounds: dict[int, _Seen] = {}  # by step; from their openings on

    def advance(self, now: float) -> None:
        """Time has passed. One that went backwards is not counted."""
        elapsed, self._at = now - self._at, now
        if elapsed > 0:
            fleet, learned = self._fleet, self.learned
            learned.preemptible_s += elapsed * fleet.num_preemptible
            learned.reserved_s += elapsed * self.num_reserved
            sampling = len(fleet.ready)
            if self._settings.max_staleness:  # they go on with the version before
                sampling += len(fleet.updating)
            self._node_s += elapsed * sampling
            self._other_s += elapsed * (sampling - len(fleet.devices.sampling))

    @property
    def num_reserved(self) -> int:
        """Nodes that are paid for, but for preemptible ones: who shares the devices of a trainer
        node is paid for with that, and so are engines that lie over the devices of smaller ones."""
        fleet, devices = self._fleet, self._fleet.devices
        num = len(fleet.nodes) - fleet.num_preemptible
        if devices.nodes:  # asked for in every event, and mostly there are none
            num -= sum(not node.is_preemptible for node in devices.nodes.values())
        return num - self._num_larger if devices.parallel else num

    @property
    def _num_larger(self) -> int:
        """Engines over the devices of others: what the smallest do, they do in their place."""
        least = min(self._settings.parallel, default=0)
        return sum(n.parallel > least for n in self._fleet.devices.parallel.values())

    # What steps are like

    def open(self, round: Round) -> None:
        if not round.is_eval:
            self._rounds[round.step] = _Seen(self._at, self._node_s, self._other_s)

    def accept(self, round: Round) -> None:
        """Maybe more of it can be trained."""
        seen = self._rounds.get(round.step)
        if seen is None or seen.num_accepted == len(round.in_turn):
            return
        tokens = seen.accepted[-1][1] if seen.accepted else 0
        for group in round.in_turn[seen.num_accepted :]:
            tokens += sum(len(r.tokens) for r in group.kept)
        seen.num_accepted = len(round.in_turn)
        seen.accepted.append((self._at, tokens))

    def close(self, round: Round) -> None:
        """All of it is sampled, and all that is trained is accepted. O(responses)."""
        seen = self._rounds.get(round.step)
        if seen is None or not round.groups or (seconds := self._at - seen.began_at) <= 0:
            return
        seen.rollout_s, seen.nodes = seconds, (self._node_s - seen.node_s) / seconds
        seen.others = (self._other_s - seen.other_s) / seconds
        gain = self._gain()
        steps = [r.num_new / gain for g in round.groups.values() for r in g.responses]
        mean, longest = fmean(steps), max(steps)
        if not mean:
            return
        if ahead := self._settings.max_staleness:
            # Nobody waits for the longest: the next round's responses run beside it.
            mean, longest = mean / (1 + ahead), 0.0
        times = [((at - seen.began_at) / seconds, tokens) for at, tokens in seen.accepted]
        seen.work = StepWork(1, sum(steps), mean, arrivals=tuple(_shares(times)))
        seen.longest = longest

    def forget_open(self) -> None:
        """Of the rounds that are open nobody saw all."""
        self._rounds.clear()

    def learn(self, round: Round, seconds: float, metrics: Mapping[str, float]) -> None:
        """A step is over that took so long; `metrics` are the trainer's."""
        seen = self._rounds.pop(round.step, None)
        fleet = self._fleet
        self._meet({**(fleet.ready or fleet.updating), **fleet.devices.nodes}.values())
        engine = self.learned.engine
        if engine is None or seen is None or seen.work is None or not seen.nodes:
            return
        known = self.learned.kinds.get(round.kind, StepWork())
        train_s = sum(metrics.get(name, 0.0) for name in TRAIN_METRICS)
        work = replace(
            seen.work,
            train_s=train_s if 0 < train_s < math.inf else 0.0,
            alone_s=min((engine.base + engine.slope) * seen.longest, seen.rollout_s),
        )
        work = replace(work, over_s=seen.rollout_s - work.shared_s(engine, seen.nodes))
        nodes, turns = seen.nodes, self._turns
        if turns[0]:
            nodes = seen.others + turns[0]
            rest_s = seconds - work.in_turns_s(engine, nodes, *turns)
        else:
            rest_s = seconds - work.trained_s(seen.rollout_s)
        over_s = work.over_s
        if known.num:  # a step for which nobody worked, or a clock that jumped
            most_s = OUTLIER * known.step_s(engine, nodes, *turns)
            over_s, rest_s = min(over_s, most_s), min(rest_s, most_s)
        self.learned.kinds[round.kind] = _mean(known, replace(work, over_s=over_s, rest_s=rest_s))

    @property
    def _turns(self) -> tuple[int, bool]:
        """How many nodes train, too; whether they leave a rollout before it is over."""
        return len(self._fleet.devices.nodes), self._settings.offload != "off"

    def _meet(self, nodes: Iterable[Node]) -> None:
        """The mean engine, of nodes that were heard of."""
        known = [n for n in nodes if n.speed.num_observed]
        if not known:
            return
        # A round passes all sizes of batch up to the capacity: the line over them, not the curve,
        # which at the largest alone promises 14 % too much of one node more.
        base, slope = fmean(n.speed.base for n in known), fmean(n.speed.slope for n in known)
        self.learned.engine = Engine(base, slope, max(1.0, fmean(n.capacity for n in known)))

    def _gain(self) -> float:
        """Tokens that an engine step brings a response, where engines draft."""
        gains = [n.gain.tokens for n in self._fleet.ready.values() if n.speculates]
        return fmean(gains) if gains else 1.0

    # How many nodes

    def forecast(self) -> Forecast | None:
        """None before anything is known: of every kind of round, a whole period of them."""
        learned, kinds = self.learned, self.learned.kinds
        is_whole = "short" in kinds and ("long" in kinds or "flush" in kinds)
        if learned.engine is None or not kinds or (self._settings.tail.races and not is_whole):
            return None
        nodes = self._fleet.nodes.values()
        samplers = sum("rollout" in n.roles and not n.is_preemptible for n in nodes)
        samplers -= self._num_larger
        of_run = self.num_reserved, self._settings.prices
        return Forecast(learned.engine, learned.kinds, samplers, *of_run, *self._turns)

    def enough(self, forecast: Forecast) -> int:
        """`Forecast.enough`, looked for once a step and when reserved nodes come or go."""
        num_steps = sum(work.num for work in forecast.kinds.values())
        key = num_steps, forecast.samplers, forecast.reserved, forecast.shared
        if self._enough is None or self._enough[0] != key:
            self._enough = key, forecast.enough()
        return self._enough[1]

    def decide(self) -> None:
        """Between two steps: says how many preemptible nodes are wanted, if that has changed, and
        lets the others go."""
        most, forecast, before = self._settings.scale_max, self.forecast(), self.learned.wanted
        if not most or forecast is None:
            return
        if before is not None:
            before = min(before, most)
        wanted = forecast.wanted(min(most, self.enough(forecast)), before)
        if before is not None:
            self._num_fewer = self._num_fewer + 1 if wanted < before else 0
            if 0 < self._num_fewer < FEWER_STEPS:
                wanted = before
        if wanted != self.learned.wanted:
            self.learned.wanted = wanted
            self.announce()
        if self._settings.scale_drain:
            self._drain(wanted)

    def announce(self) -> None:
        """Also of a run that goes on: what was done for this number may be lost."""
        if (wanted := self.learned.wanted) is not None and self._settings.scale_max:
            self._outbox.report(f"preemptible nodes worth having: {wanted}")
            self._outbox.add(Scale(wanted))

    def _drain(self, wanted: int) -> None:
        """Idle nodes go first, then those that finish first; of equal ones the newest."""
        there = [
            n
            for n in self._fleet.nodes.values()
            if n.is_preemptible and n.state is not NodeState.DRAINING and "trainer" not in n.roles
        ]
        surplus = len(there) - wanted
        if surplus <= 0:
            return
        reason = f"preemptible nodes worth having: {wanted}"
        for node in sorted(there, key=lambda n: (self._finishes_in(n), -n.number))[:surplus]:
            self._fleet.drain(node)  # it gets nothing new, before it has heard of it
            self._outbox.send(node.name, Drain(node.name, reason))

    def _finishes_in(self, node: Node) -> float:
        return outlook(node, self._expect).finishes_in() if node.running else 0.0


def _shares(times: list[tuple[float, int]]) -> Iterator[float]:
    """When the shares 0, 1 / NUM_SHARES, ... 1 of all were there; `times`: (when, so many were).
    Nothing at all came at the end."""
    everything = times[-1][1] if times else 0
    for k in range(NUM_SHARES + 1):
        reached = (when for when, count in times if count * NUM_SHARES >= k * everything)
        yield min(1.0, next(reached, 1.0))


def _mean(known: StepWork, seen: StepWork) -> StepWork:
    """Of the first ones alike, then the newest counting most."""
    kept = min(KEEP, known.num / (known.num + 1))

    def mean(old: float, new: float) -> float:
        return kept * old + (1 - kept) * new

    pairs = zip(known.arrivals or seen.arrivals, seen.arrivals, strict=True)
    return StepWork(
        known.num + 1,
        mean(known.total, seen.total),
        mean(known.mean, seen.mean),
        mean(known.alone_s, seen.alone_s),
        tuple(mean(old, new) for old, new in pairs),
        mean(known.train_s, seen.train_s),
        mean(known.over_s, seen.over_s),
        mean(known.rest_s, seen.rest_s),
    )
