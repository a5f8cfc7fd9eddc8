"""How many devices an engine spans in the next round: the parallelism planner, pure.

The same devices can work as many small engines or as few large ones. A large engine holds the
weights once where several small ones hold them each, so more is left for the KV cache; but its
devices exchange activations, and where nothing is preempted small engines do more. The rule is
RollPacker's (arXiv 2509.21009, section 4.2), with a memory for each kind of round:

    preemptions > 1.05 x those of the last round of the kind   ->  twice the size
    none in four of them                                        ->  half the size

Two things are added. A size whose caches cannot hold what the last round of the kind held at once
is skipped. And seconds for a token are measured: a size at which rounds of the kind were slower is
left again, and not tried for a while. Where nothing is preempted, and half the size is slower or
there is none, twice the size is tried for one round, and kept if it is faster: where a few long
responses decide, a large engine is faster without any preemption.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

MORE_PREEMPTIONS = 1.05  # than in the last round of the kind: twice the size
QUIET_ROUNDS = 4  # without any: half the size
KV_SHARE = 0.95  # of the caches that may be planned with
SLOWER = 1.02  # seconds for a token, against another size: it is slower
TRIED_AGAIN = 32  # rounds of the kind after which a size that was slower may be tried once more
CHANCES = 2  # rounds in which a size must have been slower: the first may be slow for other reasons
REMEMBERED = 3  # rounds; the fastest of them counts


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round that has closed."""

    kind: str
    # of its engines
    size: int
    preemptions: int
    # until it closed
    seconds: float
    # that were sampled in it
    num_tokens: int
    # the most that its responses held at once, prompts included
    kv_tokens: int


@dataclass(slots=True)
class KindMemory:
    """What is stored of one kind of round."""

    size: int
    # in the last one; and rounds since then without any
    preemptions: int = 0
    quiet: int = 0
    num_rounds: int = 0
    kv_tokens: int = 0
    # by size: seconds for a token in the last rounds, and the number of the last one
    pace: dict[int, tuple[tuple[float, ...], int]] = field(
        default_factory=dict[int, tuple[tuple[float, ...], int]]
    )
    # the size before this one, which is tried only; 0 = it is not
    tried_from: int = 0


@dataclass(frozen=True, slots=True)
class PlannerMemory:
    """What outlives the coordinator. Example: PlannerMemory({"long": KindMemory(4)}, {1: 9000})"""

    kinds: dict[str, KindMemory] = field(default_factory=dict[str, KindMemory])
    # by size: tokens of all caches
    caches: dict[int, int] = field(default_factory=dict[int, int])
    # of the engines that are awake; 0 = unknown
    size: int = 0


