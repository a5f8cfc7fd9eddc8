"""Weights over plain TCP: fetches a version from whoever holds it, and proves that it is that
version.

Owns one transfer: streams, retries, resuming, digests. Threads do all of it, the event loop only
waits. Must not import torch; decides neither what to pull nor from whom. The other side is
`serve.py`.
"""

import asyncio
import contextlib
import hashlib
import os
import random
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import WeightsError
from lightrl.messages import MAX_HOLDERS, Manifest
from lightrl.system.addresses import join_address, split_address
from lightrl.weights import manifest as m
from lightrl.weights.request import BUSY, DATA, MAX_NAME_BYTES, MAX_TICKET_BYTES, QUEUED, Request
from lightrl.weights.serve import IDLE_LIMIT_S, WeightServer

__all__ = ["PullStats", "WeightServer", "pull"]

CONNECT_LIMIT_S = 3.0
MAX_REFUSALS = 3  # of each holder in a row before a stream gives up
SPARE_BYTES = 64 << 20  # of disk, left for others
MAX_PAUSE_S = 2.0  # between two rounds of attempts
BUSY_PAUSE_S = 2.0  # before a holder that has no place for us is asked again

_REFUSAL = "closed the connection (wrong ticket, or it no longer holds the version)"
_CHUNK_BYTES = 256 << 10  # fits a core's cache, where it is digested and written


def parse_address(address: str) -> tuple[str, int]:
    """Of a holder. Raises WeightsError for one that nobody could connect to."""
    found = split_address(address)
    if found is None or found[0] == "*" or found[1] == 0:
        raise WeightsError(f"{address[:80]!r}: a holder looks like host:port")
    return found


@dataclass(frozen=True, slots=True)
class PullStats:
    """What one pull cost. `num_bytes` were transferred; a resumed pull needs fewer than the version
    has."""

    num_bytes: int
    seconds: float


async def pull(
    manifest: Manifest,
    holders: Sequence[str],
    ticket: str,
    destination: Path,
    streams: int = 4,
    timeout_s: float = 60.0,
    *,
    node: str,
) -> PullStats:
    """Fetches a version into `destination`, every bucket proved, from any of the holders.

    `ticket` is that of `node` for this version, to others it is worth nothing.

    Grows "destination.part" and resumes from the whole buckets in it; `destination` appears
    complete or not at all. A holder that cannot be reached or breaks off is tried again and again:
    the network may come back. Waiting in the queue of a holder, or for a place there, is no failure
    however long it takes; where many wait, fewer `streams` are used. Raises WeightsError when
    nothing has arrived for `timeout_s`, not even a sign that we are queued; sooner if every holder
    keeps refusing (it closes the connection instead of answering: wrong ticket, or the version is
    gone) or the bytes of a bucket were wrong twice; at once for a manifest that cannot be or a disk
    that is too small. Cancelling ends it within CONNECT_LIMIT_S.
    """
    m.verify(manifest)
    if not 0 < len(holders) <= MAX_HOLDERS:
        num = len(holders) or "nobody"
        raise WeightsError(f"version {manifest.policy_version}: {num} holds it")
    if not 0 < len(node.encode()) <= MAX_NAME_BYTES:
        raise WeightsError(f"version {manifest.policy_version}: not a node's name: {node[:20]!r}")
    if not 0 < len(ticket.encode()) <= MAX_TICKET_BYTES:
        raise WeightsError(f"version {manifest.policy_version}: not a ticket: {ticket[:20]!r}")
    start = time.monotonic()
    part = destination.with_name(destination.name + ".part")
    _require_space(manifest, part)
    credentials = (node.encode(), ticket.encode())
    num_streams = max(1, min(streams, len(manifest.buckets)))
    addresses = [parse_address(h) for h in holders]
    fetch = _Fetch(manifest, addresses, credentials, timeout_s, part, num_streams)
    loop = asyncio.get_running_loop()
    try:
        with ThreadPoolExecutor(num_streams, thread_name_prefix="weights-pull") as threads:
            try:
                workers = [_Stream(fetch, k) for k in range(num_streams)]
                runs = [loop.run_in_executor(threads, w.run) for w in workers]
            except RuntimeError as e:
                fetch.end(str(e))
                raise WeightsError(f"version {manifest.policy_version}: {e}") from e
            try:
                await asyncio.gather(*(asyncio.shield(r) for r in runs))
            except BaseException:
                fetch.end("cancelled")
                await asyncio.wait(runs)
                raise
    finally:
        fetch.close()
    if fetch.failure is not None:
        raise WeightsError(f"version {manifest.policy_version}: {fetch.failure}")
    part.replace(destination)
    return PullStats(fetch.num_bytes, time.monotonic() - start)


