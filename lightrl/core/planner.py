"""How many devices an engine spans in the next round: the parallelism planner, pure.

The same devices can work as many small engines or as few large ones. A large engine holds the
weights once where several small ones hold them each, so more is left for the KV cache; but what its
devices say to each other takes time, and where nothing is preempted small ones do more. The rule is
RollPacker's (arXiv 2509.21009, section 4.2), and each kind of round has a memory of its own:

    preemptions > 1.05 x those of the last round of the kind   ->  twice the size
    none in four of them                                        ->  half the size

Added to it is what can be known. A size whose caches cannot hold what the round will need is not
waited for until it preempts, nor gone back to: a round needs the most that its responses held at
once in the last one of its kind, or what is foreseen of it. Which size is faster is measured: one
at which rounds of the kind took longer for a token is left again, and not tried for a while. A full
cache says what is short, not what is faster; and where a few long responses decide, a large engine
is faster without any preemption. So where nothing is preempted, and half the size is slower or
there is none, twice the size is tried for a round, and kept if it is faster.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

MORE_PREEMPTIONS = 1.05  # than in the last round of the kind: twice the size
QUIET_ROUNDS = 4  # without any: half the size
KV_SHARE = 0.95  # of the caches that may be planned with
SLOWER = 1.02  # seconds for a token, against another size: it is slower
TRIED_AGAIN = 32  # rounds of the kind after which a size that was slower may be tried once more
CHANCES = 2  # rounds in which a size must have been slower: the first may be slow for other reasons
LEAST = 0.5  # of what is expected, a round takes
# A size is tried if it is expected to take no more than the fastest and this share of what is
# unexplained, at most so much more.
UNSURE, MOST_TRIED = 0.25, 0.1
BELIEVED = 0.5  # of the last round, against those before
REMEMBERED = 3  # rounds; the fastest of them counts, since something may always come in between


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """What a round has come to."""

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
    # of some of its responses, longest first, and how many there were
    lengths: tuple[int, ...] = ()
    num_responses: int = 0
    # what one with these lengths takes by the engines' own costs, 0 = they do not say
    expected_s: float = 0.0


@dataclass(slots=True)
class KindMemory:
    """What is remembered of one kind of round."""

    size: int
    # in the last one; and how many have gone by without any
    preemptions: int = 0
    quiet: int = 0
    num_rounds: int = 0
    kv_tokens: int = 0
    # by size: seconds for a token in the last rounds, and which round was the last one
    pace: dict[int, tuple[tuple[float, ...], int]] = field(
        default_factory=dict[int, tuple[tuple[float, ...], int]]
    )
    # the size before this one, which is tried only; 0 = it is not
    tried_from: int = 0
    # of the last round, see `PlannedRound`
    lengths: tuple[int, ...] = ()
    num_responses: int = 0
    # by size: seconds that the last rounds took beyond what was expected of them
    over: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True, slots=True)
class PlannerMemory:
    """As it outlives the coordinator. Example: PlannerMemory({"long": KindMemory(4)}, {1: 9000})"""

    kinds: dict[str, KindMemory] = field(default_factory=dict[str, KindMemory])
    # by size: tokens of all caches
    caches: dict[int, int] = field(default_factory=dict[int, int])
    # of the engines that are awake; 0 = not known
    size: int = 0


def peak_kv(lengths: Iterable[float], slots: int) -> float:
    """The most tokens that responses hold at once which begin together and end with `lengths`,
    prompts included, at most `slots` of them at a time, the longest first."""
    longest = sorted(lengths, reverse=True)
    return max((min(k, slots) * n for k, n in enumerate(longest, 1)), default=0.0)


class Planner:
    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` in devices of an engine, each a multiple of the one before; a kind of round
        begins with the first."""
        self._sizes = tuple(sizes)
        self._kinds: dict[str, KindMemory] = {}
        self._caches: dict[int, int] = {}

    def size_for(
        self,
        kind: str,
        foreseen_kv: float = 0.0,
        expected_s: Mapping[int, float] = MappingProxyType({}),
    ) -> int:
        """Of the engines of the next round, of this kind. `foreseen_kv`: the most that its
        responses will hold at once, as far as that is foreseen; it counts until one was seen.
        `expected_s`: what it takes engines of each size, if all of them have said what their steps
        cost; then that decides."""
        memory = self._kinds.get(kind)
        if expected_s:
            return self._fastest(memory, expected_s)
        size = memory.size if memory is not None else self._sizes[0]
        needed = memory.kv_tokens if memory is not None else foreseen_kv
        larger = self._with_room(size, needed)
        return size if memory is not None and self._is_slow(memory, larger, size) else larger

    def learn(self, round: PlannedRound) -> None:
        """From a round that has closed; it decides on the size of the next one of its kind."""
        memory = self._kinds.setdefault(round.kind, KindMemory(round.size))
        if memory.size != round.size:
            memory.size, memory.quiet, memory.tried_from = round.size, 0, 0
        memory.num_rounds += 1
        memory.kv_tokens = round.kv_tokens
        self._time(memory, round)
        memory.lengths, memory.num_responses = round.lengths, round.num_responses
        if round.expected_s and round.seconds > 0:
            over = round.seconds - round.expected_s
            before = memory.over.get(round.size, over)
            memory.over[round.size] = BELIEVED * over + (1 - BELIEVED) * before
            memory.preemptions, memory.quiet, memory.tried_from = round.preemptions, 0, 0
            return  # what it takes decides, not the rule
        grows = round.preemptions > MORE_PREEMPTIONS * memory.preemptions
        memory.quiet = 0 if round.preemptions else memory.quiet + 1
        memory.preemptions = round.preemptions
        tried_from, memory.tried_from = memory.tried_from, 0
        better = self._better(memory)
        if tried_from and not self._is_slow(memory, tried_from, memory.size, chances=1):
            memory.size, memory.quiet = tried_from, 0
        elif better is not None:
            memory.size, memory.quiet = better, 0
        elif grows:
            self._grow(memory)
        elif memory.quiet:
            self._look_around(memory)

    def has_caches(self, size: int, num_tokens: int) -> None:
        """So many tokens fit into all engines of a size; 0 = not known."""
        if num_tokens:
            self._caches[size] = num_tokens

    # What outlives the coordinator

    def memory(self) -> PlannerMemory:
        kinds = {
            kind: replace(m, pace=dict(m.pace), over=dict(m.over))
            for kind, m in self._kinds.items()
        }
        return PlannerMemory(kinds, dict(self._caches))

    def recall(self, known: PlannerMemory) -> None:
        """Sizes that the run has no more are forgotten."""
        mine = Planner(self._sizes)
        mine._kinds, mine._caches = dict(known.kinds), dict(known.caches)
        copy = mine.memory()
        self._kinds = {k: m for k, m in copy.kinds.items() if m.size in self._sizes}
        self._caches = {size: n for size, n in copy.caches.items() if size in self._sizes}

    def lengths(self, kind: str) -> tuple[tuple[int, ...], int]:
        """Of the last round of the kind, see `PlannedRound`; none before the first."""
        memory = self._kinds.get(kind)
        return (memory.lengths, memory.num_responses) if memory is not None else ((), 0)

    # Decisions

    def _fastest(self, memory: KindMemory | None, expected_s: Mapping[int, float]) -> int:
        """The one that is expected to be fastest; not another one than before, unless that saves
        something. What rounds of the kind took beyond that, for scoring and the like, they will
        take at other sizes, too. If so much is unexplained that one of these may be the fastest in
        truth, it is tried for a round, which costs little."""
        over = memory.over if memory is not None else {}
        near = {
            s: min(over, key=lambda t: (abs(math.log(t / s)), t), default=0) for s in expected_s
        }

        def seconds(size: int) -> float:
            return max(LEAST * expected_s[size], expected_s[size] + over.get(near[size], 0.0))

        best = min(expected_s, key=lambda size: (seconds(size), size))
        if memory is None or memory.size not in expected_s:
            return best
        share = abs(over.get(near[best], 0.0)) / seconds(best)
        most = seconds(best) * (1 + min(MOST_TRIED, UNSURE * share))
        untried = [s for s in expected_s if s not in over and seconds(s) < most]
        if untried:
            return min(untried, key=lambda size: (seconds(size), size))
        return best if seconds(memory.size) > SLOWER * seconds(best) else memory.size

    def _grow(self, memory: KindMemory) -> None:
        larger = self._above(memory.size)
        if larger is None or self._is_slow(memory, larger, memory.size):
            return
        here, there = self._caches.get(memory.size), self._caches.get(larger)
        if here is None or there is None or there > here:
            memory.size, memory.quiet = larger, 0

    def _look_around(self, memory: KindMemory) -> None:
        """Nothing was preempted in the last round."""
        size = memory.size
        smaller, larger = self._below(size), self._above(size)
        is_best = smaller is None or self._is_slow(memory, smaller, size, chances=1)
        if larger is not None and is_best and not self._is_known(memory, larger):
            memory.size, memory.tried_from, memory.quiet = larger, size, 0
        elif memory.quiet >= QUIET_ROUNDS:
            memory.quiet = 0
            is_worth = smaller is not None and not self._is_slow(memory, smaller, size)
            if smaller is not None and is_worth:  # unless `size_for` says that it has no room
                memory.size, memory.preemptions = smaller, 0

    def _with_room(self, size: int, needed: float) -> int:
        """This size, or the next larger one into which it fits; the same if it fits into none."""
        fitting = size
        while not self._fits(fitting, needed):
            larger = self._above(fitting)
            if larger is None:
                return size
            fitting = larger
        return fitting

    def _fits(self, size: int, needed: float) -> bool:
        """As far as is known."""
        cache = self._caches.get(size)
        return cache is None or needed <= KV_SHARE * cache

    def _better(self, memory: KindMemory) -> int | None:
        """The size beside this one at which rounds of the kind were faster than they are now."""
        size = memory.size
        beside = [s for s in (self._below(size), self._above(size)) if s is not None]
        faster = [s for s in beside if self._is_slow(memory, size, s, chances=1)]
        return min(faster, key=lambda s: min(memory.pace[s][0]), default=None)

    def _is_slow(
        self, memory: KindMemory, size: int | None, than: int, chances: int = CHANCES
    ) -> bool:
        """Whether a token takes longer at this size, as far as both were measured of late."""
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
