"""The differences between versions that one node uses instead of pulling a version whole, and keeps
for its peers.

Owns when a difference is worth its while, the ones that are here, and what is left of a pull that a
newer version has overtaken. A chain of them is pulled like any version and applied to an older one
that this machine has, whole or not; each bucket that comes of it is proved by the version's own
digests, and what cannot be made so is pulled: so nothing that is wrong or missing here costs more
than time. The pull that is helped is `weights.py`'s.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from lightrl.core.weight_sources import MAX_CHAIN
from lightrl.errors import WeightsError
from lightrl.messages.weights import DeltaOffer, PublishWeights
from lightrl.system.threads import in_thread, taken_in_thread
from lightrl.weights.machine.leftovers import written_buckets, written_bytes
from lightrl.weights.machine.local import (
    LocalVersion,
    close_all,
    close_found,
    close_version,
    open_version,
)
from lightrl.weights.machine.store import Claim, Store
from lightrl.weights.pull.transfer import Pull, PullStats, Wanted
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import num_buckets

if TYPE_CHECKING:  # numpy is loaded with the first difference, in a thread
    from lightrl.weights.delta.file import PackedDelta

logger = logging.getLogger(__name__)

CLEARLY = 0.8  # of what the rest of a version takes: a difference must take less
SETUP_S = 0.03  # what a difference takes besides, however small
MIN_BYTES = 4 << 20  # less of a version is sooner pulled than a difference asked for
PATCH_RATE = 500e6  # bytes/s, while it was not measured
MEASURED_BYTES = 8 << 20  # less says nothing of a rate
DELTA_TIMEOUT_S = 5.0  # without a byte of a difference, after which the version is pulled instead
# of a version that was overtaken: less is not worth its place
OVERTAKEN_SHARE = 0.25

# a pull from the sources of the offer
MakePull = Callable[[PublishWeights, Wanted, Path], Pull]


@dataclass(slots=True)
class Gain:
    """What came by differences, of one version."""

    num_bytes: int = 0
    peer_bytes: int = 0
    patched_bytes: int = 0

    def added_to(self, stats: PullStats) -> PullStats:
        """All that was pulled."""
        return replace(
            stats,
            num_bytes=stats.num_bytes + self.num_bytes,
            peer_bytes=stats.peer_bytes + self.peer_bytes,
        )


@dataclass(slots=True)
class _Base:
    """An older version that is here, open. `buckets`: bits; some of them may be wrong."""

    descriptor: int
    buckets: int
    is_complete: bool
    claim: Claim

    def close(self) -> None:
        """In a thread."""
        os.close(self.descriptor)
        self.claim.release()


@dataclass(slots=True)
class _Route:
    base: _Base
    links: tuple[DeltaOffer, ...]


@dataclass(slots=True)
class _News:
    """The newest offer of the version that is pulled."""

    offer: PublishWeights
    has_come: asyncio.Event = field(default_factory=asyncio.Event)


class Deltas:
    def __init__(self, store: Store, server: WeightServer, make_pull: MakePull) -> None:
        self._store = store
        self._server = server
        self._make_pull = make_pull
        self._kept: dict[str, LocalVersion] = {}  # by digest, oldest first
        self._overtaken: Claim | None = None
        self._line_rate = 0.0  # bytes/s; 0 = not measured
        self._patch_rate = PATCH_RATE
        self._news: _News | None = None

    def offered(self, offer: PublishWeights) -> None:
        """Again, while it is pulled: perhaps with differences."""
        if self._news is not None:
            self._news.offer = offer
            self._news.has_come.set()

    @contextlib.asynccontextmanager
    async def helping(self, pull: Pull, offer: PublishWeights, gain: Gain) -> AsyncIterator[None]:
        """While the pull runs, which has not begun yet."""
        if offer.deltas:
            pull.hold()
        work = asyncio.create_task(self._help(pull, offer, gain), name="differences")
        try:
            yield
        finally:
            work.cancel()
            [ended] = await asyncio.gather(work, return_exceptions=True)
            if isinstance(ended, Exception):
                logger.warning("differences: %r", ended)

    async def _help(self, pull: Pull, offer: PublishWeights, gain: Gain) -> None:
        self._serve_kept(offer.policy_version)
        tried: set[str] = set()  # digests of differences
        self._news = news = _News(offer)
        try:
            while True:
                news.has_come.clear()
                await self._try(pull, news.offer, gain, tried)
                await news.has_come.wait()
        finally:
            self._news = None
            if pull.rate and not gain.patched_bytes:
                self._line_rate = pull.rate

    async def keep_overtaken(self, claim: Claim) -> None:
        """Of a version that was not pulled to its end: what is there of it may be patched."""
        written = await in_thread(_written, claim)
        if written >= OVERTAKEN_SHARE * claim.num_bytes:
            before, self._overtaken = self._overtaken, claim
        else:
            before = claim
        if before is not None:
            await in_thread(before.release)

    async def drop_overtaken(self) -> None:
        if self._overtaken is not None:
            claim, self._overtaken = self._overtaken, None
            await in_thread(claim.release)

    async def close(self) -> None:
        await self.drop_overtaken()
        kept, self._kept = list(self._kept.values()), {}
        await in_thread(close_all, kept)

    async def _try(self, pull: Pull, offer: PublishWeights, gain: Gain, tried: set[str]) -> None:
        """The best way from what is here; if there is none that pays, nothing."""
        base: _Base | None = None
        try:
            _check(offer)
            route = await self._route(pull, offer, tried)
            if route is None:
                return
            base = route.base
            tried.update(link.digest for link in route.links)
            pull.hold()
            await self._go(pull, offer, route, gain)
        except (WeightsError, OSError, TimeoutError) as e:
            logger.warning(
                "version %d: pulled as it is, not by differences: %s",
                offer.policy_version,
                e if str(e) else "they did not come",
            )
        finally:
            pull.hold(is_on_hold=False)
            if base is not None:
                await in_thread(base.close)

    async def _route(self, pull: Pull, offer: PublishWeights, tried: set[str]) -> _Route | None:
        """From the newest version that is here, if that pays."""
        for first in reversed(range(len(offer.deltas))):
            links = offer.deltas[first:]
            if any(link.digest in tried for link in links):
                return None
            base = await taken_in_thread(
                _close_base, self._open_base, links[0].base, offer.num_bytes
            )
            if base is None:
                continue
            if self._pays(pull, links, base, offer.num_bytes):
                return _Route(base, links)
            await in_thread(base.close)
        return None

    def _pays(self, pull: Pull, links: tuple[DeltaOffer, ...], base: _Base, num_bytes: int) -> bool:
        """Whether it is clearly sooner there; while nothing is known of the line: fewer bytes."""
        rest = pull.missing_bytes
        to_come = sum(k.num_bytes + k.manifest_bytes for k in links if k.digest not in self._kept)
        if not base.is_complete:
            have = base.buckets.bit_count() / num_buckets(num_bytes)
            to_come += int((1 - have) * rest)
        seconds = 0.0
        if rate := pull.rate or self._line_rate:
            seconds = rate * (SETUP_S + rest / self._patch_rate)  # in bytes of the line
        return rest >= MIN_BYTES and to_come + seconds < CLEARLY * rest

    async def _go(self, pull: Pull, offer: PublishWeights, route: _Route, gain: Gain) -> None:
        """Raises WeightsError, OSError, TimeoutError."""
        allocating = asyncio.create_task(pull.allocate(), name="memory for a version")
        try:
            chain = [await self._open(link, offer, gain) for link in route.links]
        finally:
            allocating.cancel()
            await asyncio.gather(allocating, return_exceptions=True)
        from lightrl.weights.delta.file import check_chain
        from lightrl.weights.delta.patch import Patch

        manifests = [delta.manifest for delta in chain]
        check_chain(manifests, route.links[0].base, offer.digest, offer.num_bytes)
        async with asyncio.timeout(DELTA_TIMEOUT_S):
            target = await pull.opened()
        begin = time.monotonic()
        patch = Patch(route.base.descriptor, route.base.is_complete, chain, target)
        made = await pull.fill(patch.make, route.base.buckets)
        gain.patched_bytes += made
        if made >= MEASURED_BYTES:
            self._patch_rate = made / (time.monotonic() - begin)

    async def _open(self, link: DeltaOffer, offer: PublishWeights, gain: Gain) -> "PackedDelta":
        if link.digest not in self._kept:
            await self._keep(await self._get(link, offer, gain), offer)
        file = self._kept[link.digest].file
        delta = await in_thread(_open_packed, Path(file.path), file.num_bytes)
        if (delta.manifest.base, delta.manifest.target) != (link.base, link.target):
            raise WeightsError(f"the difference {link.digest[:12]} is one between other versions")
        return delta

    async def _get(self, link: DeltaOffer, offer: PublishWeights, gain: Gain) -> LocalVersion:
        """As any version: from this machine, else from those who have it."""
        claim = await taken_in_thread(Claim.release, self._store.claim, link.digest, link.num_bytes)
        try:
            async with claim.turn() as path:
                # it is small
                found = await taken_in_thread(close_found, claim.find_proved, threading.Event())
                version = None if found is None else found[0]
                if version is None:
                    wanted = Wanted(
                        offer.policy_version, link.digest, link.num_bytes, link.manifest_bytes
                    )
                    pull = self._make_pull(offer, wanted, path)
                    stats = await pull.run()
                    gain.num_bytes += stats.num_bytes
                    gain.peer_bytes += stats.peer_bytes
                    version = await taken_in_thread(close_version, open_version, pull.file)
            if version is None:
                raise WeightsError(f"{path}: gone")
        except BaseException:
            await in_thread(claim.release)
            raise
        version.on_close.append(claim.release)
        return version

    async def _keep(self, version: LocalVersion, offer: PublishWeights) -> None:
        """For peers, as long as there are not too many."""
        self._kept[version.file.digest] = version
        self._serve_kept(offer.policy_version)
        used = {link.digest for link in offer.deltas}
        for digest, kept in list(self._kept.items()):
            total = sum(v.file.num_bytes for v in self._kept.values())
            if (len(self._kept) <= MAX_CHAIN and total <= offer.num_bytes) or digest in used:
                return
            del self._kept[digest]
            try:
                await self._server.retire(digest)
            finally:
                await in_thread(kept.close)

    def _serve_kept(self, policy_version: int) -> None:
        """For tickets of this version."""
        for version in self._kept.values():
            try:
                self._server.publish(replace(version.file, policy_version=policy_version))
            except WeightsError as e:  # peers have it from elsewhere
                logger.warning("a difference is not served here: %s", e)

    def _open_base(self, digest: str, num_bytes: int) -> _Base | None:
        """In a thread."""
        claim = self._store.claim(digest, num_bytes)
        whole = (1 << num_buckets(num_bytes)) - 1
        try:
            for version, _ in claim.found():
                descriptor = os.dup(version.descriptor)  # and its lock
                version.close()
                return _Base(descriptor, whole, is_complete=True, claim=claim)
            for path in claim.partials():
                if (base := _partial_base(path, num_bytes, claim)) is not None:
                    return base
        except BaseException:
            claim.release()
            raise
        claim.release()
        return None


def _close_base(base: _Base | None) -> None:
    if base is not None:
        base.close()


def _check(offer: PublishWeights) -> None:
    """Raises WeightsError unless the differences lead to this version, one after the other."""
    links = offer.deltas
    if any(older.target != newer.base for older, newer in pairwise(links)) or (
        links and links[-1].target != offer.digest
    ):
        raise WeightsError("the differences offered do not lead to it")
    if sum(link.num_bytes for link in links) > offer.num_bytes:
        raise WeightsError("the differences offered are larger than it")


def _partial_base(path: Path, num_bytes: int, claim: Claim) -> _Base | None:
    """None if nothing was written of it, or it is complete by now and has another name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    buckets = sum(1 << bucket for bucket in written_buckets(descriptor, num_bytes))
    if not buckets:
        os.close(descriptor)
        return None
    return _Base(descriptor, buckets, is_complete=False, claim=claim)


def _written(claim: Claim) -> int:
    """Bytes, of the partial file that has most of them. In a thread."""
    return max((written_bytes(path) for path in claim.partials()), default=0)


def _open_packed(path: Path, size: int) -> "PackedDelta":
    from lightrl.weights.delta.file import open_packed

    return open_packed(path, size)
