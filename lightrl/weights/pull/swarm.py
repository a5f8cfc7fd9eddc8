"""Which bucket a node asks of which source: the rules by which nodes that pull the same version
relay it to each other.

Pure: owns the state of each source, and no socket, thread or clock. Buckets are bits of an int.

The last source is the origin, which has everything and serves everybody: it is asked only for
buckets that no peer has or is getting, and by one stream of each node while peers are active.
Buckets of peers are asked for in random order, those that a single peer has first. A transfer that
stalls, or is much slower than another source would be, is stolen: another stream asks for its
bucket.
"""

from dataclasses import dataclass
from random import Random

EVERYTHING = -1  # all bits
PATIENCE_S = 1.0  # for a queue, for what peers are getting, and for news of them
STALL_S = 0.6  # without a byte, after which a bucket is asked of another source
SLOW = 4.0  # a transfer is stolen if another source would be so many times faster
DEFAULT_RATE = 16e6  # bytes/s of a source that was not measured
MAX_PENALTY_S = 8.0
MAX_REFUSALS = 3  # in a row, before a source is dropped


@dataclass(slots=True, eq=False)
class PullSource:
    """The state of a source, at one node."""

    node: str
    addresses: tuple[tuple[str, int], ...]
    ticket: bytes
    has: int = 0  # buckets
    getting: int = 0  # buckets on their way to it
    is_known: bool = False  # it has reported what it has
    had_all: bool = False  # so it has dropped the version if it queues a question for it
    news_at: float = 0.0  # when it was added, or last reported a change
    num_streams: int = 0  # that ask it
    rate: float = DEFAULT_RATE  # bytes/s of the last bucket
    failures: int = 0  # in a row
    refusals: int = 0  # in a row
    paused_until: float = 0.0
    is_bad: bool = False  # sent wrong bytes

    @property
    def is_dropped(self) -> bool:
        return self.is_bad or self.refusals >= MAX_REFUSALS

    def is_usable(self, now: float) -> bool:
        return not self.is_dropped and now >= self.paused_until

    def pause(self, now: float, seconds: float) -> None:
        self.paused_until = max(self.paused_until, now + seconds)


@dataclass(slots=True, eq=False)
class BucketTransfer:
    """One bucket that is asked of one source."""

    source: PullSource
    bucket: int
    size: int
    begun_at: float
    last_at: float  # when the last bytes arrived
    received: int = 0
    is_queued: bool = False  # the source sends to others first
    is_stolen: bool = False

    def rate(self, now: float) -> float:
        return self.received / max(now - self.begun_at, 1e-3)


class SourceChoice:
    def __init__(self, num_buckets: int, seed: int, streams: int) -> None:
        """`seed`: differs between the nodes, so that they ask for different buckets."""
        self.num_buckets = num_buckets
        self.todo = (1 << num_buckets) - 1  # neither here nor in flight
        self.sources: list[PullSource] = []  # the origin last
        self._streams = streams
        self.in_flight: set[BucketTransfer] = set()
        self._random = Random(seed)
        self._num_stolen: dict[int, int] = {}  # by bucket
        self._typical_s = 0.0  # that a bucket takes

    def choose(self, now: float) -> tuple[PullSource, int] | None:
        """Return what to ask of which source next, or None for nothing. The caller begins it."""
        if not self.todo or not self.sources:
            return None
        *peers, origin = self.sources
        usable = [s for s in peers if s.is_usable(now)]
        fresh = self.todo & origin.has & ~self._of_peers(usable, now)
        limit = 1 if self.num_active_peers(now) else self._streams
        if fresh and origin.is_usable(now) and origin.num_streams < limit:
            return origin, self._any(fresh)
        usable.sort(key=lambda s: (s.num_streams, self._random.random()))
        once = twice = 0  # buckets that one peer has, and two
        for s in usable:
            twice |= once & s.has
            once |= s.has
        for s in usable:
            if theirs := self.todo & s.has:
                return s, self._any(theirs & ~twice or theirs)
        return None

    def begin(self, source: PullSource, bucket: int, size: int, now: float) -> BucketTransfer:
        self.todo &= ~(1 << bucket)
        source.num_streams += 1
        transfer = BucketTransfer(source, bucket, size, now, now)
        self.in_flight.add(transfer)
        return transfer

    def end(self, transfer: BucketTransfer, now: float, *, is_whole: bool) -> None:
        """A transfer has ended; unless the bucket is whole, it is to be asked for again."""
        source = transfer.source
        source.num_streams -= 1
        self.in_flight.discard(transfer)
        if is_whole:
            self._typical_s = 0.75 * self._typical_s + 0.25 * (now - transfer.begun_at)
            source.rate = transfer.rate(now)
        else:
            self.todo |= 1 << transfer.bucket
        if transfer.received and not transfer.is_stolen:
            source.failures = source.refusals = 0

    def steal(self, transfer: BucketTransfer, now: float) -> None:
        """Another source is to send the bucket; the slow one is not asked for a while."""
        source = transfer.source
        transfer.is_stolen = True
        self._num_stolen[transfer.bucket] = self._num_stolen.get(transfer.bucket, 0) + 1
        if not transfer.is_queued:  # else it is not slow: it sends to others first
            source.failures += 1
            source.pause(now, min(MAX_PENALTY_S, 2.0 ** (source.failures - 1)))
            source.rate = transfer.rate(now)

    def is_overdue(self, transfer: BucketTransfer, now: float) -> bool:
        """Whether another source would send the bucket much sooner."""
        rates = [
            s.rate
            for s in self.sources
            if s is not transfer.source and s.is_usable(now) and s.has >> transfer.bucket & 1
        ]
        if not rates or transfer.is_stolen:
            return False
        patience = 2.0 ** min(5, self._num_stolen.get(transfer.bucket, 0))
        if transfer.is_queued:
            return now - transfer.begun_at > max(PATIENCE_S, 2 * self._typical_s) * patience
        if now - transfer.last_at > STALL_S * patience:
            return True
        if now - transfer.begun_at < max(STALL_S, 2 * self._typical_s) * patience:
            return False
        rest_s = (transfer.size - transfer.received) / max(transfer.rate(now), 1.0)
        return rest_s > SLOW * transfer.size / max(rates)

    def num_active_peers(self, now: float) -> int:
        """The number of peers that pull the version as well."""
        since = now - self._patience_s(now)
        return sum(s.news_at > since and not s.failures for s in self.sources[:-1])

    def _of_peers(self, peers: list[PullSource], now: float) -> int:
        """The buckets that peers have, or will have soon."""
        mask = 0
        for s in peers:
            mask |= s.has
            if now - s.news_at < self._patience_s(now):
                mask |= s.getting
        return mask

    def _patience_s(self, now: float) -> float:
        """A line that is slow for this node is slow for others."""
        begun_at = min((t.begun_at for t in self.in_flight), default=now)
        return max(PATIENCE_S, 4 * self._typical_s, 2 * (now - begun_at))

    def _any(self, buckets: int) -> int:
        """The first of these buckets from a random place on. If nodes asked a slow peer for the
        same buckets in the same order, it would send each of them to all."""
        start = self._random.randrange(self.num_buckets)
        buckets = buckets >> start << start or buckets
        return (buckets & -buckets).bit_length() - 1
