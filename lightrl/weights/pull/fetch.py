"""The threads of one pull: each asks a source for a bucket, verifies it and writes it.

Owns the connections of the threads, the open file and the count of what is right in it; `swarm.py`
chooses the sources. Must not import torch. Bytes are received, hashed and written by portions that
stay in a core's cache: a mapping's pages would be cleared first, and a full disk is an error here
instead of a signal.
"""

import os
import random
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from lightrl.errors import WeightsError
from lightrl.system.addresses import join_address, split_known
from lightrl.system.files import write_at
from lightrl.weights.machine.local import CHUNK_BYTES, HASH_THREADS
from lightrl.weights.pull.swarm import EVERYTHING, Source, Swarm, Transfer
from lightrl.weights.serve.held import Partial
from lightrl.weights.serve.request import ASK_DATA, ASK_SHARED, BUSY, DATA, MISSING, QUEUED, Request
from lightrl.weights.version.layout import bucket_range
from lightrl.weights.version.manifest import Manifest

if TYPE_CHECKING:  # numpy is loaded with the first delta
    from lightrl.weights.delta.patch import Patch

CONNECT_LIMIT_S = 3.0
IDLE_LIMIT_S = 10.0  # of a connection, however long the pull may take
MAX_PAUSE_S = 2.0  # before a source that fails or is busy is asked again
TICK_S = 0.25  # a thread that receives checks so often whether the pull is over
_TICK = struct.pack("ll", 0, int(TICK_S * 1e6))  # struct timeval

