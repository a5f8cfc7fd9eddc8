"""A pull of one version over plain TCP, from nodes that hold it or pull it themselves.

Owns the sources of one pull, its connections, files, progress and end. `swarm.py` chooses a source
for each bucket, `connection.py` receives it; threads hash and write. The other side is
`serve/server.py`. Must not import torch.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import socket
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from blake3 import blake3

from lightrl.errors import ProtocolError, WeightsError
from lightrl.messages.fields import MAX_SOURCES
from lightrl.messages.weights import WeightsProgress, WeightsSource
from lightrl.system.addresses import join_address
from lightrl.system.files import write_at
from lightrl.system.threads import cancel, in_thread, taken_in_thread
from lightrl.weights.machine.local import (
    CHUNK_BYTES,
    HASH_THREADS,
    open_partial,
    partial_path,
    verify_buckets,
)
from lightrl.weights.pull.connection import (
    FAILURES,
    OTHER_PROTOCOL,
    REFUSAL,
    Connection,
    Wanted,
    parse_address,
    receive_into,
)
from lightrl.weights.pull.swarm import EVERYTHING, BucketTransfer, PullSource, SourceChoice
from lightrl.weights.serve.held import Held
from lightrl.weights.serve.request import (
    ALL,
    ASK_DATA,
    ASK_HAVE,
    ASK_MANIFEST,
    ASK_SHARED,
    BUSY,
    DATA,
    MAX_NAME_BYTES,
    MAX_TICKET_BYTES,
    PART,
    Holdings,
    holdings_size,
    unpack_holdings,
)
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import MAX_BYTES, bucket_range, num_buckets
from lightrl.weights.version.manifest import (
    DIGEST_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    VersionFile,
    decode,
    manifest_path,
    read_encoded,
)

if TYPE_CHECKING:  # numpy is loaded with the first delta
    from lightrl.weights.delta.patch import Patch

P = ParamSpec("P")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

TICK_S = 0.1  # between looks at the sources
PROGRESS_S = 0.25
POLL_S = 0.02  # between two questions to a source about what it has
MAX_PAUSE_S = 2.0  # before a source that fails or is busy is asked again


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Limits of one pull: how much is requested at a time, and how long it waits."""

    # buckets in flight at a time
    streams: int = 4
    # without a byte, after which a pull fails
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PullStats:
    """The cost of one pull. `num_bytes` were received; a resumed pull needs fewer than the version
    has."""

    num_bytes: int
    seconds: float
    # of num_bytes: from others than the last of the sources, which is the trainer
    peer_bytes: int = 0
    # by node
    by_source: dict[str, int] = field(default_factory=dict)


