"""The threads of one pull: each takes a bucket, asks a source for it, proves it and writes it.

Owns the connections, the open file and what is right in it; whom to ask is `swarm.py`'s business.
Must not import torch. Bytes are received, hashed and written by portions that stay in a core's
cache; that is quicker than receiving into a mapping, whose pages must be cleared first, and a full
disk is an error there instead of a signal.
"""

import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Set

from lightrl.errors import WeightsError
from lightrl.system.addresses import join_address
from lightrl.system.files import write_at
from lightrl.weights.machine import leftovers
from lightrl.weights.machine.leftovers import Begun, Provable
from lightrl.weights.pull.connections import TICK_S, Connections, shut
from lightrl.weights.pull.swarm import EVERYTHING, Source, Swarm, Transfer
from lightrl.weights.serve.held import Partial
from lightrl.weights.serve.request import ASK_DATA, ASK_SHARED, BUSY, DATA, MISSING, QUEUED, Request
from lightrl.weights.version.layout import bucket_range

IDLE_LIMIT_S = 10.0  # of a connection, however long the pull may last
MAX_PAUSE_S = 2.0  # before a source that fails is asked again
BUSY_PAUSE_S = 2.0  # before one that has no place for us is

REFUSAL = "closed the connection (wrong ticket, or it no longer holds the version)"
# fits the cache; smaller ones wait for the interpreter's lock more often (256 KiB: a tenth slower)
_PORTION = 1 << 20


