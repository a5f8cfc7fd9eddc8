"""Engines of several sizes over the same devices: those of one size are awake, the others sleep.

Owns which size that is. Each engine is a rollout node of its own that reports how many devices it
spans. Once a round has closed, `planner` decides the size for the next one, and it changes while
the trainer works: nodes of other sizes are ordered to sleep, and when the last of them sleeps,
those of this size are ordered to wake. Owns also what the planner needs of a round: its duration,
its preemptions, and the most tokens that its responses held at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightrl.core.commands import Outbox
from lightrl.core.device_turns import AWAKE, DeviceTurns
from lightrl.core.fleet import Fleet
from lightrl.core.planner import PlannedRound, Planner, PlannerMemory
from lightrl.core.responses import ResponseTable
from lightrl.core.settings import Settings
from lightrl.core.state import NodeState, Round, RoundKind, RoundState

CLOSED = {RoundState.CLOSED, RoundState.TRAINED}


@dataclass(slots=True)
class _Open:
    """The current round."""

    step: int
    size: int
    since: float
    num_tokens: int
    # by node, before it
    preemptions: dict[str, int]
    kv_tokens: int = 0
    # an engine is ready to sample; `since` is when the first one was
    has_begun: bool = False


class EngineSizes:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        table: ResponseTable,
        turns: DeviceTurns,
        next_kind: Callable[[], RoundKind],
        outbox: Outbox,
    ) -> None:
        """`next_kind` returns the kind of the next training round."""
        self.planner = Planner(settings.parallel or (1,))
        self.size = settings.parallel[0] if settings.parallel else 0  # of engines that are awake
        self._settings = settings
        self._fleet = fleet
        self._nodes = fleet.devices.parallel
        self._table = table
        self._turns = turns
        self._next_kind = next_kind
        self._outbox = outbox
        self._open: _Open | None = None
        self._chunks = 0  # until the tokens of all nodes are added up again
        self._none_since: float | None = None  # when no node of this size was left
        self._seen: object = None  # what the last orders followed from
        self._num_switches = 0
        self._learned: tuple[int, PlannedRound] | None = None  # the last round, and its step

    # What outlives the coordinator

    def memory(self) -> PlannerMemory:
        return replace(self.planner.memory(), size=self.size)

    def recall(self, memory: PlannerMemory) -> None:
        self.planner.recall(memory)
        if memory.size in self._settings.parallel:
            self.size = memory.size

    def figures(self, step: int) -> dict[str, float]:
        """Return size and preemptions of the round of a step that closes, the size for the next
        one, and changes since this coordinator began; {} with one size."""
        if self._learned is None or self._learned[0] != step:
            return {}
        done = self._learned[1]
        return {
            "parallel": float(done.size),
            "preemptions": float(done.preemptions),
            "next_parallel": float(self.size),
            "switches": float(self._num_switches),
        }

    # Events

    @property
    def deadline(self) -> float | None:
        """When another size takes over if no node of this one joins."""
        return None if self._none_since is None else self._none_since + self._settings.release_s

    def on_tokens(self) -> None:
        """Tokens have arrived from a node. O(1), on average."""
        if self._open is not None:
            self._chunks -= 1
            if self._chunks < 0:
                held = sum(n.context for n in self._nodes.values())
                self._open.kv_tokens = max(self._open.kv_tokens, held)
                self._chunks = len(self._nodes)

    def update(self, now: float) -> None:
        """Runs in every event. Does nothing without nodes that report a size."""
        if not self._nodes:
            return
        if (round := self._table.round) is not None and not round.is_eval:
            self._measure(round, now)
        is_due = self._none_since is not None and now >= (self.deadline or 0.0)
        if self._see() != self._seen or is_due:
            self._give_orders(now)
            self._seen = self._see()

    def _see(self) -> object:
        return self._fleet.devices.num_moves, self.size

    def _measure(self, round: Round, now: float) -> None:
        seen = self._open
        if round.state not in CLOSED:
            if seen is None or seen.step != round.step:
                counts = {name: n.load.num_preemptions for name, n in self._nodes.items()}
                seen = self._open = _Open(round.step, self.size, now, _num_tokens(round), counts)
            if not seen.has_begun:
                seen.since, seen.has_begun = now, bool(self._fleet.ready)
        elif seen is not None and seen.step == round.step:
            self._open = None
            if seen.size == self.size:
                self._learn(seen, round)
            if round.step + 1 < self._settings.num_steps:
                self._plan()

    def _learn(self, seen: _Open, round: Round) -> None:
        nodes = [n for n in self._nodes.values() if n.parallel == self.size]
        caches = [n.load.kv_tokens for n in nodes]
        self.planner.set_caches(self.size, sum(caches) if all(caches) else 0)
        counted = ((n.load.num_preemptions, seen.preemptions.get(n.name, 0)) for n in nodes)
        done = PlannedRound(
            kind=round.kind,
            size=self.size,
            # An engine that was started again counts from 0.
            preemptions=sum(now - before if now >= before else now for now, before in counted),
            seconds=round.closed_at - seen.since,
            num_tokens=_num_tokens(round) - seen.num_tokens,
            kv_tokens=seen.kv_tokens,
        )
        self._learned = round.step, done
        self.planner.learn(done)

    def _plan(self) -> None:
        """Decide the size for the next round."""
        kind = self._next_kind()
        size = self.planner.size_for(kind)
        if size != self.size and size in self._present():
            self._outbox.report(
                f"engines of {size} devices, not {self.size}, for the next round: {kind}"
            )
            self._change_to(size)

    def _change_to(self, size: int) -> None:
        self.size, self._none_since = size, None
        self._num_switches += 1

    def _present(self) -> set[int]:
        """Return the sizes of which a node takes part."""
        return {n.parallel for n in self._nodes.values() if n.state is not NodeState.DRAINING}

    # Orders

    def _give_orders(self, now: float) -> None:
        self._replace_missing(now)
        nodes = self._nodes.values()
        for node in nodes:
            if node.parallel != self.size and node.state in AWAKE:
                self._turns.sleep(node)
        if all(n.is_asleep for n in nodes if n.parallel != self.size):
            for node in nodes:
                if node.parallel == self.size and node.state is NodeState.RELEASED:
                    self._turns.wake(node)

    def _replace_missing(self, now: float) -> None:
        """If no node of this size joins in time, change to the nearest size that is present."""
        present = self._present()
        if self.size in present or not present:
            self._none_since = None
        elif self._none_since is None:
            self._none_since = now
        elif now >= self._none_since + self._settings.release_s:
            size = min(present, key=lambda s: (max(s, self.size) / min(s, self.size), s))
            self._outbox.warn(f"no engine of {self.size} devices is there: those of {size} work")
            self._change_to(size)


def _num_tokens(round: Round) -> int:
    return sum(r.num_new for g in round.groups.values() for r in g.responses)