class Pull:
    """One version on its way to `path`. `await run()` once; a cancellation ends it within seconds.

    pull = Pull(wanted, "rollout-0", path, server=server, on_bad=..., on_progress=...)
    pull.add_sources(offer.sources)
    stats = await pull.run()        # pull.file, pull.manifest are there now
    """

    def __init__(
        self,
        wanted: Wanted,
        node: str,
        path: Path,
        *,
        server: WeightServer | None = None,
        limits: PullLimits | None = None,
        on_bad: Callable[[str, str], None] | None = None,
        on_progress: Callable[[WeightsProgress], None] | None = None,
    ) -> None:
        """`node`: this one, for which the tickets are. `server`: serves verified buckets meanwhile,
        and the whole version at the end, until it is retired there. `on_bad(node, reason)` and
        `on_progress` are called in the event loop, the latter each PROGRESS_S. Raises WeightsError
        for what cannot be a version."""
        self._about = f"version {wanted.policy_version}"
        self._require_sense(wanted, node)
        limits = limits or PullLimits()
        self._wanted = wanted
        self._node = node
        self._path = path
        self._server = server
        self._on_bad = on_bad
        self._on_progress = on_progress
        self._timeout_s = limits.timeout_s
        buckets = num_buckets(wanted.num_bytes)
        self._num_streams = max(1, min(limits.streams, buckets))
        seed = hashlib.blake2b(node.encode(), digest_size=4).digest()
        self._choice = SourceChoice(buckets, int.from_bytes(seed, "little"), self._num_streams)
        self._manifest: Manifest | None = None
        self._file = -1
        self._held: Held | None = None  # by which verified buckets are served
        self._idle = defaultdict[PullSource, list[Connection]](list)
        self._following: dict[PullSource, asyncio.Task[None]] = {}
        self._pulling: dict[BucketTransfer, asyncio.Task[None]] = {}
        self._news = asyncio.Event()  # something may be asked of a source now
        self._verified_bytes = 0
        self._received = Counter[str]()  # bytes, by node
        self._trouble = ""  # the last, with the source that made it
        self._failure: WeightsError | None = None
        self._is_over = False
        self._progress_at = time.monotonic()
        self._report_due = 0.0

    @property
    def missing_bytes(self) -> int:
        return self._wanted.num_bytes - self._verified_bytes

    @property
    def file(self) -> VersionFile:
        """The version at `path`; complete once `run` has returned."""
        w, beside = self._wanted, manifest_path(self._path)
        return VersionFile(w.policy_version, w.digest, w.num_bytes, str(self._path), str(beside))

    @property
    def manifest(self) -> Manifest:
        """Verified. There once `run` or `run_for_manifest` has returned."""
        assert self._manifest is not None
        return self._manifest

    def add_sources(self, sources: Sequence[WeightsSource]) -> None:
        """Call this before and while the pull runs, with the trainer as the last source. Known
        sources keep their state, except for their refusals. Raises WeightsError for an address
        without a host and a port."""
        choice, fresh = self._choice, [self._source(s) for s in sources[:MAX_SOURCES]]
        known = {(s.node, s.addresses, s.ticket): s for s in choice.sources}
        named = {s.node for s in fresh}
        listed = [known.get((s.node, s.addresses, s.ticket), s) for s in fresh]
        choice.sources = [s for s in choice.sources if s.node not in named] + listed
        for source in listed:
            source.refusals = 0
        for source in known.values():
            if source not in choice.sources:  # its node has started again
                source.is_bad = True
        self._news.set()

    async def run(self, patch: "Patch | None" = None) -> PullStats:
        """Pull every bucket and verify it, but those that `patch` makes: `path` appears complete or
        not at all, the manifest beside it.

        A source that cannot be reached or breaks off is tried again; waiting in a queue is no
        failure, however long it takes. Raises WeightsError when nothing has arrived for the
        timeout, sooner if every source refuses or sent wrong bytes, and for a full disk. The
        partial download stays, for the next pull; its owner removes it.
        """
        begun_at = time.monotonic()
        await self._attend(self._pull(patch))
        origin, total = self._choice.sources[-1].node, self._received.total()
        seconds, by_node = time.monotonic() - begun_at, self._received
        return PullStats(total, seconds, total - by_node[origin], dict(+by_node))

    async def run_for_manifest(self) -> VersionFile:
        """Pull only the manifest and verify it; nothing appears at `path`."""
        await self._attend(self._find_manifest())
        return self.file

    async def _attend(self, act: Coroutine[Any, Any, object]) -> None:
        """Run `act`, and look after the sources meanwhile."""
        self._progress_at = time.monotonic()
        self._report_due = self._progress_at + PROGRESS_S
        work = asyncio.get_running_loop().create_task(act)
        is_done = False
        try:
            while not work.done():
                self._look_after()
                await asyncio.wait({work}, timeout=TICK_S)
            await work
            is_done = True
        finally:
            self._is_over = True
            await cancel(work, *self._following.values(), *self._pulling.values())
            for connection in (c for kept in self._idle.values() for c in kept):
                connection.close()
            if self._file >= 0:
                os.close(self._file)
            self._report()
            if not is_done and self._server is not None:
                await self._server.retire(self._wanted.digest, 0.0)

    async def _pull(self, patch: "Patch | None") -> None:
        manifest = await self._find_manifest()
        part = partial_path(self._path)
        try:
            self._file, written = await taken_in_thread(
                lambda opened: os.close(opened[0]), open_partial, part, manifest.num_bytes
            )
        except OSError as e:
            raise WeightsError(f"{self._about}: {part}: cannot be written: {e.strerror}") from e
        if self._server is not None:
            self._held = self._server.serve_partial(replace(self.file, path=str(part)))
        self._note_right(
            await _to_the_end(verify_buckets, self._file, manifest, written, self._note_progress)
        )
        if patch is not None:
            try:
                await _to_the_end(self._make, manifest, patch, asyncio.get_running_loop())
            except (WeightsError, OSError) as e:
                logger.warning("%s: what deltas cannot make of it is pulled: %s", self._about, e)
        while self.missing_bytes:
            self._news.clear()
            self._begin_transfers()
            await self._news.wait()
            if self._failure is not None:
                raise self._failure
        part.replace(self._path)
        if self._held is not None:
            self._held.complete()

    # The manifest

    async def _find_manifest(self) -> Manifest:
        """Read the manifest of an earlier pull, or ask the sources until one has it."""
        with contextlib.suppress(OSError, WeightsError):
            encoded = await in_thread(read_encoded, self.file)
            self._manifest = await in_thread(decode, encoded, self._wanted.digest)
        while self._manifest is None:
            self._news.clear()
            for source in list(self._choice.sources):
                if source.is_known and source.is_usable(time.monotonic()):
                    self._manifest = await self._manifest_of(source)
                if self._manifest is not None:
                    break
            else:
                await self._news.wait()
        if self._manifest.num_bytes != self._wanted.num_bytes:
            raise WeightsError(
                f"{self._about}: has {self._manifest.num_bytes} bytes, "
                f"was published with {self._wanted.num_bytes}"
            )
        return self._manifest

    async def _manifest_of(self, source: PullSource) -> Manifest | None:
        size = self._wanted.manifest_bytes
        beside = manifest_path(self._path)
        try:
            async with self._asked(source, ASK_MANIFEST, 0, size, self._note_progress) as answer:
                connection, sign = answer
                if sign != DATA:
                    self._note_pause(source)
                    return None
                encoded = await connection.receive(size, self._note_progress)
            manifest = await in_thread(decode, encoded, self._wanted.digest)
        except WeightsError as e:
            self._note_bad(source, str(e))
            return None
        except FAILURES as e:
            self._note_trouble(source, e)
            return None
        try:
            await in_thread(beside.write_bytes, encoded)
        except OSError as e:
            raise WeightsError(f"{self._about}: {beside}: cannot be written: {e.strerror}") from e
        return manifest

    # Buckets

    def _begin_transfers(self) -> None:
        now = time.monotonic()
        while len(self._pulling) < self._num_streams:
            if (chosen := self._choice.choose(now)) is None:
                break
            source, bucket = chosen
            start, end = bucket_range(bucket, self._wanted.num_bytes)
            transfer = self._choice.begin(source, bucket, end - start, now)
            if self._held is not None and source.has == EVERYTHING:
                self._held.getting(bucket)
            pulling = self._pull_bucket(transfer)
            self._pulling[transfer] = asyncio.get_running_loop().create_task(pulling)

    async def _pull_bucket(self, transfer: BucketTransfer) -> None:
        """Pull one bucket. If it does not arrive whole and right, it is to be pulled again."""
        source, is_whole = transfer.source, False
        try:
            is_whole = await self._receive(transfer)
        except FAILURES as e:
            self._note_trouble(source, e)
        except WeightsError as e:
            self._failure = self._failure or e
        finally:
            del self._pulling[transfer]
            self._received[source.node] += transfer.received
            self._choice.end(transfer, time.monotonic(), is_whole=is_whole)
            self._news.set()
        if is_whole:
            self._note_right([transfer.bucket])

    async def _receive(self, transfer: BucketTransfer) -> bool:
        """Return whether the source has sent the bucket. Raises FAILURES, WeightsError."""
        source = transfer.source
        start, _ = bucket_range(transfer.bucket, self._wanted.num_bytes)
        is_shared = self._choice.num_active_peers(time.monotonic()) > 1
        what = ASK_SHARED if is_shared else ASK_DATA

        def note_queued() -> None:
            transfer.is_queued, source.refusals = True, 0
            self._note_progress()

        async with self._asked(source, what, start, transfer.size, note_queued) as answer:
            connection, sign = answer
            transfer.is_queued, transfer.last_at = False, time.monotonic()
            if sign == DATA:
                if await connection.in_thread(partial(self._receive_bucket, transfer, start)):
                    return True
                self._note_bad(source, f"bucket {transfer.bucket}: digest differs")
            elif sign != BUSY:
                self._note_trouble(source, "does not have it", is_refusal=source.has == EVERYTHING)
                source.has = 0
            return False

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        source: PullSource,
        what: bytes,
        offset: int,
        size: int,
        on_queued: Callable[[], object],
    ) -> AsyncIterator[tuple[Connection, bytes]]:
        """Ask on a connection that was kept, or on a new one. Raises FAILURES."""
        request = self._wanted.request(what, self._node, source, offset, size)
        addresses = source.addresses  # of several network cards, which streams share
        while True:
            is_new = not self._idle[source]
            if is_new:
                connection = await Connection.open(addresses[source.num_streams % len(addresses)])
            else:
                connection = self._idle[source].pop()
            try:
                sign = await connection.ask(request, on_queued)
                break
            except BaseException as e:
                connection.close()
                if is_new or not isinstance(e, FAILURES):
                    raise  # else it was idle for too long
        is_kept = False
        try:
            if sign == BUSY:
                self._note_progress()
                self._note_pause(source)
            yield connection, sign
            is_kept = sign != BUSY and not source.is_bad
        finally:
            if is_kept:
                self._idle[source].append(connection)
            else:
                connection.close()

    def _receive_bucket(self, transfer: BucketTransfer, start: int, sock: socket.socket) -> bool:
        """Receive, hash and write a bucket in a thread. Return whether it is right."""
        assert self._manifest is not None
        buffer, digest = memoryview(bytearray(CHUNK_BYTES)), blake3()
        while (left := transfer.size - transfer.received) > 0:
            part = buffer[: receive_into(sock, buffer[:left])]
            digest.update(part)
            self._write(part, start + transfer.received)
            transfer.received += len(part)
            transfer.last_at = time.monotonic()
        return digest.digest() == self._manifest.digest_of(transfer.bucket)

    def _write(self, data: memoryview, position: int) -> None:
        try:
            write_at(self._file, position, data)
        except OSError as e:  # the disk has failed, not the source
            raise WeightsError(f"{self._about}: cannot write: {e.strerror}") from e

    def _make(self, manifest: Manifest, patch: "Patch", loop: asyncio.AbstractEventLoop) -> None:
        """Make the missing buckets here, by threads. Raises what `patch` raises, with some of them
        made."""
        missing = [b for b in range(self._choice.num_buckets) if self._choice.todo >> b & 1]

        def work(first: int) -> None:
            buffer = memoryview(bytearray(CHUNK_BYTES))
            for bucket in missing[first::HASH_THREADS]:
                if not self._is_over:
                    patch.make(manifest, bucket, buffer, self._write)
                    loop.call_soon_threadsafe(self._note_right, [bucket])

        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="weights-patch") as threads:
            list(threads.map(work, range(HASH_THREADS)))

    # The sources

    async def _follow(self, source: PullSource) -> None:
        """Update what `source` has until it has everything or is dropped."""
        while not source.is_dropped:
            try:
                changes = 0
                while source.has != EVERYTHING:
                    changes = await self._ask_what_it_has(source, changes)
                    await asyncio.sleep(POLL_S)
                return
            except FAILURES as e:
                self._note_trouble(source, e)
                source.has = source.getting = 0
            await asyncio.sleep(source.paused_until - time.monotonic())

    async def _ask_what_it_has(self, source: PullSource, changes: int) -> int:
        """Ask for what differs from the state after so many changes; return their number now."""
        size = self._wanted.num_bytes

        def note_queued() -> None:
            if source.had_all:
                raise EOFError(REFUSAL)
            source.refusals = 0

        async with self._asked(source, ASK_HAVE, changes, size, note_queued) as answer:
            connection, sign = answer
            if sign == PART:
                found = unpack_holdings(await connection.receive(holdings_size(size)), size)
            elif sign in (ALL, BUSY):  # a source with many connections has everything
                found = Holdings(changes, EVERYTHING, 0)
            else:
                raise ProtocolError(OTHER_PROTOCOL)
        source.failures = source.refusals = 0
        if not source.is_known or found.changes != changes:
            source.news_at = time.monotonic()
        source.has, source.getting, source.is_known = found.verified, found.getting, True
        source.had_all |= found.verified == EVERYTHING
        self._news.set()
        return found.changes

    def _look_after(self) -> None:
        """Steal slow transfers, follow sources, report. Raises WeightsError if the pull is
        hopeless."""
        now, choice = time.monotonic(), self._choice
        for transfer in list(choice.in_flight):
            if transfer.received:
                self._progress_at = max(self._progress_at, transfer.last_at)
            if choice.is_overdue(transfer, now):
                choice.steal(transfer, now)
                self._pulling[transfer].cancel()
        for source in choice.sources:
            task = self._following.get(source)
            if not source.is_dropped and (task is None or (task.done() and not source.has)):
                following = self._follow(source)
                self._following[source] = asyncio.get_running_loop().create_task(following)
        self._news.set()  # pauses end
        last = f"; last {self._trouble}" if self._trouble else ""
        if all(s.is_dropped for s in choice.sources) and not choice.in_flight:
            why = f"no source serves it{last}" if choice.sources else "no node holds it"
            raise WeightsError(f"{self._about}: {why}")
        if now - self._progress_at > self._timeout_s:
            raise WeightsError(f"{self._about}: nothing arrived for {self._timeout_s:g} s{last}")
        if now >= self._report_due:
            self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._report_due = time.monotonic() + PROGRESS_S
            w, num_sources = self._wanted, sum(s.num_streams > 0 for s in self._choice.sources)
            progress = (w.policy_version, self._verified_bytes, w.num_bytes, num_sources)
            self._on_progress(WeightsProgress(*progress))

    def _note_right(self, buckets: Iterable[int]) -> None:
        """These buckets are in the file, verified."""
        for bucket in buckets:
            start, end = bucket_range(bucket, self._wanted.num_bytes)
            self._choice.todo &= ~(1 << bucket)
            self._verified_bytes += end - start
            if self._held is not None:
                self._held.verified(bucket)
        self._note_progress()

    def _note_progress(self) -> bool:
        """Return whether the pull is still running."""
        self._progress_at = time.monotonic()
        return not self._is_over

    def _note_trouble(
        self, source: PullSource, e: Exception | str, *, is_refusal: bool = False
    ) -> None:
        """A source has failed and is not asked for a moment: with jitter, as the nodes of a run
        fail together and should not return together."""
        number = e.errno if isinstance(e, OSError) else None
        text = os.strerror(number) if number is not None and number > 0 else str(e)
        self._trouble = f"{join_address(*source.addresses[0])}: {text or 'timed out'}"
        is_refusal |= isinstance(e, EOFError | ProtocolError)
        source.failures += 1
        source.refusals = source.refusals + 1 if is_refusal else 0
        pause_s = min(MAX_PAUSE_S, 0.05 * 2 ** min(source.failures, 10))
        source.pause(time.monotonic(), pause_s * random.uniform(0.5, 1.0))

    def _note_bad(self, source: PullSource, reason: str) -> None:
        """A source has sent wrong bytes: it is dropped, and reported."""
        source.is_bad = True
        self._trouble = f"{join_address(*source.addresses[0])}: {reason}"
        if self._on_bad is not None:
            self._on_bad(source.node, reason)

    def _note_pause(self, source: PullSource) -> None:
        """A source is busy, or does not have the manifest yet."""
        pause_s = min(MAX_PAUSE_S, self._timeout_s / 2) * random.uniform(0.5, 1.0)
        source.pause(time.monotonic(), pause_s)

    def _source(self, source: WeightsSource) -> PullSource:
        ticket = source.ticket.encode()
        if not 0 < len(ticket) <= MAX_TICKET_BYTES:
            raise WeightsError(f"{self._about}: not a ticket: {source.ticket[:20]!r}")
        addresses = tuple(parse_address(a) for a in source.addresses)
        if not addresses:
            raise WeightsError(f"{self._about}: {source.node[:80]!r} has no address")
        return PullSource(source.node, addresses, ticket, news_at=time.monotonic())

    def _require_sense(self, wanted: Wanted, node: str) -> None:
        if not 0 < len(node.encode()) <= MAX_NAME_BYTES:
            raise WeightsError(f"{self._about}: not a node's name: {node[:20]!r}")
        if not 0 < wanted.num_bytes <= MAX_BYTES:
            raise WeightsError(f"{self._about}: cannot have {wanted.num_bytes} bytes")
        if not 0 < wanted.manifest_bytes <= MAX_MANIFEST_BYTES:
            raise WeightsError(
                f"{self._about}: its manifest cannot have {wanted.manifest_bytes} bytes"
            )
        digits = wanted.digest
        if len(digits) != 2 * DIGEST_BYTES or not set(digits) <= set("0123456789abcdef"):
            raise WeightsError(f"{self._about}: not a digest: {digits[:80]!r}")


async def _to_the_end(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Run `act` in a thread. Cancelled, this returns once `act` has: it uses the pull's file."""
    working = asyncio.ensure_future(in_thread(act, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.wait({working})
