"""The versions of the weights that one node has: the one that its engine holds, and the next.

Owns what is pulled, proved, served to others and given back; the next version comes while the
engine serves, and while it loads. What is loaded, and when, is `agent.py`'s business; where files
lie `weights/machine/store.py`'s. Never blocks the event loop: files are read and closed in threads.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lightrl.config_sections import Weights
from lightrl.errors import WeightsError
from lightrl.messages import (
    MAX_TEXT,
    BadSource,
    Message,
    PublishWeights,
    WeightsFailed,
    WeightsProgress,
    WeightsReady,
    WeightsSource,
)
from lightrl.rollout.deltas import DELTA_TIMEOUT_S, Deltas, Gain
from lightrl.system.addresses import WILDCARD, join_address, split_address
from lightrl.system.child import is_for_lack, retry_on_resource_limit
from lightrl.system.threads import in_thread, taken_in_thread
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
from lightrl.weights.version.manifest import VersionFile

P = ParamSpec("P")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

NOTHING_PULLED = PullStats(0, 0.0)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that is proved and can be loaded. What it took to get it."""

    offer: PublishWeights
    version: LocalVersion
    # the trainer in this process serves it, as long as it likes
    is_own: bool
    stats: PullStats = NOTHING_PULLED
    seconds: float = 0.0
    delta_bytes: int = 0  # of what was pulled

    @property
    def file(self) -> VersionFile:
        return replace(self.version.file, policy_version=self.offer.policy_version)


