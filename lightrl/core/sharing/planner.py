"""Plan how many devices an engine spans in the next round. Pure.

The same devices can run many small engines or few large ones. A large engine stores the weights
once where several small ones store a copy each, which leaves more memory for the KV cache; but its
devices exchange activations, and without preemptions small engines are faster.

If engines have measured the costs of their steps, as RollPacker profiles its engines, sizes are
compared by `round_s`: the seconds that they need for a round like the last one of its kind.
Without costs RollPacker's rule decides (arXiv 2509.21009, section 4.2), for each kind of round:

    preemptions > 1.05 x those of the last round of the kind   ->  twice the size
    none in four of them                                        ->  half the size

A size whose caches are smaller than the peak of the last round of the kind is skipped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightrl.messages.load import StepCosts

MORE_PREEMPTIONS = 1.05  # than in the last round of the kind: twice the size
QUIET_ROUNDS = 4  # without any: half the size
KV_SHARE = 0.95  # of the caches, available to plans
SLOWER = 1.02  # than the best size: worth a change
PRIOR_MEAN = 0.25  # of the longest response, where no length is known
TAIL = 0.5  # of the longest response, left to run when the queue is empty
NEWEST = 0.5  # weight of the last round in the mean excess over the estimate


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Engines of one size. Example: EngineKind(4, 128, 50_000, StepCosts(0.01, 1e-4))."""

    count: int
    # of each: concurrent responses; tokens in its KV cache, 0 = no limit
    slots: int
    kv_tokens: int
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round that has closed."""

    kind: str
    # of its engines
    size: int
    preemptions: int
    # until it closed
    seconds: float
    # peak of the tokens held by its responses, prompts included
    kv_tokens: int
    # of some of its responses, longest first, and how many there were
    lengths: tuple[int, ...] = ()
    num_responses: int = 0
    # estimate for these lengths; 0 = costs are unknown
    expected_s: float = 0.0


@dataclass(slots=True)
class KindMemory:
    """Measurements of one kind of round."""

    size: int
    # in the last one; and rounds since then without any
    preemptions: int = 0
    quiet: int = 0
    kv_tokens: int = 0
    # of the last round, see `PlannedRound`
    lengths: tuple[int, ...] = ()
    num_responses: int = 0
    # mean excess over the estimate: scoring, and whatever else it leaves out
    over_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannerMemory:
    """State in the journal. Example: PlannerMemory({"long": KindMemory(4)}, {1: 9000})"""

    kinds: dict[str, KindMemory] = field(default_factory=dict[str, KindMemory])
    # by size: tokens of all caches
    caches: dict[int, int] = field(default_factory=dict[int, int])
    # of the engines that are awake; 0 = unknown
    size: int = 0


def prior_lengths(count: int, longest: int) -> list[int]:
    """Return assumed lengths: exponentially distributed, cut at the limit, longest first."""
    mean = PRIOR_MEAN * longest
    shares = ((k + 0.5) / count for k in range(count))
    return [max(1, min(longest, round(-mean * math.log(share)))) for share in shares]


def round_s(engines: EngineKind, lengths: Sequence[int], prompt_tokens: int) -> float:
    """Return seconds until responses of these lengths, all waiting at the start, are done.

    The engine with the longest response decides. Each running response gets a token per step; as
    many run concurrently as the cache holds on average.
    """
    mine = sorted(lengths, reverse=True)[:: engines.count]
    if not (tokens := sum(mine)):
        return 0.0
    costs, contexts = engines.costs, sum(n * (prompt_tokens + n / 2) for n in mine)
    slots = float(engines.slots)
    if engines.kv_tokens:
        slots = max(1.0, min(slots, engines.kv_tokens * tokens / contexts))
    steps = float(mine[0])
    if len(mine) > slots:
        steps = max(steps, tokens / slots + TAIL * mine[0])
    computed = prompt_tokens * len(mine)
    return (
        costs.base_s * steps
        + costs.response_s * tokens
        + costs.token_s * contexts
        + costs.prefill_s * computed
    )


class Planner:
    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: devices of an engine, each a multiple of the one before; a kind of round begins
        with the first."""
        self._sizes = tuple(sizes)
        self._kinds: dict[str, KindMemory] = {}
        self._caches: dict[int, int] = {}

    def size_for(self, kind: str, expected_s: Mapping[int, float]) -> int:
        """Return the size of the engines for the next round, of this kind. `expected_s`: seconds
        of the round by size; {} = costs are unknown."""
        memory = self._kinds.get(kind)
        if expected_s:
            return self._fastest(memory, expected_s)
        return self._sizes[0] if memory is None else self._with_room(memory.size, memory.kv_tokens)

    def learn(self, round: PlannedRound) -> None:
        """Store a round; without costs, choose the next size of its kind by RollPacker's rule."""
        memory = self._kinds.setdefault(round.kind, KindMemory(round.size))
        if memory.size != round.size:
            memory.size, memory.quiet = round.size, 0
        memory.kv_tokens = round.kv_tokens
        memory.lengths, memory.num_responses = round.lengths, round.num_responses
        grows = round.preemptions > MORE_PREEMPTIONS * memory.preemptions
        memory.quiet = 0 if round.preemptions else memory.quiet + 1
        memory.preemptions = round.preemptions
        if round.expected_s:
            memory.over_s += NEWEST * (round.seconds - round.expected_s - memory.over_s)
        elif grows:
            self._grow(memory)
        elif memory.quiet >= QUIET_ROUNDS:
            memory.quiet = 0
            if (smaller := self._below(memory.size)) is not None:
                memory.size = smaller  # `size_for` checks that its caches suffice

    def set_caches(self, size: int, num_tokens: int) -> None:
        """Store the tokens that the caches of all engines of a size hold; 0 = unknown."""
        if num_tokens:
            self._caches[size] = num_tokens

    def lengths(self, kind: str) -> tuple[tuple[int, ...], int]:
        """Return the lengths of the last round of the kind, see `PlannedRound`."""
        memory = self._kinds.get(kind)
        return (memory.lengths, memory.num_responses) if memory is not None else ((), 0)

    # What outlives the coordinator

    def memory(self) -> PlannerMemory:
        return PlannerMemory(
            {kind: replace(m) for kind, m in self._kinds.items()}, {**self._caches}
        )

    def recall(self, memory: PlannerMemory) -> None:
        """Restore stored state, without sizes that the run no longer has."""
        kinds = memory.kinds.items()
        self._kinds = {kind: replace(m) for kind, m in kinds if m.size in self._sizes}
        self._caches = {size: n for size, n in memory.caches.items() if size in self._sizes}

    # Decisions

    def _fastest(self, memory: KindMemory | None, expected_s: Mapping[int, float]) -> int:
        """Return the size with the fewest seconds; a change must save a share of the round, its
        excess over the estimate included."""
        best = min(expected_s, key=lambda size: (expected_s[size], size))
        if memory is None or memory.size not in expected_s:
            return best
        over_s = max(0.0, memory.over_s)
        before_s, best_s = expected_s[memory.size] + over_s, expected_s[best] + over_s
        return best if before_s > SLOWER * best_s else memory.size

    def _grow(self, memory: KindMemory) -> None:
        larger = self._above(memory.size)
        here, there = self._caches.get(memory.size), self._caches.get(larger or 0)
        if larger is not None and (here is None or there is None or there > here):
            memory.size, memory.quiet = larger, 0

    def _with_room(self, size: int, needed: float) -> int:
        """Return the smallest size from this one on whose caches hold `needed` tokens; this size if
        none do. Caches of unknown size hold everything."""
        for fitting in sorted(s for s in self._sizes if s >= size):
            cache = self._caches.get(fitting)
            if cache is None or needed <= KV_SHARE * cache:
                return fitting
        return size

    def _above(self, size: int) -> int | None:
        return min((s for s in self._sizes if s > size), default=None)

    def _below(self, size: int) -> int | None:
        return max((s for s in self._sizes if s < size), default=None)
