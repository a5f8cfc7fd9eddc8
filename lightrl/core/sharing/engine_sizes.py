"""Keep engines of one size awake, of several sizes over the same devices.

Owns the current size. Each engine is a separate rollout node that reports how many devices it
spans. Once a round has closed, `planner` decides the size for the next round, and the size changes
while the trainer works: nodes of other sizes are ordered to sleep, and when the last of them
sleeps, those of the new size are ordered to wake. While nothing is sampled, the engines of each
size start once, the largest first, and measure the costs of their steps: each is ordered to wake
and to sleep again. Also measures a round for the planner: its duration, its preemptions, and the
peak of tokens held by its responses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightrl.core.commands import Outbox
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.settings import Settings
from lightrl.core.sharing.device_turns import AWAKE, DeviceTurns
from lightrl.core.sharing.planner import (
    EngineKind,
    PlannedRound,
    Planner,
    PlannerMemory,
    prior_lengths,
    round_s,
)
from lightrl.core.state import Node, NodeState, Round, RoundKind, RoundState

MAX_LENGTHS = 256  # of a round, to store
CLOSED = {RoundState.CLOSED, RoundState.TRAINED}


@dataclass(slots=True)
class _Open:
    """The current round."""

    step: int
    size: int
    since: float
    # by node, before it
    preemptions: dict[str, int]
    kv_tokens: int = 0
    # an engine is ready to sample; `since` is when the first was
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
        self._chunks = 0  # until the tokens of all nodes are summed again
        self._none_since: float | None = None  # when the last node of this size left
        self._seen: object = None  # the state from which the last orders were derived
        self._num_switches = 0
        self._learned: tuple[int, PlannedRound] | None = None  # the last round, and its step
        self._prompt_tokens = 0  # of the last round, on average
        self._started: dict[str, int] = {}  # node -> incarnation that was ordered to start once
        self._starting = 0  # the size whose engines start; 0 = none
        self._has_begun = False  # an engine is ready, or the first size is decided

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
        """The time at which another size replaces this one if no node of this size joins."""
        return None if self._none_since is None else self._none_since + self._settings.release_s

    def _is_late(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def on_tokens(self) -> None:
        """Handle tokens from a node. O(1) on average."""
        if self._open is not None:
            self._chunks -= 1
            if self._chunks < 0:
                held = sum(n.context for n in self._nodes.values())
                self._open.kv_tokens = max(self._open.kv_tokens, held)
                self._chunks = len(self._nodes)

    def update(self, now: float) -> None:
        """Give the orders that follow from an event, if there are nodes that report a size."""
        if not self._nodes:
            return
        if (round := self._table.round) is not None and not round.is_eval:
            self._measure(round, now)
        if not self._has_begun:
            self._begin(round)
        if self._see() != self._seen or self._is_late(now):
            self._give_orders(now)
            self._seen = self._see()

    def _begin(self, round: Round | None) -> None:
        """Plan the first round, also after a resume, if all costs are known before an engine is
        ready; otherwise keep the size."""
        if any(name in self._fleet.ready for name in self._nodes):
            self._has_begun = True
        elif self._expect(set(self._settings.parallel), [1]):
            self._has_begun = True
            is_open = round is not None and round.state not in CLOSED and not round.is_eval
            self._plan(round.kind if round is not None and is_open else self._next_kind())

    def _see(self) -> object:
        reports = sum((n.reported_at is not None) + bool(n.device) for n in self._nodes.values())
        return self._fleet.devices.num_transitions, self.size, reports, self._samples

    def _measure(self, round: Round, now: float) -> None:
        seen = self._open
        if round.state not in CLOSED:
            if seen is None or seen.step != round.step:
                counts = {name: n.load.num_preemptions for name, n in self._nodes.items()}
                seen = self._open = _Open(round.step, self.size, now, counts)
            if not seen.has_begun:
                seen.since, seen.has_begun = now, bool(self._fleet.ready)
        elif seen is not None and seen.step == round.step and self._are_counted(round):
            self._open = None
            if seen.size == self.size:
                self._learn(seen, round)
            if round.step + 1 < self._settings.num_steps:
                self._plan(self._next_kind())

    def _are_counted(self, round: Round) -> bool:
        """Return whether all ready nodes have reported their preemptions since the round closed,
        or the next version is published, so that the next round cannot wait."""
        published = self._fleet.published
        if published is not None and published.policy_version > round.step:
            return True
        ready = (n for n in self._nodes.values() if n.state is NodeState.READY)
        return all(n.reported_at is not None and n.reported_at >= round.closed_at for n in ready)

    def _learn(self, seen: _Open, round: Round) -> None:
        nodes = [n for n in self._nodes.values() if n.parallel == self.size]
        caches = [n.load.kv_tokens for n in nodes]
        self.planner.set_caches(self.size, sum(caches) if all(caches) else 0)
        counted = ((n.load.num_preemptions, seen.preemptions.get(n.name, 0)) for n in nodes)
        groups = round.groups.values()
        lengths = sorted((r.num_new for g in groups for r in g.responses), reverse=True)
        prompts = [len(g.prompt.tokens) // 4 for g in groups]
        self._prompt_tokens = sum(prompts) // max(1, len(prompts))
        done = PlannedRound(
            kind=round.kind,
            size=self.size,
            # An engine that was restarted counts from 0.
            preemptions=sum(now - before if now >= before else now for now, before in counted),
            seconds=round.closed_at - seen.since,
            kv_tokens=seen.kv_tokens,
            lengths=tuple(lengths[:: 1 + len(lengths) // MAX_LENGTHS]),
            num_responses=len(lengths),
            expected_s=self._expect({seen.size}, lengths).get(seen.size, 0.0),
        )
        self._learned = round.step, done
        self.planner.learn(done)

    def _plan(self, kind: str) -> None:
        """Decide the size for the next round."""
        expected = self._expect(set(self._settings.parallel), self._lengths_of(kind))
        size = self.planner.size_for(kind, expected)
        if size != self.size and size in self._present():
            self._outbox.report(
                f"engines of {size} devices, not {self.size}, for the next round: {kind}"
            )
            self._change_to(size)

    def _lengths_of(self, kind: str) -> list[int]:
        """Return the lengths to expect in the next round: those of the last one of its kind."""
        settings = self._settings
        some, count = self.planner.lengths(kind)
        if count:
            return [some[k * len(some) // count] for k in range(count)]
        short = kind == "short"
        prompts = settings.prompts_launched if short else settings.prompts_per_step
        count = prompts * (settings.responses_launched if short else settings.group_size)
        return prior_lengths(count, settings.max_response_tokens)

    def _expect(self, sizes: set[int], lengths: Sequence[int]) -> dict[int, float]:
        """Return seconds that a round of these lengths takes, by size of the engines; {} while
        costs are unknown."""
        expected: dict[int, float] = {}
        for size in sizes:
            nodes = [n for n in self._nodes.values() if n.parallel == size]
            costs = [n.load.costs for n in nodes if n.load.costs is not None]
            if not costs or not lengths:
                return {}
            slowest = max(costs, key=lambda c: (c.base_s, c.response_s))
            kv_tokens = min(n.load.kv_tokens for n in nodes)
            kind = EngineKind(len(nodes), nodes[0].slots, kv_tokens, slowest)
            expected[size] = round_s(kind, lengths, self._prompt_tokens)
        return expected

    def _change_to(self, size: int) -> None:
        self.size, self._none_since = size, None
        self._num_switches += 1

    def _present(self) -> set[int]:
        """Return the sizes of nodes that take part."""
        return {n.parallel for n in self._nodes.values() if n.state is not NodeState.DRAINING}

    # Orders

    def _give_orders(self, now: float) -> None:
        self._replace_missing(now)
        nodes = self._nodes.values()
        self._starting = self._size_to_start()
        size = self._starting or self.size
        for node in nodes:
            if node.parallel != size and node.state in AWAKE:
                self._turns.sleep(node)
        if all(n.is_asleep for n in nodes if n.parallel != size):
            for node in nodes:
                if node.parallel == size and node.state is NodeState.RELEASED:
                    self._wake(node)

    def _wake(self, node: Node) -> None:
        """Order a node to sample, or to start its engine and sleep again."""
        if self._starting and not self._is_to_start(node):
            return
        self._started[node.name] = node.incarnation
        self._turns.wake(node)
        if self._starting:
            self._turns.sleep(node)

    @property
    def _samples(self) -> bool:
        round, nodes = self._table.round, self._nodes.values()
        is_open = round is not None and round.state not in CLOSED
        return is_open and any(n.state is NodeState.READY for n in nodes)

    def _size_to_start(self) -> int:
        """Return the size whose engines start now, 0 = none: while nothing is sampled, the largest
        with an engine that has not started yet, until the last of them sleeps again."""
        nodes = self._nodes.values()
        if any(n.parallel == self._starting and n.state is NodeState.RELEASING for n in nodes):
            return self._starting
        if self._samples:
            return 0
        sizes = (n.parallel for n in nodes if n.parallel != self.size and self._is_to_start(n))
        return max(sizes, default=0)

    def _is_to_start(self, node: Node) -> bool:
        """Return whether the node reported that it has no engine yet and was not ordered to start
        one."""
        is_known = node.reported_at is not None and not node.device
        was_ordered = self._started.get(node.name) == node.incarnation
        return is_known and not was_ordered and node.state is not NodeState.DRAINING

    def _replace_missing(self, now: float) -> None:
        """Change to the nearest size present if no node of this size joins in time."""
        present = self._present()
        if self.size in present or not present:
            self._none_since = None
        elif self._none_since is None:
            self._none_since = now
        elif self._is_late(now):
            size = min(present, key=lambda s: (max(s, self.size) / min(s, self.size), s))
            self._outbox.warn(f"no engine of {self.size} devices is there: those of {size} work")
            self._change_to(size)