REFUSAL = "closed the connection (wrong ticket, or it no longer holds the version)"
OTHER_PROTOCOL = "does not serve weights as this version does"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to pull, as PublishWeights (or a DeltaOffer) describes it.

    Example: Wanted(4, "9f3a...", num_bytes=2112512, manifest_bytes=8190)
    """

    policy_version: int
    digest: str
    num_bytes: int
    manifest_bytes: int

    def request(self, what: bytes, node: str, source: Source, offset: int, size: int) -> bytes:
        digest = bytes.fromhex(self.digest)
        names = node.encode(), source.ticket
        return Request(what, digest, self.policy_version, offset, size, *names).pack()


def parse_address(address: str) -> tuple[str, int]:
    """The (host, port) of a source. Raises WeightsError for an address without them."""
    if (found := split_known(address)) is None:
        raise WeightsError(f"{address[:80]!r}: a holder looks like host:port")
    return found


class Fetch:
    """What the streams of one pull share. Methods may be called from any thread."""

    def __init__(self, swarm: Swarm, wanted: Wanted, node: str, timeout_s: float) -> None:
        self.swarm = swarm
        self.wanted = wanted
        self.node = node
        self.lock = threading.Condition()
        self.failure: str | None = None  # the first, which ended the pull
        self.bad: deque[tuple[Source, str]] = deque()  # to be reported
        self.verified_bytes = 0
        self.received = Counter[str]()  # bytes, by node
        self.trouble = ""  # the last, with the source that made it
        self._timeout_s = timeout_s
        self._progress_at = time.monotonic()
        self._num_missing = swarm.num_buckets
        self.is_over = False
        self._manifest: Manifest | None = None
        self._file = -1
        self._partial: Partial | None = None

    def open(self, manifest: Manifest, file: int, partial: Partial | None) -> None:
        """Start with this file, which is closed by `close`."""
        self._manifest, self._file, self._partial = manifest, file, partial

    def close(self) -> None:
        """Call this when no stream runs any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def run(self, num_streams: int) -> None:
        """Pull buckets by so many threads until the version is complete or the pull has failed."""
        runs: list[Future[None]] = []
        with ThreadPoolExecutor(num_streams, thread_name_prefix="weights-pull") as threads:
            try:
                runs.extend(threads.submit(self._run_stream) for _ in range(num_streams))
            except RuntimeError as e:  # no more threads
                self.end(str(e))
        for run in runs:
            run.result()

    def _run_stream(self) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        idle: dict[Source, socket.socket] = {}
        try:
            while (transfer := self._next()) is not None:
                self._pull(transfer, buffer, idle)
        except WeightsError as e:
            self.end(str(e))
        finally:
            for sock in idle.values():
                sock.close()

    def make(self, patch: "Patch") -> None:
        """Make the missing buckets here, by threads. Raises what `patch` raises, with some of them
        made."""
        missing = [b for b in range(self.swarm.num_buckets) if self.swarm.todo >> b & 1]

        def work(first: int) -> None:
            assert self._manifest is not None
            buffer = memoryview(bytearray(CHUNK_BYTES))
            for bucket in missing[first::HASH_THREADS]:
                if not self.is_over:
                    patch.make(self._manifest, bucket, buffer, self._write)
                    self.note_right([bucket])

        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="weights-patch") as threads:
            list(threads.map(work, range(HASH_THREADS)))

    def end(self, why: str) -> None:
        """The pull has failed: all streams stop soon."""
        with self.lock:
            if not self.is_over:
                self.failure, self.is_over = why, True
            self.lock.notify_all()

    def look_after(self) -> None:
        """Call this often: steals slow transfers, and ends a pull that has waited too long."""
        with self.lock:
            now = time.monotonic()
            for transfer in self.swarm.in_flight:
                if transfer.received:
                    self._progress_at = max(self._progress_at, transfer.last_at)
                if self.swarm.is_overdue(transfer, now):
                    self.swarm.steal(transfer, now)
            why = "" if self.is_over else self._why_hopeless(now)
            self.lock.notify_all()  # pauses end
        if why:
            self.end(why)

    def note_right(self, buckets: Iterable[int]) -> None:
        """These buckets are in the file, verified."""
        with self.lock:
            for bucket in buckets:
                start, end = bucket_range(bucket, self.wanted.num_bytes)
                self.swarm.todo &= ~(1 << bucket)
                self.verified_bytes += end - start
                self._num_missing -= 1
                if self._partial is not None:
                    self._partial.verified(bucket)
            self._progress_at = time.monotonic()
            self.is_over |= self._num_missing == 0
            self.lock.notify_all()

    def note_progress(self) -> bool:
        """Returns whether the pull is still running."""
        self._progress_at = time.monotonic()
        return not self.is_over

    def note_trouble(self, source: Source, e: Exception | str, *, is_refusal: bool = False) -> None:
        """A source has failed and is not asked for a moment: with jitter, as the nodes of a run
        fail together and should not return together."""
        with self.lock:
            number = e.errno if isinstance(e, OSError) else None
            text = os.strerror(number) if number is not None and number > 0 else str(e)
            self.trouble = f"{join_address(*source.addresses[0])}: {text or 'timed out'}"
            source.failures += 1
            source.refusals = source.refusals + 1 if is_refusal else 0
            pause_s = min(MAX_PAUSE_S, 0.05 * 2 ** min(source.failures, 10))
            source.pause(time.monotonic(), pause_s * random.uniform(0.5, 1.0))

    def note_bad(self, source: Source, reason: str) -> None:
        """A source has sent wrong bytes: it is dropped, and reported."""
        with self.lock:
            source.is_bad = True
            self.trouble = f"{join_address(*source.addresses[0])}: {reason}"
            self.bad.append((source, reason))

    def note_busy(self, source: Source) -> None:
        """A source has too many connections, which counts as progress."""
        self.note_progress()
        with self.lock:
            pause_s = min(MAX_PAUSE_S, self._timeout_s / 2) * random.uniform(0.5, 1.0)
            source.pause(time.monotonic(), pause_s)

    def _why_hopeless(self, now: float) -> str:
        sources = self.swarm.sources
        last = f"; last {self.trouble}" if self.trouble else ""
        if sources and all(s.is_dropped for s in sources) and not self.swarm.in_flight:
            return f"no source serves it{last}"
        if now - self._progress_at > self._timeout_s:
            return f"nothing arrived for {self._timeout_s:g} s{last}"
        return ""

    def _next(self) -> Transfer | None:
        """Wait for something to do; None at the end."""
        with self.lock:
            while True:
                if self.is_over:
                    return None
                now = time.monotonic()
                if (chosen := self.swarm.choose(now)) is not None:
                    break
                self.lock.wait(TICK_S)
            source, bucket = chosen
            start, end = bucket_range(bucket, self.wanted.num_bytes)
            transfer = self.swarm.begin(source, bucket, end - start, now)
        if self._partial is not None and source.has == EVERYTHING:
            self._partial.getting(bucket)
        return transfer

    def _pull(
        self, transfer: Transfer, buffer: memoryview, idle: dict[Source, socket.socket]
    ) -> None:
        """Pull one bucket. If it does not arrive whole and right, it is to be pulled again."""
        source, is_whole, sock = transfer.source, False, None
        try:
            sock, sign = self._ask(transfer, idle.pop(source, None))
            if sign == DATA:
                is_whole = self._receive(transfer, sock, buffer)
            elif sign == BUSY:
                self.note_busy(source)
            else:
                source.has &= ~(1 << transfer.bucket)
                if not source.is_followed:
                    self.note_trouble(source, "has not got it", is_refusal=True)
            if sign != BUSY and not source.is_bad:
                idle[source], sock = sock, None
        except (OSError, EOFError) as e:
            if not transfer.is_stolen and not self.is_over:
                self.note_trouble(source, e, is_refusal=isinstance(e, EOFError))
        finally:
            with self.lock:
                self.received[source.node] += transfer.received
                self.swarm.end(transfer, time.monotonic(), is_whole=is_whole)
                self.lock.notify_all()
            if sock is not None:
                sock.close()
        if is_whole:
            self.note_right([transfer.bucket])

    def _ask(self, transfer: Transfer, kept: socket.socket | None) -> tuple[socket.socket, bytes]:
        """Ask for the bucket on a connection that was kept, or on a new one. Raises OSError,
        EOFError."""
        if kept is not None:
            try:
                return kept, self._ask_on(kept, transfer)
            except (OSError, EOFError):  # it was idle for too long, or the bucket was stolen
                kept.close()
        self._require(transfer, transfer.begun_at)
        sock = self._connect(transfer.source)
        try:
            return sock, self._ask_on(sock, transfer)
        except BaseException:
            sock.close()
            raise

    def _connect(self, source: Source) -> socket.socket:
        addresses = source.addresses  # of several network cards, which streams share
        address = addresses[source.num_streams % len(addresses)]
        sock = socket.create_connection(address, min(CONNECT_LIMIT_S, self._timeout_s))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        return sock

    def _ask_on(self, sock: socket.socket, transfer: Transfer) -> bytes:
        """Send the request, and wait for DATA, BUSY or MISSING."""
        source = transfer.source
        start, _ = bucket_range(transfer.bucket, self.wanted.num_bytes)
        with self.lock:
            is_shared = self.swarm.num_active_peers(time.monotonic()) > 1
        what = ASK_SHARED if is_shared else ASK_DATA
        sock.sendall(self.wanted.request(what, self.node, source, start, transfer.size))
        asked_at = transfer.last_at = time.monotonic()
        while True:
            try:
                sign = sock.recv(1)
            except BlockingIOError:
                self._require(transfer, asked_at)
                continue
            if sign in (DATA, BUSY, MISSING):
                source.is_starved |= sign == DATA
                transfer.is_queued, transfer.last_at, source.refusals = False, time.monotonic(), 0
                return sign
            if sign != QUEUED:
                raise EOFError(OTHER_PROTOCOL if sign else REFUSAL)
            asked_at, transfer.is_queued, source.refusals = time.monotonic(), True, 0
            if not source.is_starved:
                self.note_progress()

    def _receive(self, transfer: Transfer, sock: socket.socket, buffer: memoryview) -> bool:
        """Receive, hash and write a bucket. Returns whether it is right."""
        assert self._manifest is not None
        start, _ = bucket_range(transfer.bucket, self.wanted.num_bytes)
        digest = blake3()
        while (left := transfer.size - transfer.received) > 0:
            try:
                n = sock.recv_into(buffer, min(left, len(buffer)), socket.MSG_WAITALL)
            except BlockingIOError:
                self._require(transfer, transfer.last_at)
                continue
            if n == 0:
                raise EOFError(REFUSAL)
            digest.update(buffer[:n])
            self._write(buffer[:n], start + transfer.received)
            transfer.received += n
            transfer.last_at = time.monotonic()
            transfer.source.is_starved = False
            self._require(transfer, transfer.last_at)
        if digest.digest() == self._manifest.digest_of(transfer.bucket):
            return True
        self.note_bad(transfer.source, f"bucket {transfer.bucket}: digest differs")
        return False

    def _require(self, transfer: Transfer, since: float) -> None:
        """Raises TimeoutError if this transfer is not worth waiting for."""
        if transfer.is_stolen or self.is_over or time.monotonic() - since > IDLE_LIMIT_S:
            raise TimeoutError("timed out")

    def _write(self, data: memoryview, position: int) -> None:
        try:
            write_at(self._file, position, data)
        except OSError as e:  # the disk has failed, not the source
            raise WeightsError(f"cannot write: {e.strerror}") from e
