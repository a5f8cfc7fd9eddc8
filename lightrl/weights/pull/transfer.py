"""Weights over plain TCP: fetches a version from those who hold it or are at it themselves, and
proves that it is that version.

Owns one transfer: its sources, files, progress and end. `follow.py` learns what the sources have,
`swarm.py` decides whom to ask for what, the threads of `fetch.py` do it; the event loop only waits.
Decides neither what to pull nor from whom. The other side is `serve/server.py`. Must not import
torch.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightrl.errors import ProtocolError, WeightsError
from lightrl.messages.fields import MAX_SOURCES
from lightrl.messages.weights import WeightsProgress, WeightsSource
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread, taken_in_thread
from lightrl.weights.machine import scratch
from lightrl.weights.machine.leftovers import allocated_bytes, open_partial, partial_path
from lightrl.weights.pull.connections import parse_address
from lightrl.weights.pull.fetch import Fetch
from lightrl.weights.pull.fill import Make, allocate, fill
from lightrl.weights.pull.follow import Follower
from lightrl.weights.pull.swarm import Source, Swarm
from lightrl.weights.serve.request import MAX_NAME_BYTES, MAX_TICKET_BYTES
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import MAX_BYTES, num_buckets
from lightrl.weights.version.manifest import (
    DIGEST_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    VersionFile,
    decode,
    manifest_path,
    read_encoded,
)

logger = logging.getLogger(__name__)

TICK_S = 0.1  # sources are looked after so often
PROGRESS_S = 0.25
RATED_AFTER_S = 0.1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to pull, as PublishWeights (or a DeltaOffer) says it.

    Example: Wanted(4, "9f3a...", num_bytes=2112512, manifest_bytes=8190)
    """

    policy_version: int
    digest: str
    num_bytes: int
    manifest_bytes: int


@dataclass(frozen=True, slots=True)
class PullStats:
    """What one pull cost. `num_bytes` were transferred; a resumed pull needs fewer than the version
    has."""

    num_bytes: int
    seconds: float
    # of num_bytes: from others than the last of the sources, which is the trainer
    peer_bytes: int = 0
    # by node
    by_source: dict[str, int] = field(default_factory=dict)