def _require_space(manifest: Manifest, part: Path) -> None:
    """Raises WeightsError if the version does not fit on the disk: before anything is
    transferred."""
    needed = m.num_bytes(manifest)
    with contextlib.suppress(FileNotFoundError):
        needed -= part.stat().st_blocks * 512
    try:
        free = shutil.disk_usage(part.parent).free
    except OSError as e:
        raise WeightsError(f"{part.parent}: cannot be written: {e.strerror}") from e
    if needed + SPARE_BYTES > free:
        raise WeightsError(
            f"version {manifest.policy_version}: needs {needed / 1e9:.3g} GB more in "
            f"{part.parent}, where {free / 1e9:.3g} GB are free"
        )


class _Fetch:
    """What the streams of one pull share; its methods may be called from any thread."""

    def __init__(
        self,
        manifest: Manifest,
        holders: Sequence[tuple[str, int]],
        credentials: tuple[bytes, bytes],
        timeout_s: float,
        part: Path,
        num_streams: int,
    ) -> None:
        self.manifest = manifest
        self.holders = holders
        self.credentials = credentials  # the node's name and its ticket
        self.failure: str | None = None  # the first that ended the pull
        self.num_bytes = 0  # received
        self.trouble = ""  # the last, with the holder that made it
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s  # moves on with every byte
        self._todo = deque(enumerate(m.bucket_offsets(manifest)))
        self._num_streams = num_streams  # that are at work
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._sockets: set[socket.socket] = set()
        try:
            self.file = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
            self.has_leftovers = os.fstat(self.file).st_size > 0
            os.ftruncate(self.file, m.num_bytes(manifest))
        except OSError as e:
            raise WeightsError(f"{part}: cannot be written: {e.strerror}") from e

    def buckets(self) -> Iterator[tuple[int, int]]:
        """(index, position in the file) of buckets that no stream has taken yet, until the pull
        ends."""
        while not self._ended.is_set():
            with self._lock:
                if not self._todo:
                    self._num_streams -= 1
                    return
                bucket = self._todo.popleft()
            yield bucket

    def hand_back(self, index: int, position: int) -> bool:
        """Leaves a bucket, and all others, to the streams that remain; False if there is none."""
        with self._lock:
            if self._num_streams == 1:
                return False
            self._num_streams -= 1
            self._todo.appendleft((index, position))
            return True

    def end(self, why: str) -> None:
        """The pull has failed: all streams stop soon, whatever they are doing."""
        with self._lock:
            self.failure = self.failure or why
            self._ended.set()
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # not connected any more
                    sock.shutdown(socket.SHUT_RDWR)

    def remaining_s(self, limit_s: float) -> float:
        """Up to `limit_s`, less near the deadline. Raises WeightsError when the pull is over."""
        left = self._deadline - time.monotonic()
        if left <= 0 or self._ended.is_set():
            last = f"; last {self.trouble}" if self.trouble else ""
            raise WeightsError(f"nothing arrived for {self._timeout_s:g} s{last}")
        return min(left, limit_s)

    def pause(self, seconds: float) -> None:
        """With jitter: the nodes of a run fail together and should not come back together."""
        self._ended.wait(self.remaining_s(seconds * random.uniform(0.5, 1.0)))

    def wait_for_place(self) -> None:
        """A holder has too many peers: that it says so counts as progress."""
        self.count(0)
        self.pause(min(BUSY_PAUSE_S, self._timeout_s / 2))

    def register(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.add(sock)

    def forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)
        sock.close()

    def count(self, num_bytes: int) -> None:
        """Progress: so many bytes arrived, or (0) those of an earlier pull were read, or we are
        queued."""
        with self._lock:
            self.num_bytes += num_bytes
            self._deadline = time.monotonic() + self._timeout_s

    def close(self) -> None:
        os.close(self.file)


