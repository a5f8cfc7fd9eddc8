"""The versions of the weights that one node has: the one that its engine holds, and the next.

Owns what is pulled, verified, served to others and given back; the next version is fetched while
the engine serves, and while it loads. `orders.py` decides when one is loaded,
`weights/machine/store.py` where files are. Never blocks the event loop: files are read and closed
in threads.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightrl.config.sections import Weights
from lightrl.errors import WeightsError
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.message import Message
from lightrl.messages.weights import (
    PublishWeights,
    WeightsFailed,
    WeightsProgress,
    WeightsReady,
    WeightsSource,
)
from lightrl.rollout.base import BaseVersion
from lightrl.rollout.deltas import DELTA_TIMEOUT_S, DELTA_WAIT_S, Deltas, find_chain, leads_from
from lightrl.rollout.fetched import (
    Announced,
    Fetched,
    are_same,
    obtain,
    run_in_thread,
    wanted_of,
)
from lightrl.system.addresses import not_everywhere
from lightrl.system.child import is_for_lack
from lightrl.system.threads import cancel
from lightrl.weights.machine.local import LocalVersion
from lightrl.weights.machine.store import Store
from lightrl.weights.pull.connection import Wanted
from lightrl.weights.pull.transfer import Pull, PullLimits, PullStats
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the weights of a node call."""

    send: Callable[[Message], None]
    # the version that the engine has loaded and its digest, if it serves now
    serves: Callable[[], tuple[int, str] | None]
    # (offer, reason): the manifest of a version that comes by broadcast could not be pulled
    on_broadcast_failed: Callable[[PublishWeights, str], None]