class Pull:
    """One version on its way to `path`. `await run()` once; cancelling it ends within seconds.

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
        streams: int = 4,
        timeout_s: float = 60.0,
        on_bad: Callable[[str, str], None] | None = None,
        on_progress: Callable[[WeightsProgress], None] | None = None,
        order: int | None = None,
    ) -> None:
        """`node`: this one, for which the tickets are. `server`: serves what is proved meanwhile,
        and the whole version at the end, until it is retired there. `on_bad(node, reason)` and
        `on_progress` are called in the event loop, the latter each PROGRESS_S. `order`: which of
        the pullers this is, None = by its name: each begins elsewhere in the file. Raises
        WeightsError for what cannot be a version."""
        self._about = f"version {wanted.policy_version}"
        self._require_sense(wanted, node)
        self._wanted = wanted
        self._path = path
        self._server = server
        self._on_bad = on_bad
        self._on_progress = on_progress
        self._num_streams = max(1, min(streams, num_buckets(wanted.num_bytes)))
        if order is None:
            order = int.from_bytes(hashlib.blake2b(node.encode(), digest_size=4).digest(), "little")
        swarm = Swarm(num_buckets(wanted.num_bytes), order, self._num_streams)
        credentials = (wanted.digest, wanted.policy_version, node)
        self._fetch = Fetch(swarm, credentials, timeout_s, wanted.num_bytes)
        sizes = (wanted.num_bytes, wanted.manifest_bytes)
        self._follower = Follower(self._fetch, wanted.digest, wanted.policy_version, sizes, node)
        self._following: dict[Source, asyncio.Task[None]] = {}
        self._is_running = False
        self._manifest: Manifest | None = None
        self._progress_due = 0.0
        self._begun_at = time.monotonic()
        self._is_open = asyncio.Event()

    @property
    def missing_bytes(self) -> int:
        return self._wanted.num_bytes - self._fetch.proved_bytes

    @property
    def rate(self) -> float:
        """Bytes/s that have come so far; 0 while it is too early to say."""
        seconds = time.monotonic() - self._begun_at
        return self._fetch.received.total() / seconds if seconds >= RATED_AFTER_S else 0.0

    async def opened(self) -> Manifest:
        """As soon as `fill` may be called."""
        await self._is_open.wait()
        return self.manifest

    def hold(self, *, is_on_hold: bool = True) -> None:
        """While on hold it asks nobody, but serves what it has: somebody is about to `fill` it."""
        self._fetch.hold(is_on_hold=is_on_hold)

    async def allocate(self) -> None:
        """While on hold: has memory taken for what is to come, so that `fill` need not; until it is
        cancelled, or has all."""
        await self.opened()
        await allocate(self._fetch, partial_path(self._path), self._wanted.num_bytes)

    async def fill(self, make: Make, buckets: int) -> int:
        """While on hold: has what is missing of these buckets (bits) made by `make(bucket, out)`,
        in threads; returns the bytes. Raises what `make` raises, WeightsError for a full disk."""
        act = in_thread(fill, self._fetch, self._wanted.num_bytes, make, buckets)
        working = asyncio.ensure_future(act)
        try:
            return await asyncio.shield(working)
        finally:
            await asyncio.wait({working})  # it uses what belongs to the caller

    @property
    def file(self) -> VersionFile:
        """The version at `path`; complete once `run` has returned."""
        w, beside = self._wanted, manifest_path(self._path)
        return VersionFile(w.policy_version, w.digest, w.num_bytes, str(self._path), str(beside))

    @property
    def manifest(self) -> Manifest:
        """Proved. Once `run` has returned, or `opened`."""
        assert self._manifest is not None
        return self._manifest

    def add_sources(self, sources: Sequence[WeightsSource]) -> None:
        """Before and while it runs: in the order in which they should be asked, the trainer last.
        Known ones keep what was learned of them, except that refusals are forgotten. Raises
        WeightsError for an address that nobody could connect to."""
        fresh = [self._source(s) for s in sources[:MAX_SOURCES]]
        swarm, lock = self._fetch.swarm, self._fetch.lock
        with lock:
            known = {(s.node, s.addresses, s.ticket): s for s in swarm.sources}
            named = {s.node for s in fresh}
            listed = [known.get((s.node, s.addresses, s.ticket), s) for s in fresh]
            kept = [s for s in swarm.sources if s.node not in named]
            swarm.sources = kept + listed
            for source in listed:
                source.refusals = 0
            for source in known.values():
                if source not in swarm.sources:  # its node has begun anew
                    source.is_bad = True
            lock.notify_all()
        if self._is_running:
            self._follow()

    async def run(self) -> PullStats:
        """Every bucket proved; `path` appears complete or not at all, the manifest beside it.

        A source that cannot be reached or breaks off is tried again and again; waiting in a queue
        is no failure however long it takes. Raises WeightsError when nothing has arrived for
        `timeout_s`, not even a sign that we are queued; sooner if every source keeps refusing or
        sent wrong bytes; at once for a disk that is too small. The partial file stays, for the next
        pull; it is the owner's to remove.
        """
        begun_at = time.monotonic()
        await in_thread(self._require_space)
        await self._attend(self._work)
        return self._stats(time.monotonic() - begun_at)

    async def run_for_manifest(self) -> VersionFile:
        """Instead of `run`: only the manifest comes, proved; at `path` nothing does."""
        await self._attend(self._find_manifest)
        return self.file

    async def _attend(self, act: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Does it, and looks after the sources meanwhile."""
        if not self._fetch.swarm.sources:
            raise WeightsError(f"{self._about}: nobody holds it")
        self._is_running, self._begun_at = True, time.monotonic()
        self._fetch.note_progress()
        self._follow()
        work = asyncio.get_running_loop().create_task(act())
        is_done = False
        try:
            while not work.done() and self._fetch.failure is None:
                await asyncio.wait({work}, timeout=TICK_S)
                self._look_after()
            if self._fetch.failure is None:
                await work
                is_done = True
        finally:
            self._fetch.end("cancelled")
            await self._stop(work)
            if not is_done and self._server is not None:
                self._server.retire(self._wanted.digest)
        if not is_done:
            raise WeightsError(f"{self._about}: {self._fetch.failure}")

    async def _work(self) -> None:
        manifest = await self._find_manifest()
        part = partial_path(self._path)
        try:
            file, written = await taken_in_thread(
                lambda opened: os.close(opened[0]), open_partial, part, manifest.num_bytes
            )
        except OSError as e:
            raise WeightsError(f"{self._about}: {part}: cannot be written: {e.strerror}") from e
        partial = None
        try:
            if self._server is not None:
                partial = self._server.serve_partial(replace(self.file, path=str(part)))
        finally:
            self._fetch.open(manifest, file, written, partial)
            self._is_open.set()
        await self._run_streams()
        if self._fetch.failure is None:
            part.replace(self._path)
            if partial is not None:
                partial.complete()

    async def _run_streams(self) -> None:
        """Until all have ended, also when this is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(self._num_streams, thread_name_prefix="weights-pull") as threads:
            runs: list[asyncio.Future[None]] = []
            each = range(self._num_streams)
            try:
                runs.extend(loop.run_in_executor(threads, self._fetch.run) for _ in each)
                await asyncio.gather(*(asyncio.shield(r) for r in runs))
            except RuntimeError as e:  # no more threads
                self._fetch.end(str(e))
            finally:
                self._fetch.end("cancelled")
                if runs:
                    await asyncio.wait(runs)

    async def _find_manifest(self) -> Manifest:
        """Of an earlier pull, or from the first source that has it."""
        digest, beside = self._wanted.digest, manifest_path(self._path)
        with contextlib.suppress(OSError, WeightsError):
            encoded = await in_thread(read_encoded, self.file)
            self._manifest = await in_thread(decode, encoded, digest)
        while self._manifest is None:
            self._follower.known.clear()
            for source in list(self._fetch.swarm.sources):
                if source.is_known and source.can_be_asked(time.monotonic()):
                    self._manifest = await self._manifest_of(source, beside)
                if self._manifest is not None:
                    break
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._follower.known.wait()
        if self._manifest.num_bytes != self._wanted.num_bytes:
            raise WeightsError(
                f"{self._about}: has {self._manifest.num_bytes} bytes, "
                f"was published with {self._wanted.num_bytes}"
            )
        return self._manifest

    async def _manifest_of(self, source: Source, beside: Path) -> Manifest | None:
        try:
            encoded = await self._follower.manifest(source)
        except (OSError, EOFError, ProtocolError) as e:
            self._fetch.note_trouble(source, e, is_refusal=isinstance(e, EOFError))
            return None
        if encoded is None:
            with self._fetch.lock:
                source.pause(time.monotonic(), TICK_S)
            return None
        try:
            manifest = await in_thread(decode, encoded, self._wanted.digest)
        except WeightsError as e:
            self._fetch.note_bad(source, str(e))
            return None
        try:
            await in_thread(beside.write_bytes, encoded)
        except OSError as e:
            raise WeightsError(f"{self._about}: {beside}: cannot be written: {e.strerror}") from e
        return manifest

    def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        for source in self._fetch.swarm.sources:
            task = self._following.get(source)
            if not source.is_lost and (task is None or (task.done() and not source.has)):
                self._following[source] = loop.create_task(self._follower.follow(source))

    def _look_after(self) -> None:
        fetch = self._fetch
        fetch.look_after()
        while fetch.bad:
            source, reason = fetch.bad.popleft()
            if self._on_bad is not None:
                self._on_bad(source.node, reason)
        if fetch.doubted:
            fetch.doubted.clear()
            self._follow()
        now = time.monotonic()
        if self._on_progress is not None and now >= self._progress_due:
            self._progress_due = now + PROGRESS_S
            w, num_sources = self._wanted, sum(s.num_streams > 0 for s in fetch.swarm.sources)
            self._on_progress(
                WeightsProgress(w.policy_version, fetch.proved_bytes, w.num_bytes, num_sources)
            )

    async def _stop(self, work: asyncio.Task[Any]) -> None:
        tasks = [work, *self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await retry_on_resource_limit(
            lambda: in_thread(self._fetch.close), "the end of a pull", logger.warning
        )
        self._look_after()

    def _stats(self, seconds: float) -> PullStats:
        received = self._fetch.received
        origin = self._fetch.swarm.sources[-1].node
        total = received.total()
        return PullStats(total, seconds, total - received[origin], dict(received))

    def _source(self, source: WeightsSource) -> Source:
        ticket = source.ticket.encode()
        if not 0 < len(ticket) <= MAX_TICKET_BYTES:
            raise WeightsError(f"{self._about}: not a ticket: {source.ticket[:20]!r}")
        addresses = tuple(parse_address(a) for a in source.addresses)
        if not addresses:
            raise WeightsError(f"{self._about}: {source.node[:80]!r} has no address")
        return Source(source.node, addresses, ticket, time.monotonic())

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

    def _require_space(self) -> None:
        """Raises WeightsError if the version does not fit on the disk: before anything is
        transferred."""
        folder, begun = self._path.parent, allocated_bytes(partial_path(self._path))
        try:
            free = shutil.disk_usage(folder).free
        except OSError as e:
            raise WeightsError(f"{folder}: cannot be written: {e.strerror}") from e
        if scratch.growing_bytes(rest := self._wanted.num_bytes - begun) > free:
            raise WeightsError(
                f"{self._about}: needs {rest / 1e9:.3g} GB more in {folder}, "
                f"where {free / 1e9:.3g} GB are free"
            )
