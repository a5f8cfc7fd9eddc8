"""Engines of several sizes over the same devices: those of one size are awake, the others sleep.

Owns which size that is, and that it comes to be so. Each engine is a rollout node of its own that
says how many devices it spans. Once a round has closed, `planner` says the size for the next one,
and it changes while the trainer is at work: nodes of other sizes are released, and when the last of
them sleeps, those of this size wake. As in `handover`, orders follow from where everybody is. Owns
also what the planner must know of a round: what it took, preempted, and held at once.
"""

from dataclasses import dataclass, replace

from lightrl.core import rounds
from lightrl.core.backlog import Backlog
from lightrl.core.commands import Outbox
from lightrl.core.ending import Ending
from lightrl.core.fleet import Fleet
from lightrl.core.length_predictor import LengthPredictor
from lightrl.core.planner import PlannedRound, Planner, PlannerMemory, peak_kv
from lightrl.core.responses import ResponseTable
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState, Round, RoundState
from lightrl.messages import Load
from lightrl.sharing_messages import Release, Wake

AWAKE = {NodeState.JOINING, NodeState.LOADING, NodeState.READY, NodeState.UPDATING}
HAS_LEFT = {RoundState.CLOSED, RoundState.TRAINED}


@dataclass(slots=True)
class _Open:
    """The round at hand, from when it was first seen."""

    step: int
    size: int
    since: float
    num_tokens: int
    preemptions: int
    kv_tokens: int = 0


@dataclass(slots=True)
class _Told:
    """A node's last word of its engine."""

    incarnation: int
    # KV preemptions
    counted: int
    at: float = 0.0