class Fetch:
    """What the streams of one pull share; its methods may be called from any thread."""

    def __init__(
        self, swarm: Swarm, credentials: tuple[str, int, str], timeout_s: float, num_bytes: int
    ) -> None:
        """`credentials`: digest, policy_version and the name of this node."""
        self.swarm = swarm
        self.connections = Connections(timeout_s)
        self.lock = threading.Condition()
        self.failure: str | None = None  # the first that ended the pull
        self.bad: deque[tuple[Source, str]] = deque()  # to be told of
        self.doubted: deque[Source] = deque()  # to be asked again what they have
        self.proved_bytes = 0
        self.received = Counter[str]()  # bytes, by node
        self.trouble = ""  # the last, with the source that made it
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._num_bytes = num_bytes
        self._progress_at = time.monotonic()
        self._transfers: dict[Transfer, socket.socket | None] = {}
        self._begun: dict[int, Begun] = {}
        self._num_missing = swarm.num_buckets
        self._is_over = False
        self._is_on_hold = False
        self._num_filling = 0  # buckets
        self._manifest: Provable | None = None
        self._file = -1
        self._leftovers: deque[int] = deque()  # buckets that may be right already
        self._partial: Partial | None = None

    def open(
        self, manifest: Provable, file: int, written: list[int], partial: Partial | None
    ) -> None:
        """Before the first `run`. Owns `file` from now on; what was `written` is proved first."""
        self._manifest, self._file, self._partial = manifest, file, partial
        self._leftovers.extend(written)
        for bucket in written:
            self.swarm.todo &= ~(1 << bucket)

    def run(self) -> None:
        """One stream: a thread that takes what is to be done until all is, or the pull has
        failed."""
        buffer = memoryview(bytearray(_PORTION))
        try:
            self._prove_leftovers(buffer)
            while (transfer := self._next()) is not None:
                self._pull(transfer, buffer)
        except WeightsError as e:
            self.end(str(e))

    def end(self, why: str) -> None:
        """The pull has failed: all streams stop soon, whatever they are doing."""
        with self.lock:
            if not self._is_over:
                self.failure, self._is_over = why, True
            for sock in self._transfers.values():
                shut(sock)
            self.lock.notify_all()

    def close(self) -> None:
        """When no stream runs any more."""
        with self.lock:
            while self._num_filling:
                self.lock.wait()
        self.connections.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def hold(self, *, is_on_hold: bool) -> None:
        """While on hold nothing is asked of anybody: see `take_bucket`."""
        self.note_progress()
        with self.lock:
            self._is_on_hold = is_on_hold
            for transfer, sock in self._transfers.items():
                transfer.is_left |= is_on_hold
                if is_on_hold:
                    shut(sock)
            self.lock.notify_all()

    def wait_idle(self) -> None:
        """While on hold: until nobody writes to the file any more."""
        with self.lock:
            while not self._is_over and (self._transfers or self._leftovers):
                self.lock.wait(TICK_S)

    def take_bucket(self, buckets: int, lacking: Set[int]) -> int | None:
        """One of these (bits) that is missing, but none of `lacking`, while on hold; None: no more.
        `put_bucket` must follow."""
        with self.lock:
            self.wait_idle()
            found = self.swarm.todo & buckets & ~sum(1 << bucket for bucket in lacking)
            if self._is_over or not found:
                return None
            self._num_filling += 1
            self.swarm.todo ^= found & -found
            return (found & -found).bit_length() - 1

    def put_bucket(self, bucket: int, *, is_whole: bool) -> None:
        """The bucket that was taken is written and proved; or not, and has to be pulled, all of it:
        what was there of it may have been overwritten."""
        with self.lock:
            self._num_filling -= 1
            self._begun.pop(bucket, None)
            if not is_whole:
                self.swarm.todo |= 1 << bucket
            self._count(bucket, is_whole)
            self.lock.notify_all()
        if is_whole and self._partial is not None:
            self._partial.proved(bucket)

    def write(self, data: memoryview, position: int) -> None:
        """Raises WeightsError."""
        try:
            write_at(self._file, position, data)
        except OSError as e:  # the disk's fault, not the source's
            raise WeightsError(f"cannot write: {e.strerror}") from e

    def look_after(self) -> None:
        """Now and then: takes from slow sources what they owe, ends what has waited too long."""
        with self.lock:
            now = time.monotonic()
            for transfer, sock in self._transfers.items():
                if transfer.received > transfer.received_before:
                    self._progress_at = max(self._progress_at, transfer.last_at)
                if self.swarm.is_overdue(transfer, now):
                    self.swarm.leave(transfer, now)
                    shut(sock)
            if self._is_over:
                return
            why = self._why_hopeless(now)
            self.lock.notify_all()  # pauses end
        if why:
            self.end(why)

    def note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def note_trouble(self, source: Source, e: Exception | str, *, is_refusal: bool = False) -> None:
        """It failed and is left alone for a moment: with jitter, as the nodes of a run fail
        together and should not come back together."""
        with self.lock:
            number = e.errno if isinstance(e, OSError) else None
            text = os.strerror(number) if number is not None and number > 0 else str(e)
            self.trouble = f"{join_address(*source.addresses[0])}: {text or 'timed out'}"
            source.failures += 1
            source.refusals = source.refusals + 1 if is_refusal else 0
            pause_s = min(MAX_PAUSE_S, 0.05 * 2 ** min(source.failures, 10))
            source.pause(time.monotonic(), pause_s * random.uniform(0.5, 1.0))

    def note_bad(self, source: Source, reason: str) -> None:
        with self.lock:
            source.is_bad = True
            self.trouble = f"{join_address(*source.addresses[0])}: {reason}"
            self.bad.append((source, reason))

    def _why_hopeless(self, now: float) -> str:
        if self._is_on_hold:
            return ""
        sources = self.swarm.sources
        last = f"; last {self.trouble}" if self.trouble else ""
        if sources and all(s.is_lost for s in sources) and not self._transfers:
            return f"no source serves it{last}"
        if now - self._progress_at > self._timeout_s:
            return f"nothing arrived for {self._timeout_s:g} s{last}"
        return ""

    def _next(self) -> Transfer | None:
        """What to do next, as soon as there is something; None at the end."""
        with self.lock:
            while True:
                if self._is_over:
                    return None
                now = time.monotonic()
                if not self._is_on_hold and (chosen := self.swarm.choose(now)) is not None:
                    break
                self.lock.wait(TICK_S)
            source, bucket = chosen
            start, end = bucket_range(bucket, self._num_bytes)
            begun = self._begun.setdefault(bucket, Begun())
            transfer = self.swarm.begin(source, bucket, end - start, begun.received, now)
            self._transfers[transfer] = None
        if self._partial is not None and source.has == EVERYTHING:
            self._partial.getting(bucket)
        return transfer

    def _pull(self, transfer: Transfer, buffer: memoryview) -> None:
        """One bucket, or as much of it as comes; the rest is to be done again then."""
        source, begun, is_whole, sock = transfer.source, self._begun[transfer.bucket], False, None
        try:
            sock = self._ask(transfer)
            if sock is not None:
                self._receive(transfer, begun, sock, buffer)
                is_whole = self._prove(transfer, begun)
                if is_whole or not source.is_bad:
                    self.connections.keep(source, sock)
                    sock = None
        except (OSError, EOFError) as e:
            if not transfer.is_left and not self._is_over:
                self.note_trouble(source, e, is_refusal=isinstance(e, EOFError))
        finally:
            with self.lock:
                del self._transfers[transfer]
                begun.received = transfer.received
                if (received := transfer.received - transfer.received_before) > 0:
                    self.received[source.node] += received
                    self._progress_at = max(self._progress_at, transfer.last_at)
                if is_whole:
                    del self._begun[transfer.bucket]
                self.swarm.end(transfer, time.monotonic(), is_whole=is_whole)
                self._count(transfer.bucket, is_whole)
            if sock is not None:
                sock.close()

    def _count(self, bucket: int, is_whole: bool) -> None:
        """With the lock."""
        if is_whole:
            start, end = bucket_range(bucket, self._num_bytes)
            self.proved_bytes += end - start
            self._num_missing -= 1
            self._is_over |= self._num_missing == 0
            self._progress_at = time.monotonic()
        if self._is_over or not is_whole:
            self.lock.notify_all()

    def _ask(self, transfer: Transfer) -> socket.socket | None:
        """A connection from which the rest of the bucket comes; None if its source has no place for
        us, or not that bucket. Raises OSError, EOFError."""
        sock, is_fresh = self.connections.take(transfer.source), False
        while True:
            if sock is None:
                sock, is_fresh = self.connections.connect(transfer.source), True
            try:
                with self.lock:
                    self._transfers[transfer] = sock
                    if transfer.is_left:
                        raise TimeoutError
                sign = self._ask_on(sock, transfer)
            except (OSError, EOFError):
                sock.close()
                if is_fresh or transfer.is_left or self._is_over:
                    raise
                sock = None  # it was idle for too long
                continue
            except BaseException:
                sock.close()
                raise
            if sign == DATA:
                return sock
            if sign == BUSY:
                sock.close()
                self.note_busy(transfer.source)
            else:
                self.connections.keep(transfer.source, sock)
                self._note_missing(transfer)
            return None

    def _ask_on(self, sock: socket.socket, transfer: Transfer) -> bytes:
        """Until it is our turn: DATA, BUSY or MISSING."""
        source = transfer.source
        digest, version, node = self._credentials
        start, end = bucket_range(transfer.bucket, self._num_bytes)
        offset = start + transfer.received
        with self.lock:
            is_shared = self.swarm.num_others(time.monotonic()) > 1
        what, size = ASK_SHARED if is_shared else ASK_DATA, end - offset
        named = node.encode(), source.ticket
        request = Request(what, bytes.fromhex(digest), version, offset, size, *named)
        sock.sendall(request.pack())
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
                raise EOFError(
                    REFUSAL if not sign else "does not serve weights as this version does"
                )
            asked_at, transfer.is_queued = time.monotonic(), True
            source.refusals = 0
            if not source.is_starved:
                self.note_progress()

    def _receive(
        self, transfer: Transfer, begun: Begun, sock: socket.socket, buffer: memoryview
    ) -> None:
        start, _ = bucket_range(transfer.bucket, self._num_bytes)
        begun.nodes.add(transfer.source.node)
        while (left := transfer.size - transfer.received) > 0:
            try:
                n = sock.recv_into(buffer, min(left, _PORTION), socket.MSG_WAITALL)
            except BlockingIOError:
                self._require(transfer, transfer.last_at)
                continue
            if n == 0:
                raise EOFError(REFUSAL)
            data = buffer[:n]
            begun.digest.update(data)
            self.write(data, start + transfer.received)
            transfer.received += n
            transfer.last_at = time.monotonic()
            transfer.source.is_starved = False

    def _require(self, transfer: Transfer, since: float) -> None:
        """Raises TimeoutError if there is nothing to wait for any more."""
        if transfer.is_left or self._is_over or time.monotonic() - since > IDLE_LIMIT_S:
            raise TimeoutError("timed out")

    def _prove(self, transfer: Transfer, begun: Begun) -> bool:
        """Names the source of wrong bytes, if there was only one."""
        assert self._manifest is not None
        if begun.digest.digest() == self._manifest.digest_of(transfer.bucket):
            if self._partial is not None:
                self._partial.proved(transfer.bucket)
            return True
        if len(begun.nodes) == 1:
            self.note_bad(transfer.source, f"bucket {transfer.bucket}: digest differs")
        with self.lock:
            self._begun[transfer.bucket] = Begun()
        return False

    def note_busy(self, source: Source) -> None:
        """It has too many peers: that it says so counts as progress."""
        self.note_progress()
        with self.lock:
            source.max_streams = max(1, source.num_streams - 1)
            if source.num_streams <= 1:
                pause_s = min(BUSY_PAUSE_S, self._timeout_s / 2) * random.uniform(0.5, 1.0)
                source.pause(time.monotonic(), pause_s)

    def _note_missing(self, transfer: Transfer) -> None:
        with self.lock:
            source = transfer.source
            self.trouble = f"{join_address(*source.addresses[0])}: has not got it"
            source.has &= ~(1 << transfer.bucket)
            if not source.is_followed:
                source.has = 0
                self.doubted.append(source)

    def _goes_on(self) -> bool:
        self.note_progress()
        return not self._is_over

    def _prove_leftovers(self, buffer: memoryview) -> None:
        assert self._manifest is not None
        while True:
            with self.lock:
                if self._is_over or not self._leftovers:
                    return
                bucket = self._leftovers.popleft()
            is_right = leftovers.is_right(self._file, bucket, self._manifest, buffer, self._goes_on)
            with self.lock:
                if not is_right:
                    self.swarm.todo |= 1 << bucket
                self._count(bucket, is_right)
            if is_right and self._partial is not None:
                self._partial.proved(bucket)
