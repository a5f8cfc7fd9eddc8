"""A pull of one version over plain TCP, from nodes that hold it or pull it themselves.

Owns the sources of one pull, its files, progress and end. `follow.py` asks sources what they have,
`swarm.py` chooses a source for each bucket, the threads of `fetch.py` pull; the event loop only
waits. The other side is `serve/server.py`. Must not import torch.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lightrl.errors import ProtocolError, WeightsError
from lightrl.messages.fields import MAX_SOURCES
from lightrl.messages.weights import WeightsProgress, WeightsSource
from lightrl.system.threads import cancel, in_thread, taken_in_thread
from lightrl.weights.machine.local import open_partial, partial_path, verify_buckets
from lightrl.weights.pull.fetch import Fetch, Wanted, parse_address
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

if TYPE_CHECKING:  # numpy is loaded with the first delta
    from lightrl.weights.delta.patch import Patch

P = ParamSpec("P")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

TICK_S = 0.1  # between looks at the sources
PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class PullLimits:
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
        self._path = path
        self._server = server
        self._on_bad = on_bad
        self._on_progress = on_progress
        buckets = num_buckets(wanted.num_bytes)
        self._num_streams = max(1, min(limits.streams, buckets))
        seed = hashlib.blake2b(node.encode(), digest_size=4).digest()
        swarm = Swarm(buckets, int.from_bytes(seed, "little"), self._num_streams)
        self._fetch = Fetch(swarm, wanted, node, limits.timeout_s)
        self._follower = Follower(self._fetch)
        self._following: dict[Source, asyncio.Task[None]] = {}
        self._is_running = False
        self._manifest: Manifest | None = None
        self._progress_due = 0.0

    @property
    def missing_bytes(self) -> int:
        return self._wanted.num_bytes - self._fetch.verified_bytes

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
                if source not in swarm.sources:  # its node has started again
                    source.is_bad = True
            lock.notify_all()
        if self._is_running:
            self._follow()

    async def run(self, patch: "Patch | None" = None) -> PullStats:
        """Pull every bucket and verify it, but those that `patch` makes: `path` appears complete or
        not at all, the manifest beside it.

        A source that cannot be reached or breaks off is tried again; waiting in a queue is no
        failure, however long it takes. Raises WeightsError when nothing has arrived for the
        timeout, sooner if every source refuses or sent wrong bytes, and for a full disk. The
        partial download stays, for the next pull; its owner removes it.
        """
        begun_at = time.monotonic()
        await self._attend(lambda: self._work(patch))
        received = self._fetch.received
        origin, total = self._fetch.swarm.sources[-1].node, received.total()
        seconds = time.monotonic() - begun_at
        return PullStats(total, seconds, total - received[origin], dict(+received))

    async def run_for_manifest(self) -> VersionFile:
        """Pull only the manifest and verify it; nothing appears at `path`."""
        await self._attend(self._find_manifest)
        return self.file

    async def _attend(self, act: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run `act`, and look after the sources meanwhile."""
        if not self._fetch.swarm.sources:
            raise WeightsError(f"{self._about}: nobody holds it")
        self._is_running = True
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
                await self._server.retire(self._wanted.digest, 0.0)
        if not is_done:
            raise WeightsError(f"{self._about}: {self._fetch.failure}")

    async def _work(self, patch: "Patch | None") -> None:
        manifest = await self._find_manifest()
        part, fetch = partial_path(self._path), self._fetch
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
            fetch.open(manifest, file, partial)
        fetch.note_right(
            await _to_the_end(verify_buckets, file, manifest, written, fetch.note_progress)
        )
        if patch is not None and not fetch.is_over:
            try:
                await _to_the_end(fetch.make, patch)
            except (WeightsError, OSError) as e:
                logger.warning("%s: what deltas cannot make of it is pulled: %s", self._about, e)
        await _to_the_end(fetch.run, self._num_streams)
        if fetch.failure is None:
            part.replace(self._path)
            if partial is not None:
                partial.complete()

    async def _find_manifest(self) -> Manifest:
        """Read the manifest of an earlier pull, or ask the sources until one has it."""
        digest, beside = self._wanted.digest, manifest_path(self._path)
        with contextlib.suppress(OSError, WeightsError):
            encoded = await in_thread(read_encoded, self.file)
            self._manifest = await in_thread(decode, encoded, digest)
        while self._manifest is None:
            self._follower.known.clear()
            for source in list(self._fetch.swarm.sources):
                if source.is_known and source.is_usable(time.monotonic()):
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
            if not source.is_dropped and (task is None or (task.done() and not source.has)):
                self._following[source] = loop.create_task(self._follower.follow(source))

    def _look_after(self) -> None:
        fetch = self._fetch
        fetch.look_after()
        while fetch.bad:
            source, reason = fetch.bad.popleft()
            if self._on_bad is not None:
                self._on_bad(source.node, reason)
        now = time.monotonic()
        if self._on_progress is not None and now >= self._progress_due:
            self._progress_due = now + PROGRESS_S
            w, num_sources = self._wanted, sum(s.num_streams > 0 for s in fetch.swarm.sources)
            self._on_progress(
                WeightsProgress(w.policy_version, fetch.verified_bytes, w.num_bytes, num_sources)
            )

    async def _stop(self, work: asyncio.Task[Any]) -> None:
        await cancel(work, *self._following.values())
        self._fetch.close()
        self._look_after()

    def _source(self, source: WeightsSource) -> Source:
        ticket = source.ticket.encode()
        if not 0 < len(ticket) <= MAX_TICKET_BYTES:
            raise WeightsError(f"{self._about}: not a ticket: {source.ticket[:20]!r}")
        addresses = tuple(parse_address(a) for a in source.addresses)
        if not addresses:
            raise WeightsError(f"{self._about}: {source.node[:80]!r} has no address")
        return Source(source.node, addresses, ticket, news_at=time.monotonic())

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