class NodeWeights:
    """Fetches each version that the coordinator offers, and holds the one that the engine has
    loaded. `run` in a task; `await close()` when that has ended."""

    def __init__(
        self,
        node: str,
        settings: Weights,
        store: Store,
        server: WeightServer,
        coordinator_host: str,
        callbacks: Callbacks,
    ) -> None:
        self.wanted: PublishWeights | None = None  # the newest version offered
        self.progress: WeightsProgress | None = None  # of the version that is pulled
        self._node = node
        self._settings = settings
        self._store = store
        self._server = server
        self._coordinator_host = coordinator_host
        self._send = callbacks.send
        self._serves = callbacks.serves
        self._on_broadcast_failed = callbacks.on_broadcast_failed
        self._is_offered = asyncio.Event()
        self._pull: Pull | None = None
        self._uses_deltas = False  # that pull
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
        """Store the newest version of the coordinator, and wake `run`, which fetches it."""
        self.wanted = message
        self._is_offered.set()

    def again(self) -> None:
        """Fetch the last offer once more: the engine has lost that version."""
        if self.wanted is not None:
            self._is_offered.set()

    @property
    def has_file(self) -> bool:
        """Return whether the version that the engine serves is here as a file, if it serves one."""
        served = self._serves()
        return served is None or (self._held is not None and self._held.offer.digest == served[1])

    async def next(self) -> Fetched | Announced:
        """Wait for the newest version that is to be loaded and hold it; the one before is given
        back. `loaded` must follow. A version that comes by broadcast is held only then: if it
        fails, deltas start from the one before."""
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
        """The engine has loaded the version, or has failed to."""
        loading, self._loading = self._loading, None
        if isinstance(loading, Announced):
            loading.remove()
            before = self._held
            if before is not None and not self.has_file:
                self._held = None
                self._give_back(before)
            if self._fetching is not None and self._is_served(self.wanted):
                self._fetching.cancel()  # it has come by broadcast

    def _is_served(self, offer: PublishWeights | None) -> bool:
        return offer is not None and self._serves() == (offer.policy_version, offer.digest)

    def reject(self, fetched: Fetched) -> None:
        """A version could not be loaded: verify it once more before it is tried again."""
        if self._held is fetched:
            self._held = None
            self._give_back(fetched)
            self._base.reject()

    async def run(self) -> None:
        """Fetch the newest version that is offered, again and again."""
        while True:
            await self._is_offered.wait()
            self._is_offered.clear()
            offer = self.wanted
            assert offer is not None
            if self._is_served(offer):
                self._put(None)
                broadcast_s = None if self.has_file else 0.0
                ready = WeightsReady(offer.policy_version, offer.digest, broadcast_s=broadcast_s)
                self._send(ready)
                continue
            if self._loading is not None and are_same(self._loading.offer, offer):
                self._put(None)  # it is reported when it is loaded
                continue
            try:
                fetched = await self._unless_overtaken(offer)
            except (WeightsError, OSError, RuntimeError) as e:
                if isinstance(e, RuntimeError) and not is_for_lack(e):
                    raise
                self._fail(offer, str(e))
                self._start(self._sweep())  # there may be no room
                continue
            finally:
                self.progress = None
                if self.wanted is not None and not are_same(self.wanted, offer):
                    self._is_offered.set()
            if fetched is not None and not self._was_taken(fetched):
                self._put(fetched)
            self._start(self._sweep())

    def _was_taken(self, fetched: Fetched | Announced) -> bool:
        """Return whether the engine loaded the version during the lookup. Equal weights with
        another number do not count: a step may leave the weights unchanged."""
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
        await cancel(*self._chores)
        for version in self._held_versions():
            await run_in_thread(version.close)
        for announced in (self._next, self._loading):
            if isinstance(announced, Announced):
                announced.remove()
        await self._base.close()
        await self._deltas.close()

    def _fetched(self) -> list[Fetched]:
        """The versions that are here as files."""
        return [f for f in (self._next, self._held) if isinstance(f, Fetched)]

    def _held_versions(self) -> list[LocalVersion]:
        return [f.version for f in self._fetched()]

    def _put(self, fetched: Fetched | Announced | None) -> None:
        """Set what is to be loaded next, and give back what was."""
        before, self._next = self._next, fetched
        if fetched is not None:
            self.is_next.set()
        else:
            self.is_next.clear()
        if isinstance(before, Announced):
            before.remove()
        elif before is not None and all(before.version is not v for v in self._held_versions()):
            self._give_back(before)

    async def _unless_overtaken(self, offer: PublishWeights) -> Fetched | Announced | None:
        """None if another version was offered before this one was here, or this one has come by
        broadcast. A running pull is finished all the same if deltas lead from its version to the
        newer one; they are published a moment later, so it continues DELTA_WAIT_S without them."""
        fetch = self._announce(offer) if offer.group else self._fetch(offer)
        fetching = self._fetching = asyncio.create_task(fetch, name="fetch weights")
        useless_at: float | None = None  # without deltas until then the version is of no use
        try:
            while True:
                limit_s = None if useless_at is None else max(0.0, useless_at - time.monotonic())
                newer = asyncio.create_task(self._is_offered.wait(), name="newer weights")
                try:
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait({fetching, newer}, timeout=limit_s, return_when=first)
                finally:
                    newer.cancel()
                if fetching.done():
                    return None if fetching.cancelled() else fetching.result()
                assert self.wanted is not None
                if not self._is_offered.is_set() or not self._continues(offer, self.wanted):
                    return None
                self._is_offered.clear()
                is_used = are_same(offer, self.wanted) or leads_from(offer.digest, self.wanted)
                useless_at = None if is_used else useless_at or time.monotonic() + DELTA_WAIT_S
        except asyncio.CancelledError:
            if fetching.done() and not fetching.cancelled() and fetching.exception() is None:
                self._put(fetching.result())  # `close` gives it back
            raise
        finally:
            self._fetching = None
            await cancel(fetching)

    def _continues(self, offer: PublishWeights, newer: PublishWeights) -> bool:
        """Return whether what is being fetched is still of use. A pull for which deltas are
        offered, and worth it, starts again with them."""
        pull, held = self._pull, self._held_versions()
        if not are_same(newer, offer):
            is_pull = not (offer.group or newer.group or offer.base or self._uses_deltas)
            # the deltas of a node that holds a version lead from that one
            return is_pull and self._settings.delta == "auto" and not held
        if pull is not None:
            if not self._uses_deltas and find_chain(newer, pull.missing_bytes, held) is not None:
                return False
            pull.add_sources(self._reachable(newer.sources))
        return True

    async def _fetch(self, offer: PublishWeights) -> Fetched:
        self._uses_deltas = False
        begin, base = time.monotonic(), await self._base.get(offer)
        for known in self._fetched():
            if known.offer.digest == offer.digest:
                again = Fetched(offer, known.version, known.is_own, base=base)
                self._serve(again)  # for its tickets
                return again
        pulls, delta_pulls = list[PullStats](), list[PullStats]()

        async def pull_to(path: Path) -> VersionFile:
            newest = self.wanted if self.wanted and are_same(self.wanted, offer) else offer
            pull = self._make_pull(newest, wanted_of(newest), path, self._note_progress)
            chain = find_chain(newest, newest.num_bytes, self._held_versions())
            self._pull, self._uses_deltas = pull, chain is not None
            try:
                async with self._deltas.patch(newest, chain, delta_pulls) as patch:
                    pulls.append(await pull.run(patch))
            finally:
                self._pull = None
            return pull.file

        version, is_own = await obtain(self._store, wanted_of(offer), pull_to)
        delta_bytes = sum(p.num_bytes for p in delta_pulls)
        num_bytes = delta_bytes + sum(p.num_bytes for p in pulls)
        peer_bytes = sum(p.peer_bytes for p in (*pulls, *delta_pulls))
        stats = PullStats(num_bytes, time.monotonic() - begin, peer_bytes)
        fetched = Fetched(offer, version, is_own, stats, delta_bytes, base)
        if not pulls:  # else it is served already
            self._serve(fetched)
        return fetched

    async def _announce(self, offer: PublishWeights) -> Announced:
        """Pull the manifest of a version that comes by broadcast."""
        path = self._store.own_path(offer.digest)
        pull = self._make_pull(offer, wanted_of(offer), path, is_served=False)
        return Announced(offer, await pull.run_for_manifest())

    def _make_pull(
        self,
        offer: PublishWeights,
        wanted: Wanted,
        path: Path,
        on_progress: Callable[[WeightsProgress], None] | None = None,
        timeout_s: float = math.inf,
        is_served: bool = True,
    ) -> Pull:
        """A pull from the sources of the offer; `is_served`: to others meanwhile."""
        timeout_s = min(timeout_s, self._settings.timeout_s)
        pull = Pull(
            wanted,
            self._node,
            path,
            server=self._server if is_served else None,
            limits=PullLimits(self._settings.streams, timeout_s),
            on_bad=lambda node, reason: self._send(
                WeightsFailed(offer.policy_version, reason[:MAX_TEXT], node)
            ),
            on_progress=on_progress,
        )
        pull.add_sources(self._reachable(offer.sources))
        return pull

    def _serve(self, fetched: Fetched) -> None:
        if not fetched.is_own:
            try:
                self._server.publish(fetched.file)
            except WeightsError as e:  # others have it from elsewhere
                version = fetched.offer.policy_version
                logger.warning("version %d is not served here: %s", version, e)

    def _note_progress(self, progress: WeightsProgress) -> None:
        self.progress = progress

    def _reachable(self, sources: tuple[WeightsSource, ...]) -> tuple[WeightsSource, ...]:
        """Sources that listen on all addresses are reached at the coordinator's host."""
        host = self._coordinator_host
        return tuple(
            replace(s, addresses=tuple(not_everywhere(a, host) for a in s.addresses))
            for s in sources
        )

    def _give_back(self, fetched: Fetched) -> None:
        self._start(self._close(fetched))

    async def _close(self, fetched: Fetched) -> None:
        """Nodes that pull the version from here have a moment to end; then it is removed, unless
        another node of this machine uses it."""
        try:
            digest = fetched.offer.digest
            if not fetched.is_own and all(f.offer.digest != digest for f in self._fetched()):
                await self._server.retire(digest)
        finally:
            await run_in_thread(fetched.version.close)
        await self._sweep()

    async def _sweep(self) -> None:
        """Partial downloads of what is wanted, and not served yet, stay."""
        wanted = set[str]()
        if self.wanted is not None and not self._is_served(self.wanted):
            wanted = {self.wanted.digest, self.wanted.base.digest if self.wanted.base else ""}
        await run_in_thread(self._store.sweep, wanted)

    def _start(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore, name="give back weights")
        self._chores.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            logger.warning("weights were not given back: %s", e)