class EngineSizes:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        table: ResponseTable,
        backlog: Backlog,
        predictor: LengthPredictor,
        ending: Ending,
        outbox: Outbox,
    ) -> None:
        self.planner = Planner(settings.parallel or (1,))
        self.size = settings.parallel[0] if settings.parallel else 0  # of those that are awake
        self._settings = settings
        self._fleet = fleet
        self._nodes = fleet.devices.parallel
        self._loads: dict[str, _Told] = {}
        self._table = table
        self._backlog = backlog
        self._predictor = predictor
        self._ending = ending
        self._outbox = outbox
        self._num_preempted = 0  # in the run so far, as far as this core has seen it
        self._open: _Open | None = None
        self._chunks = 0  # until what nodes hold is added up again
        self._none_since: float | None = None  # when no node of this size was left
        self._released_by: float | None = None  # the node that was told so first
        self._seen: object = None  # all that the last orders followed from

    # What outlives the coordinator

    def memory(self) -> PlannerMemory:
        return replace(self.planner.memory(), size=self.size)

    def recall(self, known: PlannerMemory) -> None:
        self.planner.recall(known)
        if known.size in self._settings.parallel:
            self.size = known.size

    # Time

    @property
    def deadline(self) -> float | None:
        waits = None if self._none_since is None else self._none_since + self._settings.release_s
        return min((t for t in (waits, self._released_by) if t is not None), default=None)

    def late(self, now: float) -> list[Node]:
        """Nodes that have not given their devices back."""
        if self._released_by is None or now < self._released_by:
            return []
        release_s = self._settings.release_s
        told = (n for n in self._nodes.values() if n.state is NodeState.RELEASING)
        return [n for n in told if n.since + release_s <= now]  # rounded as the deadline is

    # What happens

    def heard(self, node: Node) -> None:
        """Tokens have come from a node. O(1), on average."""
        if node.parallel and self._open is not None:
            self._chunks -= 1
            if self._chunks < 0:
                held = sum(n.context for n in self._nodes.values())
                self._open.kv_tokens = max(self._open.kv_tokens, held)
                self._chunks = len(self._nodes)

    def heard_load(self, name: str, load: Load, now: float) -> None:
        """What a node's engine does, by its own word. Another engine counts preemptions from 0."""
        if (node := self._nodes.get(name)) is None:
            return
        told = self._loads.get(name)
        if told is None or told.incarnation != node.incarnation:
            # what it counted before it was known here was in no round
            told = self._loads[name] = _Told(node.incarnation, load.num_preemptions)
        more = load.num_preemptions - told.counted
        self._num_preempted += more if more >= 0 else load.num_preemptions
        told.counted, told.at = load.num_preemptions, now

    def update(self, now: float) -> None:
        """In every event. With no node that says its size it does nothing."""
        if not self._nodes or self._ending.has_begun:
            return
        if (round := self._table.round) is not None and not round.is_eval:
            self._measure(round, now)
        is_due = self._none_since is not None and now >= (self.deadline or 0.0)
        published = self._fleet.published
        if published is None:
            return  # nothing to wake with
        seen = self._fleet.devices.num_moves, self.size, published.policy_version
        if seen != self._seen or is_due:
            self._give_orders(now)
            self._seen = self._fleet.devices.num_moves, self.size, published.policy_version

    def _measure(self, round: Round, now: float) -> None:
        seen = self._open
        if round.state not in HAS_LEFT:
            if seen is None or seen.step != round.step:
                counts = _num_tokens(round), self._num_preempted
                self._open = _Open(round.step, self.size, now, *counts)
        elif seen is not None and seen.step == round.step and self._have_told(round):
            self._open = None
            self._learn(seen, round)
            if round.step + 1 < self._settings.num_steps:
                self._plan()

    def _have_told(self, round: Round) -> bool:
        """All nodes have said how often they preempted in the round; or nobody waits for it."""
        published = self._fleet.published
        if published is not None and published.policy_version > round.step:
            return True
        nodes = (n for n in self._nodes.values() if n.state is NodeState.READY)
        told = (self._loads.get(n.name) for n in nodes)
        return all(t is not None and t.at >= round.closed_at for t in told)

    def _learn(self, seen: _Open, round: Round) -> None:
        if seen.size != self.size:
            return  # it has changed since
        nodes = [n for n in self._nodes.values() if n.parallel == self.size]
        caches = [n.load.kv_tokens for n in nodes]
        self.planner.has_caches(self.size, sum(caches) if all(caches) else 0)
        self.planner.learn(
            PlannedRound(
                kind=round.kind,
                size=self.size,
                preemptions=self._num_preempted - seen.preemptions,
                seconds=round.closed_at - seen.since,
                num_tokens=_num_tokens(round) - seen.num_tokens,
                kv_tokens=seen.kv_tokens,
            )
        )

    def _plan(self) -> None:
        kind = rounds.next_kind(self._settings, self._backlog)
        foreseen = self._foreseen_kv() if kind == "long" and self._settings.foresight else 0.0
        size = self.planner.size_for(kind, foreseen)
        if size != self.size and size in self._sizes_there():
            self._outbox.report(
                f"engines of {size} devices, not {self.size}, for the next round: {kind}"
            )
            self.size, self._none_since = size, None

    def _sizes_there(self) -> set[int]:
        return {n.parallel for n in self._nodes.values() if n.state is not NodeState.DRAINING}

    def _foreseen_kv(self) -> float:
        """Of the long round that comes next: its prompts wait."""
        lengths: list[float] = []
        prompts = [p.prompt for p in self._backlog.put_off][: self._settings.prompts_per_step]
        for prompt in prompts:
            known = self._predictor.lengths(prompt.id)
            num = self._settings.group_size
            longest = sorted(known, reverse=True)[:num]
            held = len(prompt.tokens) // 4
            lengths += [held + n for n in longest]
        slots = sum(n.slots for n in self._nodes.values() if n.parallel == self.size)
        return peak_kv(lengths, slots)

    # Orders

    def _give_orders(self, now: float) -> None:
        nodes = self._nodes.values()
        self._look_for_others(now)
        for node in nodes:
            if node.parallel != self.size and node.state in AWAKE:
                self._fleet.release(node)
                node.order += 1
                self._outbox.send(node.name, Release(node.order))
        if all(n.is_asleep for n in nodes if n.parallel != self.size):
            for node in nodes:
                if node.parallel == self.size and node.state is NodeState.RELEASED:
                    node.order += 1
                    self._fleet.wake(node)
                    self._outbox.send(node.name, Wake(node.order))
        told_at = [n.since for n in nodes if n.state is NodeState.RELEASING]
        self._released_by = min(told_at) + self._settings.release_s if told_at else None

    def _look_for_others(self, now: float) -> None:
        """If no node of this size comes, another one does the work."""
        staying = self._sizes_there()
        if self.size in staying or not staying:
            self._none_since = None
        elif self._none_since is None:
            self._none_since = now
        elif now >= self._none_since + self._settings.release_s:
            size = min(staying, key=lambda s: (max(s, self.size) / min(s, self.size), s))
            self._outbox.warn(f"no engine of {self.size} devices is there: those of {size} work")
            self.size, self._none_since = size, None


def _num_tokens(round: Round) -> int:
    return sum(len(r.tokens) for g in round.groups.values() for r in g.responses)