class NodeWeights:
    """`run` in a task; `await close()` when that has ended."""

    def __init__(
        self,
        node: str,
        settings: Weights,
        store: Store,
        server: WeightServer,
        coordinator_host: str,
        send: Callable[[Message], None],
        serves: Callable[[], tuple[int, str] | None],
    ) -> None:
        """`serves`: version and digest that the engine has loaded, if it serves now."""
        self.wanted: PublishWeights | None = None  # the newest version offered
        self.progress: WeightsProgress | None = None  # of the one that is pulled
        self._node = node
        self._settings = settings
        self._store = store
        self._server = server
        self._coordinator_host = coordinator_host
        self._send = send
        self._serves = serves
        self._is_offered = asyncio.Event()
        self._pull: Pull | None = None
        self._deltas = Deltas(store, server, partial(self._make_pull, timeout_s=DELTA_TIMEOUT_S))
        self._next: Fetched | None = None  # to be loaded
        self._is_next = asyncio.Event()
        self._held: Fetched | None = None  # loaded, or being loaded
        self._loading: Fetched | None = None
        self._chores: set[asyncio.Task[None]] = set()

    def offer(self, message: PublishWeights) -> None:
        self.wanted = message
        self._is_offered.set()

    async def next(self) -> Fetched:
        """The newest version that is to be loaded, when it is here; from now on this one is held,
        and the one before is neither served nor kept. `loaded` must follow."""
        await self._is_next.wait()
        self._is_next.clear()
        fetched, self._next = self._next, None
        assert fetched is not None
        self._loading = fetched
        before, self._held = self._held, fetched
        if before is not None and before.version is not fetched.version:
            self._give_back(before)
        return fetched

    def loaded(self) -> None:
        """Or it could not be, or the engine has died."""
        self._loading = None

    def reject(self, fetched: Fetched) -> None:
        """It could not be loaded: it is proved once more before it is tried again."""
        if self._held is fetched:
            self._held = None
            self._give_back(fetched)

    async def run(self) -> None:
        """Fetches what is offered, the newest version first."""
        while True:
            await self._is_offered.wait()
            self._is_offered.clear()
            offer = self.wanted
            assert offer is not None
            if self._serves() == (offer.policy_version, offer.digest):
                self._put(None)
                self._send(WeightsReady(offer.policy_version, offer.digest))  # it did not know
                continue
            if self._loading is not None and _are_same(self._loading.offer, offer):
                self._put(None)  # offered again: what there is to say is said when it is loaded
                continue
            try:
                fetched = await self._unless_overtaken(offer)
            except (WeightsError, OSError, RuntimeError) as e:
                if isinstance(e, RuntimeError) and not is_for_lack(e):
                    raise
                self._send(WeightsFailed(offer.policy_version, str(e)[:MAX_TEXT]))
                self._start(self._tidy())  # there may be no room
                continue
            finally:
                self.progress = None
            if fetched is not None and (
                self._loading is None or self._loading.version is not fetched.version
            ):  # else it was taken meanwhile
                self._put(fetched)
                self._start(self._tidy())

    async def close(self) -> None:
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        versions = [f.version for f in (self._next, self._held) if f is not None]
        await in_thread(close_all, versions)
        await self._deltas.close()

    def _put(self, fetched: Fetched | None) -> None:
        """What is to be loaded next; not what was to be until now."""
        before, self._next = self._next, fetched
        if fetched is not None:
            self._is_next.set()
        else:
            self._is_next.clear()
        kept = [f.version for f in (fetched, self._held) if f is not None]
        if before is not None and all(before.version is not version for version in kept):
            self._give_back(before)

    async def _unless_overtaken(self, offer: PublishWeights) -> Fetched | None:
        """None if another version was offered before this one was here."""
        fetching = asyncio.create_task(self._fetch(offer), name="fetch weights")
        try:
            while True:
                newer = asyncio.create_task(self._is_offered.wait(), name="newer weights")
                try:
                    await asyncio.wait({fetching, newer}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    newer.cancel()
                if fetching.done():
                    return fetching.result()
                assert self.wanted is not None
                if not self._goes_on(offer, self.wanted):
                    return None
                self._is_offered.clear()
        except asyncio.CancelledError:
            if fetching.done() and not fetching.cancelled() and fetching.exception() is None:
                self._put(fetching.result())  # in the same turn: `close` gives it back
            raise
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    def _goes_on(self, offer: PublishWeights, newer: PublishWeights) -> bool:
        """Whether what is fetched is still of use. The coordinator takes the newest version only,
        so another one is worth no byte more."""
        if not _are_same(newer, offer):
            return False
        if self._pull is not None:  # offered again: it is to be had elsewhere, too
            self._pull.add_sources(self._reachable(newer.sources))
            self._deltas.offered(newer)
        return True

    async def _fetch(self, offer: PublishWeights) -> Fetched:
        begin = time.monotonic()
        for known in (self._next, self._held):
            if known is not None and known.offer.digest == offer.digest:
                again = Fetched(offer, known.version, known.is_own)
                if not known.is_own:
                    self._server.publish(again.file)  # for its tickets
                return again
        claim = await _taken(Claim.release, self._store.claim, offer.digest, offer.num_bytes)
        try:
            fetched = await self._obtain(claim, offer)
            fetched.version.on_close.append(claim.release)
            return replace(fetched, offer=offer, seconds=time.monotonic() - begin)
        except BaseException:
            self._start(self._drop(claim))
            raise

    async def _obtain(self, claim: Claim, offer: PublishWeights) -> Fetched:
        """From this machine or from others."""
        if (found := await self._find(claim, offer)) is not None:
            return found
        async with claim.turn() as path:
            if (found := await self._find(claim, offer)) is not None:
                return found  # who was in turn before has pulled it
            if self.wanted is not None and _are_same(self.wanted, offer):
                offer = self.wanted  # it may say more by now
            wanted = Wanted(
                offer.policy_version, offer.digest, offer.num_bytes, offer.manifest_bytes
            )
            pull = self._make_pull(offer, wanted, path, self._note_progress)
            self._pull = pull
            gain = Gain()
            try:
                async with self._deltas.helping(pull, offer, gain):
                    stats = await pull.run()
            except BaseException:
                self._start(self._retire(offer.digest))
                raise
            finally:
                self._pull = None
            version = await _taken(close_version, open_version, pull.file)
            if version is None:
                raise WeightsError(f"{path}: gone")
            return Fetched(offer, version, False, gain.added_to(stats), delta_bytes=gain.num_bytes)

    def _make_pull(
        self,
        offer: PublishWeights,
        wanted: Wanted,
        path: Path,
        on_progress: Callable[[WeightsProgress], None] | None = None,
        timeout_s: float = math.inf,
    ) -> Pull:
        """From the sources of the offer."""
        pull = Pull(
            wanted,
            self._node,
            path,
            server=self._server,
            streams=self._settings.streams,
            timeout_s=min(timeout_s, self._settings.timeout_s),
            on_bad=lambda node, reason: self._send(
                BadSource(offer.policy_version, node, reason[:MAX_TEXT])
            ),
            on_progress=on_progress,
        )
        pull.add_sources(self._reachable(offer.sources))
        return pull

    async def _find(self, claim: Claim, offer: PublishWeights) -> Fetched | None:
        """On this machine; proved."""
        is_ended = threading.Event()
        try:
            found = await _taken(close_found, claim.find_proved, is_ended)
        except asyncio.CancelledError:
            is_ended.set()
            raise
        if found is None:
            return None
        fetched = Fetched(offer, *found)
        if not fetched.is_own:
            try:
                self._server.publish(fetched.file)
            except WeightsError as e:  # others have it from elsewhere
                logger.warning("version %d is not served here: %s", offer.policy_version, e)
        return fetched

    def _note_progress(self, progress: WeightsProgress) -> None:
        self.progress = progress

    def _reachable(self, sources: tuple[WeightsSource, ...]) -> tuple[WeightsSource, ...]:
        return tuple(
            replace(s, addresses=tuple(map(self._reachable_address, s.addresses))) for s in sources
        )

    def _reachable_address(self, address: str) -> str:
        """Who listens everywhere can be reached where the coordinator can."""
        found = split_address(address)
        if found is None or found[0] != WILDCARD:
            return address
        return join_address(self._coordinator_host, found[1])

    def _give_back(self, fetched: Fetched) -> None:
        self._start(self._release(fetched))

    async def _release(self, fetched: Fetched) -> None:
        """Peers have a moment to end; then its pages go, if no other node wants it."""
        try:
            if not fetched.is_own:
                await self._retire(fetched.offer.digest)
        finally:
            await _patiently(fetched.version.close)
        await _patiently(self._store.sweep)

    async def _retire(self, digest: str) -> None:
        """Unless equal weights have come meanwhile."""
        if all(f is None or f.offer.digest != digest for f in (self._next, self._held)):
            await self._server.retire(digest)

    async def _tidy(self) -> None:
        await self._deltas.drop_overtaken()
        await _patiently(self._store.sweep)

    async def _drop(self, claim: Claim) -> None:
        """Of a version that did not come. What was pulled of it is a beginning, as long as it is
        wanted; if another version is, it may be what that one is made of."""
        if self.wanted is None or self.wanted.digest == claim.digest:
            await _patiently(claim.release)
        else:
            await self._deltas.keep_overtaken(claim)
        if self.wanted is not None and self.wanted.digest != claim.digest:
            await _patiently(self._store.sweep)

    def _start(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore, name="give back weights")
        self._chores.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            logger.warning("weights were not given back: %s", e)


def _are_same(one: PublishWeights, other: PublishWeights) -> bool:
    return (one.digest, one.policy_version) == (other.digest, other.policy_version)


async def _patiently(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """In a thread; again and again while this machine lacks one."""
    call = partial(in_thread, partial(act, *args, **kwargs))
    return await retry_on_resource_limit(call, "a thread for the weights", logger.warning)


async def _taken(
    give_back: Callable[[Result], object],
    act: Callable[P, Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """The same; what it returns when nobody waits for it any more goes to `give_back`."""
    call = partial(taken_in_thread, give_back, partial(act, *args, **kwargs))
    return await retry_on_resource_limit(call, "a thread for the weights", logger.warning)
