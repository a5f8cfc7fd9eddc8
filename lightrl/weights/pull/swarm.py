"""Which bucket a puller asks of whom: the rules by which many who pull the same version help each
other.

Pure: owns what is known of each source, and no socket, thread or clock. Buckets are bits of an int.

The last source is the origin, which has everything and must serve everybody: it is asked for what
no other has or is getting, and one stream of each puller is enough to feed a swarm. What others
have is asked of them, the rare first, among those at random. Each puller begins elsewhere in the
file, so that those who begin together bring different buckets into the swarm.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

EVERYTHING = -1  # all bits
PATIENCE_S = 1.0  # for what others are getting, and for news of them
STALL_S = 0.6  # without a byte, after which others are asked for what a source owes
RATED_S = 5.0  # a rate measured longer ago says nothing
SLOW = 4.0  # so many times slower than another would be: it shall have the rest of a bucket
USELESS = 16.0  # so many times slower than the best is not asked; lines are shared by many at times
DEFAULT_RATE = 16e6  # bytes/s of a stream, of a source that has not been asked yet
MAX_PENALTY_S = 8.0
MAX_REFUSALS = 3  # in a row, before a source is given up
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, however many


@dataclass(slots=True, eq=False)
class Source:
    """A holder as one puller knows it."""

    node: str
    addresses: tuple[tuple[str, int], ...]
    ticket: bytes
    added_at: float
    has: int = 0  # buckets that it is known to have
    is_known: bool = False  # it has said what it has
    is_followed: bool = False  # and will say what changes
    getting: dict[int, float] = field(default_factory=dict)  # since when
    news_at: float = -1e9
    num_streams: int = 0  # at work with it
    max_streams: int = 1 << 16
    rate: float = 0.0  # bytes/s of a stream; 0 = not measured
    rated_at: float = -1e9
    failures: int = 0  # in a row
    refusals: int = 0  # in a row
    paused_until: float = -1e9
    is_bad: bool = False  # sent wrong bytes
    is_starved: bool = False  # it was our turn, and nothing came

    @property
    def is_lost(self) -> bool:
        return self.is_bad or self.refusals >= MAX_REFUSALS

    def can_be_asked(self, now: float) -> bool:
        return not self.is_lost and now >= self.paused_until and self.num_streams < self.max_streams

    def rate_at(self, now: float) -> float:
        return self.rate if now - self.rated_at < RATED_S else 0.0

    def pause(self, now: float, seconds: float) -> None:
        self.paused_until = max(self.paused_until, now + seconds)


@dataclass(slots=True, eq=False)
class Transfer:
    """One bucket asked of one source."""

    source: Source
    bucket: int
    size: int
    begun_at: float
    received: int  # of the bucket, by whomever
    received_before: int
    last_at: float  # when something came
    is_queued: bool = False  # its source sends to others now
    is_left: bool = False  # somebody else is to have it

    def rate(self, now: float) -> float:
        return (self.received - self.received_before) / max(now - self.begun_at, 1e-3)


class Swarm:
    def __init__(self, num_buckets: int, order: int, streams: int) -> None:
        """`order`: which of the pullers this is; numbers that follow each other are best."""
        self.num_buckets = num_buckets
        self.todo = (1 << num_buckets) - 1  # neither proved nor asked for
        self.sources: list[Source] = []  # as they should be asked, the origin last
        self._start = int(order * _GOLDEN % 1 * num_buckets)
        self._streams = streams
        self._transfers: set[Transfer] = set()  # under way
        self._random = Random(order)  # so that not all ask the same one
        self._left: dict[int, int] = {}  # how often a bucket was asked of another
        self._origin_s = 0.0  # what its last bucket took
        self._typical_s = 0.0  # what buckets take at present

    def choose(self, now: float) -> tuple[Source, int] | None:
        """What to ask of whom next; None = nothing for now. The caller begins it."""
        if not self.todo or not self.sources:
            return None
        origin = self.sources[-1]
        usable = [s for s in self.sources if s.can_be_asked(now)]
        best = max((s.rate_at(now) for s in usable), default=0.0)
        peers = [s for s in usable if s is not origin]
        quick = [s for s in peers if not 0 < s.rate_at(now) < best / USELESS]
        fresh = self.todo & origin.has & ~self._spoken_for(quick, now)
        if fresh and origin in usable and origin.num_streams < self._share(now):
            return origin, self._first(fresh)
        slow = [s for s in peers if s not in quick]
        return self._choose_of(quick) or self._choose_of(slow)

    def begin(self, source: Source, bucket: int, size: int, received: int, now: float) -> Transfer:
        self.todo &= ~(1 << bucket)
        source.num_streams += 1
        transfer = Transfer(source, bucket, size, now, received, received, now)
        self._transfers.add(transfer)
        return transfer

    def end(self, transfer: Transfer, now: float, *, is_whole: bool) -> None:
        """It is not under way any more; unless it is whole, somebody must have it again."""
        source = transfer.source
        source.num_streams -= 1
        self._transfers.discard(transfer)
        received = transfer.received - transfer.received_before
        if is_whole:
            self._left.pop(transfer.bucket, None)
            rate, seconds = transfer.rate(now), now - transfer.begun_at
            self._typical_s = 0.75 * self._typical_s + 0.25 * seconds
            source.rate = (source.rate_at(now) + rate) / (2 if source.rate_at(now) else 1)
            source.rated_at = now
            if source is self.sources[-1]:
                self._origin_s = seconds
        else:
            self.todo |= 1 << transfer.bucket
        if received and not transfer.is_left:
            source.failures = source.refusals = 0

    def leave(self, transfer: Transfer, now: float) -> None:
        """Somebody else is to have it: whoever is slow is not asked for a while."""
        source = transfer.source
        transfer.is_left = True
        self._left[transfer.bucket] = self._left.get(transfer.bucket, 0) + 1
        if transfer.is_queued:
            return  # it is not slow, others are before us
        source.failures += 1
        source.pause(now, min(MAX_PENALTY_S, 2.0 ** (source.failures - 1)))
        source.rate, source.rated_at = transfer.rate(now) or 1.0, now

    def is_overdue(self, transfer: Transfer, now: float) -> bool:
        """Whether somebody else would be done with the rest much sooner."""
        others = [
            s
            for s in self.sources
            if s is not transfer.source and s.can_be_asked(now) and s.has >> transfer.bucket & 1
        ]
        if not others or transfer.is_left:
            return False
        patience = 2.0 ** min(5, self._left.get(transfer.bucket, 0))
        if now - transfer.last_at > STALL_S * patience and not transfer.is_queued:
            return True
        least_s = PATIENCE_S if transfer.is_queued else STALL_S
        if now - transfer.begun_at < max(least_s, 2 * self._typical_s) * patience:
            return False
        other = max(s.rate_at(now) or DEFAULT_RATE for s in others)
        rest_s = (transfer.size - transfer.received) / max(transfer.rate(now), 1.0)
        factor = SLOW if self.todo else SLOW / 2  # nothing else is left to do
        return rest_s > factor * (transfer.size - transfer.received) / other + 0.25

    def _choose_of(self, peers: list[Source]) -> tuple[Source, int] | None:
        """Of the least busy one what the fewest have: that is asked of those few for longest."""
        once = twice = thrice = 0  # buckets that so many have
        for s in peers:
            thrice |= twice & s.has
            twice |= once & s.has
            once |= s.has
        best: tuple[tuple[int, int, float], Source, int] | None = None
        for s in peers:
            if not (theirs := self.todo & s.has):
                continue
            levels = (theirs & ~twice, theirs & ~thrice, theirs)
            level = next(k for k, buckets in enumerate(levels) if buckets)
            key = (s.num_streams, level, self._random.random())
            if best is None or key < best[0]:
                best = key, s, levels[level]
        return None if best is None else (best[1], self._any(best[2]))

    def _spoken_for(self, peers: Iterable[Source], now: float) -> int:
        """What those have, or will soon."""
        mask = 0
        for s in peers:
            mask |= s.has
            if s.getting and now - min(s.getting.values()) < self._patience_s(now):
                for bucket in s.getting:
                    mask |= 1 << bucket
        return mask

    def num_others(self, now: float) -> int:
        """Who are at it as well, as far as we know."""
        since = now - self._patience_s(now)
        return sum(max(s.news_at, s.added_at) > since and not s.failures for s in self.sources[:-1])

    def _share(self, now: float) -> int:
        """Streams to the origin: fewer where others get what we do not."""
        return max(1, self._streams // (1 + self.num_others(now)))

    def _patience_s(self, now: float) -> float:
        """A line that is slow for us is slow for others."""
        origin = self.sources[-1]
        begun_at = min((t.begun_at for t in self._transfers if t.source is origin), default=now)
        return max(PATIENCE_S, 2 * self._origin_s, 2 * (now - begun_at), 4 * self._typical_s)

    def _first(self, buckets: int) -> int:
        """The next one from where this puller has begun."""
        return _next(buckets, self._start)

    def _any(self, buckets: int) -> int:
        """Not the one that others ask for: a slow peer that sends each bucket once is relayed, one
        that is asked by all for the same in the same order sends each to all of them."""
        return _next(buckets, self._random.randrange(self.num_buckets))


def _next(buckets: int, start: int) -> int:
    """The first bucket from `start` on; after the last comes the first."""
    later = buckets >> start << start
    buckets = later or buckets
    return (buckets & -buckets).bit_length() - 1
