"""Decide how many preemptible nodes the run wants; sum the paid seconds of all nodes.

Owns the values learned from steps, the wanted number, and the choice of surplus nodes to drain.
cost_model.py computes the forecast. Examines all nodes once a step; otherwise only sums seconds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from lightrl.core.commands import Outbox, Scale
from lightrl.core.nodes.cost_model import Forecast, LearnedTimes, MeanNode, StepWork
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.placement import LengthForecast, outlook
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState, Round
from lightrl.messages.nodes import Drain

# metrics of the trainer: its seconds of computation for a step
TRAIN_METRICS = ("timing_s/forward_backward", "timing_s/optimizer")
KEEP = 0.8  # weight of earlier steps
NUM_SHARES = 8  # of the trained tokens, in `StepWork.arrivals`
# steps in a row that must want fewer nodes before nodes are drained: estimates of new nodes are
# uncertain, and a node drained by mistake has to be started again
FEWER_STEPS = 3
OUTLIER = 3.0  # times the forecast: a longer step contained idle time


@dataclass(slots=True)
class _Seen:
    """Observations of a round since its opening."""

    began_at: float
    # node seconds before `began_at`; those of nodes that do not also train
    node_s: float
    other_s: float
    # (time, tokens of all groups that could be trained by then)
    accepted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    num_accepted: int = 0
    # Set when the round closes:
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
        self.learned = LearnedTimes()
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
        """Add the elapsed node seconds; ignore a clock that was set back."""
        elapsed, self._at = now - self._at, now
        if elapsed > 0:
            fleet, learned = self._fleet, self.learned
            learned.preemptible_s += elapsed * fleet.num_preemptible
            learned.reserved_s += elapsed * self.num_reserved
            sampling = len(fleet.ready)
            if self._settings.max_staleness:  # these still sample with the previous version
                sampling += len(fleet.updating)
            self._node_s += elapsed * sampling
            self._other_s += elapsed * (sampling - len(fleet.devices.sampling))

    @property
    def num_reserved(self) -> int:
        """The number of paid nodes that are not preemptible. Nodes on the devices of a trainer node
        and engines on the devices of smaller ones are not counted: those devices are paid for."""
        fleet, devices = self._fleet, self._fleet.devices
        num = len(fleet.nodes) - fleet.num_preemptible
        if devices.nodes:  # evaluated in every event, and mostly empty
            num -= sum(not node.is_preemptible for node in devices.nodes.values())
        return num - self._num_larger if devices.parallel else num

    @property
    def _num_larger(self) -> int:
        """The number of engines on the devices of smaller engines, in whose place they work."""
        least = min(self._settings.parallel, default=0)
        return sum(n.parallel > least for n in self._fleet.devices.parallel.values())

    # Learning from steps

    def open(self, round: Round) -> None:
        if not round.is_eval:
            self._rounds[round.step] = _Seen(self._at, self._node_s, self._other_s)

    def accept(self, round: Round) -> None:
        """Record newly accepted groups of a round."""
        seen = self._rounds.get(round.step)
        if seen is None or seen.num_accepted == len(round.in_turn):
            return
        tokens = seen.accepted[-1][1] if seen.accepted else 0
        for group in round.in_turn[seen.num_accepted :]:
            tokens += sum(r.num_sampled for r in group.kept)
        seen.num_accepted = len(round.in_turn)
        seen.accepted.append((self._at, tokens))

    def close(self, round: Round) -> None:
        """Record a round whose groups are all sampled and accepted. O(responses)."""
        seen = self._rounds.get(round.step)
        if seen is None or not round.groups or (seconds := self._at - seen.began_at) <= 0:
            return
        seen.rollout_s, seen.nodes = seconds, (self._node_s - seen.node_s) / seconds
        seen.others = (self._other_s - seen.other_s) / seconds
        steps = [float(r.num_new) for g in round.groups.values() for r in g.responses]
        mean, longest = fmean(steps), max(steps)
        if not mean:
            return
        if ahead := self._settings.max_staleness:
            # No step waits for the longest: responses of the next round run beside it.
            mean, longest = mean / (1 + ahead), 0.0
        times = [((at - seen.began_at) / seconds, tokens) for at, tokens in seen.accepted]
        seen.work = StepWork(1, sum(steps), mean, arrivals=tuple(_shares(times)))
        seen.longest = longest

    def forget_open(self) -> None:
        """Discard the open rounds: their observations are incomplete."""
        self._rounds.clear()

    def learn(self, round: Round, seconds: float, metrics: Mapping[str, float]) -> None:
        """Learn from a step that took `seconds`; `metrics` are those of the trainer."""
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
        if known.num:  # limits steps with idle time, or a clock that jumped
            most_s = OUTLIER * known.step_s(engine, nodes, *turns)
            over_s, rest_s = min(over_s, most_s), min(rest_s, most_s)
        self.learned.kinds[round.kind] = _mean(known, replace(work, over_s=over_s, rest_s=rest_s))

    @property
    def _turns(self) -> tuple[int, bool]:
        """The number of nodes that also train; whether they leave a rollout before it is over."""
        return len(self._fleet.devices.nodes), self._settings.offload != "off"

    def _meet(self, nodes: Iterable[Node]) -> None:
        """Learn the mean engine of nodes with observations."""
        known = [n for n in nodes if n.speed.num_observed]
        if not known:
            return
        # a round passes all batch sizes up to the slots
        base, slope = fmean(n.speed.base for n in known), fmean(n.speed.slope for n in known)
        self.learned.engine = MeanNode(base, slope, max(1.0, fmean(n.slots for n in known)))

    # How many nodes

    def forecast(self) -> Forecast | None:
        """Return a forecast; None before a whole period of rounds of all kinds was observed."""
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
        """Return `Forecast.enough`, computed once a step and when reserved nodes come or go."""
        num_steps = sum(work.num for work in forecast.kinds.values())
        key = num_steps, forecast.samplers, forecast.reserved, forecast.shared
        if self._enough is None or self._enough[0] != key:
            self._enough = key, forecast.enough()
        return self._enough[1]

    def decide(self) -> None:
        """Update and report the number of wanted preemptible nodes, and drain the surplus. Called
        between two steps."""
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
        """Report the wanted number; also after a resume, since started nodes may be lost."""
        if (wanted := self.learned.wanted) is not None and self._settings.scale_max:
            self._outbox.report(f"preemptible nodes worth having: {wanted}")
            self._outbox.add(Scale(wanted))

    def _drain(self, wanted: int) -> None:
        """Drain surplus nodes: idle ones first, then by time of finish, newest first if equal."""
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
            self._fleet.drain(node)  # assigns no new work before the node receives the Drain
            self._outbox.send(node.name, Drain(node.name, reason))

    def _finishes_in(self, node: Node) -> float:
        return outlook(node, self._expect).finishes_in() if node.running else 0.0


def _shares(times: list[tuple[float, int]]) -> Iterator[float]:
    """Yield the times, at most 1, at which the shares 0, 1 / NUM_SHARES, ... 1 had arrived, given
    (time, cumulative count)."""
    everything = times[-1][1] if times else 0
    for k in range(NUM_SHARES + 1):
        reached = (when for when, count in times if count * NUM_SHARES >= k * everything)
        yield min(1.0, next(reached, 1.0))


def _mean(known: StepWork, seen: StepWork) -> StepWork:
    """Return the mean of `known` and `seen`: plain at first, then weighting new steps most."""
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