class _Stream:
    """One thread with one connection at a time. Streams start at different holders, to share the
    load."""

    def __init__(self, fetch: _Fetch, number: int) -> None:
        self._fetch = fetch
        self._turn = number  # whose turn it is among the holders
        self._failures = 0  # in a row, without progress
        self._refusals = 0  # so many of them, the last ones, were refusals
        self._is_starved = False  # it was our turn, and nothing came
        self._sock: socket.socket | None = None
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))

    def run(self) -> None:
        try:
            for index, position in self._fetch.buckets():
                if self._fetch.has_leftovers and self._is_held(index, position):
                    continue
                if not self._pull_bucket(index, position):
                    return
        except WeightsError as e:
            self._fetch.end(str(e))
        finally:
            self._disconnect()

    def _pull_bucket(self, index: int, position: int) -> bool:
        """False if the bucket was left to other streams, as the holders are busy."""
        bucket = self._fetch.manifest.buckets[index]
        for _ in range(2):
            digest = self._receive(index, position, bucket.size)
            if digest is None or digest == bucket.digest:
                return digest is not None
            self._disconnect()
            self._turn += 1  # rather from another holder
        raise WeightsError(f"bucket {index}: digest differs, twice")

    def _receive(self, index: int, position: int, size: int) -> str | None:
        """Receives and writes a bucket, going on where it was broken off; returns its digest.

        None if it has been handed back.
        """
        fetch = self._fetch
        digest = hashlib.blake2b(digest_size=16)
        received = 0
        while received < size:
            try:
                sock = self._request(position + received, size - received)
                if not self._await_turn(sock):
                    self._disconnect()
                    if received == 0 and fetch.hand_back(index, position):
                        return None
                    self._turn += 1
                    fetch.wait_for_place()
                    continue
                while received < size:
                    sock.settimeout(fetch.remaining_s(IDLE_LIMIT_S))
                    n = sock.recv_into(self._buffer, min(size - received, _CHUNK_BYTES))
                    if n == 0:
                        raise EOFError(_REFUSAL)
                    data = self._buffer[:n]
                    digest.update(data)
                    self._write(data, position + received)
                    received += n
                    self._failures = self._refusals = 0
                    self._is_starved = False
                    fetch.count(n)
            except (OSError, EOFError) as e:
                self._disconnect()
                self._blame_holder(e)
        return digest.hexdigest()

    def _request(self, offset: int, size: int) -> socket.socket:
        fetch = self._fetch
        if self._sock is None:
            address = fetch.holders[self._turn % len(fetch.holders)]
            self._sock = socket.create_connection(address, fetch.remaining_s(CONNECT_LIMIT_S))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fetch.register(self._sock)
        self._sock.settimeout(fetch.remaining_s(IDLE_LIMIT_S))
        version = fetch.manifest.policy_version
        self._sock.sendall(Request(version, offset, size, *fetch.credentials).pack())
        return self._sock

    def _await_turn(self, sock: socket.socket) -> bool:
        """Until the bytes that were asked for follow. False if the holder has no place for us now.

        To be queued counts as progress, unless it is for what did not come when it was our turn.
        """
        while True:
            sock.settimeout(self._fetch.remaining_s(IDLE_LIMIT_S))
            sign = sock.recv(1)
            if sign == DATA:
                self._is_starved = True
                return True
            if sign == BUSY:
                return False
            if sign != QUEUED:
                raise EOFError(
                    _REFUSAL if not sign else "does not serve weights as this version does"
                )
            self._refusals = 0
            if not self._is_starved:
                self._fetch.count(0)

    def _blame_holder(self, e: OSError | EOFError) -> None:
        """On to the next holder, with a pause after each time around. Raises WeightsError to give
        up."""
        holders = self._fetch.holders
        host, port = holders[self._turn % len(holders)]
        self._fetch.trouble = f"{join_address(host, port)}: {e}"
        self._failures += 1
        self._refusals = self._refusals + 1 if isinstance(e, EOFError) else 0
        if self._refusals >= MAX_REFUSALS * len(holders):
            raise WeightsError(f"no holder serves it; last {self._fetch.trouble}") from e
        self._turn += 1
        rounds, rest = divmod(self._failures, len(holders))
        if rest == 0:
            self._fetch.pause(min(MAX_PAUSE_S, 0.05 * 2 ** min(rounds, 10)))

    def _write(self, data: memoryview, position: int) -> None:
        try:
            while data:
                n = os.pwrite(self._fetch.file, data, position)
                data, position = data[n:], position + n
        except OSError as e:  # the disk's fault, not the holder's
            raise WeightsError(f"cannot write: {e.strerror}") from e

    def _is_held(self, index: int, position: int) -> bool:
        """Whether an earlier pull left this bucket whole."""
        bucket = self._fetch.manifest.buckets[index]
        digest = hashlib.blake2b(digest_size=16)
        done = 0
        while done < bucket.size:
            self._fetch.remaining_s(0.0)  # the pull may have ended
            n = os.preadv(self._fetch.file, [self._buffer[: bucket.size - done]], position + done)
            self._fetch.count(0)
            digest.update(self._buffer[:n])
            done += n
        return digest.hexdigest() == bucket.digest

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._fetch.forget(self._sock)
            self._sock = None
