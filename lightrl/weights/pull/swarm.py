"""Choose bucket and source of each request, so that nodes that pull the same version relay it to
each other.

Pure: owns the state of each source, and no socket, thread or clock. Buckets are bits of an int.

The last source is the origin, which has all buckets and serves all nodes. A node requests only
buckets from it that no peer has or is receiving, with one stream while peers are active. Buckets of
peers are requested in random order, those that a single peer has first. A transfer that stalls, or
is much slower than another source would be, is stolen: another stream requests its bucket.
"""

from dataclasses import dataclass
from random import Random

EVERYTHING = -1  # all bits
PATIENCE_S = 1.0  # wait for a queue, for buckets that peers are receiving, and for their reports
STALL_S = 0.6  # time without a byte after which a bucket is requested from another source
SLOW = 4.0  # a transfer is stolen if another source would be this many times faster
DEFAULT_RATE = 16e6  # bytes/s of a source that was not measured
MAX_PENALTY_S = 8.0
MAX_REFUSALS = 3  # consecutive refusals after which a source is dropped


@dataclass(slots=True, eq=False)
class PullSource:
    """The state of a source, as one node stores it."""

    node: str
    addresses: tuple[tuple[str, int], ...]
    ticket: bytes
    has: int = 0  # verified buckets
    getting: int = 0  # buckets that the source is receiving
    is_known: bool = False  # the source has reported its buckets
    had_all: bool = False  # a request for its buckets that is queued then means: version dropped
    news_at: float = 0.0  # time at which the source was added or last reported a change
    num_streams: int = 0  # streams with a request to the source
    rate: float = DEFAULT_RATE  # bytes/s of the last bucket
    failures: int = 0  # consecutive
    refusals: int = 0  # consecutive
    paused_until: float = 0.0
    is_bad: bool = False  # the source sent wrong bytes

    @property
    def is_dropped(self) -> bool:
        return self.is_bad or self.refusals >= MAX_REFUSALS

    def is_usable(self, now: float) -> bool:
        return not self.is_dropped and now >= self.paused_until

    def pause(self, now: float, seconds: float) -> None:
        self.paused_until = max(self.paused_until, now + seconds)


@dataclass(slots=True, eq=False)
class BucketTransfer:
    """The transfer of one bucket from one source."""

    source: PullSource
    bucket: int
    size: int
    begun_at: float
    last_at: float  # time at which the last bytes arrived
    received: int = 0
    is_queued: bool = False  # the source serves other nodes first
    is_stolen: bool = False

    def rate(self, now: float) -> float:
        return self.received / max(now - self.begun_at, 1e-3)


class SourceChoice:
    def __init__(self, num_buckets: int, seed: int, streams: int) -> None:
        """`seed` differs between nodes, so that they request different buckets."""
        self.num_buckets = num_buckets
        self.todo = (1 << num_buckets) - 1  # buckets that are neither here nor in flight
        self.sources: list[PullSource] = []  # the origin last
        self._streams = streams
        self.in_flight: set[BucketTransfer] = set()
        self._random = Random(seed)
        self._num_stolen: dict[int, int] = {}  # by bucket
        self._typical_s = 0.0  # duration of the transfer of a bucket

    def choose(self, now: float) -> tuple[PullSource, int] | None:
        """Return source and bucket of the next request, or None. The caller calls `begin`."""
        if not self.todo or not self.sources:
            return None
        *peers, origin = self.sources
        usable = [s for s in peers if s.is_usable(now)]
        fresh = self.todo & origin.has & ~self._of_peers(usable, now)
        limit = 1 if self.num_active_peers(now) else self._streams
        if fresh and origin.is_usable(now) and origin.num_streams < limit:
            return origin, self._any(fresh)
        usable.sort(key=lambda s: (s.num_streams, self._random.random()))
        once = twice = 0  # buckets that at least one peer has, and at least two
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
        """End a transfer; unless the bucket is whole, `choose` may return it again."""
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
        """Mark a transfer as stolen: another source sends its bucket. Pause a slow source."""
        source = transfer.source
        transfer.is_stolen = True
        self._num_stolen[transfer.bucket] = self._num_stolen.get(transfer.bucket, 0) + 1
        if not transfer.is_queued:  # a source that serves other nodes first is not slow
            source.failures += 1
            source.pause(now, min(MAX_PENALTY_S, 2.0 ** (source.failures - 1)))
            source.rate = transfer.rate(now)

    def is_overdue(self, transfer: BucketTransfer, now: float) -> bool:
        """Return whether another source would send the bucket much sooner."""
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
        """Return the number of peers that are pulling the version as well."""
        since = now - self._patience_s(now)
        return sum(s.news_at > since and not s.failures for s in self.sources[:-1])

    def _of_peers(self, peers: list[PullSource], now: float) -> int:
        """Return the buckets that `peers` have or will have soon."""
        mask = 0
        for s in peers:
            mask |= s.has
            if now - s.news_at < self._patience_s(now):
                mask |= s.getting
        return mask

    def _patience_s(self, now: float) -> float:
        """Return how long to wait for peers: a slow line of this node is slow for them, too."""
        begun_at = min((t.begun_at for t in self.in_flight), default=now)
        return max(PATIENCE_S, 4 * self._typical_s, 2 * (now - begun_at))

    def _any(self, buckets: int) -> int:
        """Return the first of `buckets` from a random position on. A slow peer from which nodes
        request the same buckets in the same order would send each of them to all nodes."""
        start = self._random.randrange(self.num_buckets)
        buckets = buckets >> start << start or buckets
        return (buckets & -buckets).bit_length() - 1
