"""The versions of the weights that one node has: the one that its engine holds, and the next.

Owns what is pulled, proved, served to others and given back; the next version comes while the
engine serves, and while it loads. What is loaded, and when, is `agent.py`'s business; where files
lie `weights/machine/store.py`'s. Never blocks the event loop: files are read and closed in threads.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightrl.config.sections import Weights
from lightrl.errors import WeightsError
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.message import Message
from lightrl.messages.weights import (
    BadSource,
    PublishWeights,
    WeightsFailed,
    WeightsProgress,
    WeightsReady,
    WeightsSource,
)
from lightrl.rollout.base import BaseVersion
from lightrl.rollout.deltas import DELTA_TIMEOUT_S, Deltas, Gain
from lightrl.rollout.fetched import Announced, Fetched, are_same, wanted_of
from lightrl.rollout.threads import eventually, find_proved, taken
from lightrl.system.addresses import not_everywhere
from lightrl.system.child import is_for_lack
from lightrl.system.threads import in_thread
from lightrl.weights.machine.local import close_all, close_version, open_version
from lightrl.weights.machine.store import Claim, Store
from lightrl.weights.pull.transfer import Pull, Wanted
from lightrl.weights.serve.server import WeightServer

logger = logging.getLogger(__name__)


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
        on_broadcast_failed: Callable[[PublishWeights, str], None],
    ) -> None:
        """`serves`: version and digest that the engine has loaded, if it serves now.
        `on_broadcast_failed(offer, reason)`: the manifest of a version that comes by broadcast
        could not be pulled."""
        self.wanted: PublishWeights | None = None  # the newest version offered
        self.progress: WeightsProgress | None = None  # of the one that is pulled
        self._node = node
        self._settings = settings
        self._store = store
        self._server = server
        self._coordinator_host = coordinator_host
        self._send = send
        self._serves = serves
        self._on_broadcast_failed = on_broadcast_failed
        self._is_offered = asyncio.Event()
        self._pull: Pull | None = None
        self._fetching: asyncio.Task[Fetched | Announced] | None = None
        self._deltas = Deltas(store, server, partial(self._make_pull, timeout_s=DELTA_TIMEOUT_S))
        progress = partial(self._make_pull, on_progress=self._note_progress)
        self._base = BaseVersion(store, server, progress)
        self._next: Fetched | Announced | None = None  # to be loaded
        self.is_next = asyncio.Event()  # that there is one
        self._held: Fetched | None = None  # loaded, or being loaded; not by broadcast
        self._loading: Fetched | Announced | None = None
        self._chores: set[asyncio.Task[None]] = set()

    def offer(self, message: PublishWeights) -> None:
        self.wanted = message
        if (base := message.base) is not None:
            self._base.offered(base.digest, self._reachable(base.sources))
        self._is_offered.set()

    def again(self) -> None:
        """What was offered last is wanted anew: the engine has lost it."""
        if self.wanted is not None:
            self._is_offered.set()

    @property
    def has_file(self) -> bool:
        """Of what the engine serves, if it serves something."""
        served = self._serves()
        return served is None or (self._held is not None and self._held.offer.digest == served[1])

    async def next(self) -> Fetched | Announced:
        """The newest version that is to be loaded, when it is here; from now on this one is held,
        and the one before is neither served nor kept. `loaded` must follow. One that comes by
        broadcast takes its place only then: if it fails, differences are from the one before."""
        await self.is_next.wait()
        self.is_next.clear()
        fetched, self._next = self._next, None
        assert fetched is not None
        self._loading = fetched
        if isinstance(fetched, Announced):
            return fetched
        before, self._held = self._held, fetched
        if before is not None and before.version is not fetched.version:
            self._give_back(before)
        return fetched

    def loaded(self) -> None:
        """Or it could not be, or the engine has died."""
        loading, self._loading = self._loading, None
        if isinstance(loading, Announced):
            self._start(self._release(loading.claim))
            before = self._held
            if before is not None and not self.has_file:
                self._held = None
                self._give_back(before)
            if self._fetching is not None and self._is_served(self.wanted):
                self._fetching.cancel()  # it was to be pulled, and has come by broadcast after all

    def _is_served(self, offer: PublishWeights | None) -> bool:
        return offer is not None and self._serves() == (offer.policy_version, offer.digest)

    def reject(self, fetched: Fetched) -> None:
        """It could not be loaded: it is proved once more before it is tried again."""
        if self._held is fetched:
            self._held = None
            self._give_back(fetched)
            self._base.reject()

    async def run(self) -> None:
        """Fetches what is offered, the newest version first."""
        while True:
            await self._is_offered.wait()
            self._is_offered.clear()
            offer = self.wanted
            assert offer is not None
            if self._is_served(offer):
                self._put(None)
                broadcast_s = None if self.has_file else 0.0
                ready = WeightsReady(offer.policy_version, offer.digest, broadcast_s=broadcast_s)
                self._send(ready)  # it did not know
                continue
            if self._loading is not None and are_same(self._loading.offer, offer):
                self._put(None)  # offered again: what there is to say is said when it is loaded
                continue
            try:
                fetched = await self._unless_overtaken(offer)
            except (WeightsError, OSError, RuntimeError) as e:
                if isinstance(e, RuntimeError) and not is_for_lack(e):
                    raise
                self._fail(offer, str(e))
                self._start(self._tidy())  # there may be no room
                continue
            finally:
                self.progress = None
            if fetched is not None and not self._was_taken(fetched):
                self._put(fetched)
                self._start(self._tidy())

    def _was_taken(self, fetched: Fetched | Announced) -> bool:
        """For loading, while it was looked up. The same weights as another version were not: a step
        may leave them as they were."""
        held = self._held
        if isinstance(fetched, Announced) or held is None or held.version is not fetched.version:
            return False
        is_loaded_now = self._loading is held and are_same(held.offer, fetched.offer)
        return is_loaded_now or self._is_served(fetched.offer)

    def _fail(self, offer: PublishWeights, reason: str) -> None:
        if offer.group:
            self._on_broadcast_failed(offer, reason)
        else:
            self._send(WeightsFailed(offer.policy_version, reason[:MAX_TEXT]))

    async def close(self) -> None:
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        versions = [f.version for f in self._fetched()]
        await in_thread(close_all, versions)
        await self._base.close()
        await self._deltas.close()

    def _fetched(self) -> list[Fetched]:
        """What is here whole."""
        return [f for f in (self._next, self._held) if isinstance(f, Fetched)]

    def _put(self, fetched: Fetched | Announced | None) -> None:
        """What is to be loaded next; not what was to be until now."""
        before, self._next = self._next, fetched
        if fetched is not None:
            self.is_next.set()
        else:
            self.is_next.clear()
        kept = [f.version for f in self._fetched()]
        if isinstance(before, Announced):
            self._start(self._release(before.claim))
        elif before is not None and all(before.version is not version for version in kept):
            self._give_back(before)

    async def _unless_overtaken(self, offer: PublishWeights) -> Fetched | Announced | None:
        """None if another version was offered before this one was here, or it has come
        otherwise."""
        fetch = self._announce(offer) if offer.group else self._fetch(offer)
        fetching = self._fetching = asyncio.create_task(fetch, name="fetch weights")
        try:
            while True:
                newer = asyncio.create_task(self._is_offered.wait(), name="newer weights")
                try:
                    await asyncio.wait({fetching, newer}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    newer.cancel()
                if fetching.done():
                    return None if fetching.cancelled() else fetching.result()
                assert self.wanted is not None
                if not self._goes_on(offer, self.wanted):
                    return None
                self._is_offered.clear()
        except asyncio.CancelledError:
            if fetching.done() and not fetching.cancelled() and fetching.exception() is None:
                self._put(fetching.result())  # in the same turn: `close` gives it back
            raise
        finally:
            self._fetching = None
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    def _goes_on(self, offer: PublishWeights, newer: PublishWeights) -> bool:
        """Whether what is fetched is still of use. The coordinator takes the newest version only,
        so another one is worth no byte more."""
        if not are_same(newer, offer):
            return False
        if self._pull is not None:  # offered again: it is to be had elsewhere, too
            self._pull.add_sources(self._reachable(newer.sources))
            self._deltas.offered(newer)
        return True

    async def _fetch(self, offer: PublishWeights) -> Fetched:
        begin, base = time.monotonic(), await self._base.get(offer)
        for known in self._fetched():
            if known.offer.digest == offer.digest:
                again = Fetched(offer, known.version, known.is_own, base=base)
                if not known.is_own:
                    self._server.publish(again.file)  # for its tickets
                return again
        claim = await taken(Claim.release, self._store.claim, offer.digest, offer.num_bytes)
        try:
            fetched = await self._obtain(claim, offer)
            fetched.version.on_close.append(claim.release)
            return replace(fetched, offer=offer, seconds=time.monotonic() - begin, base=base)
        except BaseException:
            self._start(self._drop(claim))
            raise

    async def _announce(self, offer: PublishWeights) -> Announced:
        """Its manifest, from whoever has it."""
        claim = await taken(Claim.release, self._store.claim, offer.digest, offer.num_bytes)
        try:
            pull = self._make_pull(offer, wanted_of(offer), claim.own_path(), is_served=False)
            return Announced(offer, await pull.run_for_manifest(), claim)
        except BaseException:
            self._start(self._release(claim))
            raise

    async def _obtain(self, claim: Claim, offer: PublishWeights) -> Fetched:
        """From this machine or from others."""
        if (found := await self._find(claim, offer)) is not None:
            return found
        async with claim.turn() as path:
            if (found := await self._find(claim, offer)) is not None:
                return found  # who was in turn before has pulled it
            if self.wanted is not None and are_same(self.wanted, offer):
                offer = self.wanted  # it may say more by now
            pull = self._make_pull(offer, wanted_of(offer), path, self._note_progress)
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
            version = await taken(close_version, open_version, pull.file)
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
        is_served: bool = True,
    ) -> Pull:
        """From the sources of the offer; `is_served` to others meanwhile."""
        pull = Pull(
            wanted,
            self._node,
            path,
            server=self._server if is_served else None,
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
        if (found := await find_proved(claim)) is None:
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
        """Who listens everywhere can be reached where the coordinator can."""
        host = self._coordinator_host
        return tuple(
            replace(s, addresses=tuple(not_everywhere(a, host) for a in s.addresses))
            for s in sources
        )

    def _give_back(self, fetched: Fetched) -> None:
        self._start(self._close(fetched))

    async def _close(self, fetched: Fetched) -> None:
        """Peers have a moment to end; then its pages go, if no other node wants it."""
        try:
            if not fetched.is_own:
                await self._retire(fetched.offer.digest)
        finally:
            await eventually(fetched.version.close)
        await eventually(self._store.sweep)

    async def _retire(self, digest: str) -> None:
        """Unless equal weights have come meanwhile."""
        if all(f.offer.digest != digest for f in self._fetched()):
            await self._server.retire(digest)

    async def _tidy(self) -> None:
        await self._deltas.drop_overtaken()
        await eventually(self._store.sweep)

    async def _drop(self, claim: Claim) -> None:
        """Of a version that did not come, or not as a file. What was pulled of it is a beginning,
        as long as it is wanted; if another version is, it may be what that one is made of."""
        if self.wanted is None or self.wanted.digest == claim.digest:
            await eventually(claim.release)
        else:
            await self._deltas.keep_overtaken(claim)
        is_other = self.wanted is not None and self.wanted.digest != claim.digest
        if is_other or self._is_served(self.wanted):
            await eventually(self._store.sweep)

    async def _release(self, claim: Claim) -> None:
        await eventually(claim.release)
        await eventually(self._store.sweep)

    def _start(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore, name="give back weights")
        self._chores.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            logger.warning("weights were not given back: %s", e)