class Planner:
    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` in devices of an engine, each a multiple of the one before; a kind of round
        begins with the first."""
        self._sizes = tuple(sizes)
        self._kinds: dict[str, KindMemory] = {}
        self._caches: dict[int, int] = {}

    def size_for(self, kind: str) -> int:
        """Return the size of the engines for the next round, which is of this kind."""
        memory = self._kinds.get(kind)
        if memory is None:
            return self._sizes[0]
        larger = self._with_room(memory.size, memory.kv_tokens)
        return memory.size if self._is_slow(memory, larger, memory.size) else larger

    def learn(self, round: PlannedRound) -> None:
        """Decide on the size for the next round of this kind."""
        memory = self._kinds.setdefault(round.kind, KindMemory(round.size))
        if memory.size != round.size:
            memory.size, memory.quiet, memory.tried_from = round.size, 0, 0
        memory.num_rounds += 1
        memory.kv_tokens = round.kv_tokens
        self._time(memory, round)
        grows = round.preemptions > MORE_PREEMPTIONS * memory.preemptions
        memory.quiet = 0 if round.preemptions else memory.quiet + 1
        memory.preemptions = round.preemptions
        tried_from, memory.tried_from = memory.tried_from, 0
        if tried_from and not self._is_slow(memory, tried_from, memory.size, chances=1):
            memory.size, memory.quiet = tried_from, 0
        elif (better := self._better(memory)) is not None:
            memory.size, memory.quiet = better, 0
        elif grows:
            self._grow(memory)
        elif memory.quiet:
            self._look_around(memory)

    def set_caches(self, size: int, num_tokens: int) -> None:
        """Store how many tokens all engines of a size hold; 0 = unknown."""
        if num_tokens:
            self._caches[size] = num_tokens

    # What outlives the coordinator

    def memory(self) -> PlannerMemory:
        kinds = {kind: replace(m, pace=dict(m.pace)) for kind, m in self._kinds.items()}
        return PlannerMemory(kinds, dict(self._caches))

    def recall(self, memory: PlannerMemory) -> None:
        """Take over what was stored, without sizes that the run has no more."""
        kinds = memory.kinds.items()
        self._kinds = {k: replace(m, pace=dict(m.pace)) for k, m in kinds if m.size in self._sizes}
        self._caches = {size: n for size, n in memory.caches.items() if size in self._sizes}

    # Decisions

    def _grow(self, memory: KindMemory) -> None:
        larger = self._above(memory.size)
        if larger is None or self._is_slow(memory, larger, memory.size):
            return
        here, there = self._caches.get(memory.size), self._caches.get(larger)
        if here is None or there is None or there > here:
            memory.size, memory.quiet = larger, 0

    def _look_around(self, memory: KindMemory) -> None:
        """Try a neighbouring size after a round without preemptions."""
        size = memory.size
        smaller, larger = self._below(size), self._above(size)
        is_best = smaller is None or self._is_slow(memory, smaller, size, chances=1)
        if larger is not None and is_best and not self._is_known(memory, larger):
            memory.size, memory.tried_from, memory.quiet = larger, size, 0
        elif memory.quiet >= QUIET_ROUNDS:
            memory.quiet = 0
            if smaller is not None and not self._is_slow(memory, smaller, size):
                memory.size, memory.preemptions = smaller, 0  # unless it has no room: `size_for`

    def _with_room(self, size: int, needed: float) -> int:
        """Return the size, or the next larger one that holds `needed` tokens; the size itself if
        none does. Caches of unknown size hold everything."""
        for fitting in sorted(s for s in self._sizes if s >= size):
            cache = self._caches.get(fitting)
            if cache is None or needed <= KV_SHARE * cache:
                return fitting
        return size

    def _better(self, memory: KindMemory) -> int | None:
        """Return the neighbouring size at which rounds of the kind were faster."""
        size = memory.size
        beside = [s for s in (self._below(size), self._above(size)) if s is not None]
        faster = [s for s in beside if self._is_slow(memory, size, s, chances=1)]
        return min(faster, key=lambda s: min(memory.pace[s][0]), default=None)

    def _is_slow(
        self, memory: KindMemory, size: int | None, than: int, chances: int = CHANCES
    ) -> bool:
        """Return whether a token takes longer at this size, if both were measured lately."""
        if size is None or not (self._is_known(memory, size) and self._is_known(memory, than)):
            return False
        mine, others = memory.pace[size][0], memory.pace[than][0]
        return len(mine) >= chances and min(mine) > SLOWER * min(others)

    def _is_known(self, memory: KindMemory, size: int) -> bool:
        measured = memory.pace.get(size)
        return measured is not None and memory.num_rounds - measured[1] < TRIED_AGAIN

    def _time(self, memory: KindMemory, round: PlannedRound) -> None:
        if round.num_tokens and round.seconds > 0:
            before = memory.pace[round.size][0] if self._is_known(memory, round.size) else ()
            paces = (*before, round.seconds / round.num_tokens)[-REMEMBERED:]
            memory.pace[round.size] = paces, memory.num_rounds

    def _above(self, size: int) -> int | None:
        return next((s for s in self._sizes if s > size), None)

    def _below(self, size: int) -> int | None:
        return next((s for s in reversed(self._sizes) if s < size), None)
