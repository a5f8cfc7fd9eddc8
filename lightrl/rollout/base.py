"""What adapters are beside, at one node: fetched once, held and served to others for the whole run.

Owns that fetch, which no newer version of the adapters overtakes, and the file. Never blocks the
event loop: files are read and closed in threads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lightrl.errors import WeightsError
from lightrl.messages.weights import PublishWeights, WeightsBase, WeightsSource
from lightrl.rollout.threads import eventually, find_proved, taken
from lightrl.system.threads import in_thread
from lightrl.weights.machine.local import LocalVersion, close_version, open_version
from lightrl.weights.machine.store import Claim, Store
from lightrl.weights.pull.transfer import Pull, Wanted
from lightrl.weights.serve.server import WeightServer

logger = logging.getLogger(__name__)

MakePull = Callable[[PublishWeights, Wanted, Path], Pull]


class BaseVersion:
    """`get` it for each version; `await close()` once nobody does any more."""

    def __init__(self, store: Store, server: WeightServer, make_pull: MakePull) -> None:
        """`make_pull(offer, wanted, path)`: from the sources of the offer."""
        self._store = store
        self._server = server
        self._make_pull = make_pull
        self._claim: Claim | None = None  # kept when a fetch fails: what has come is not lost
        self._fetching: asyncio.Task[LocalVersion] | None = None
        self._pull: Pull | None = None
        self._held: LocalVersion | None = None
        self._is_doubted = False

    def offered(self, digest: str, sources: tuple[WeightsSource, ...]) -> None:
        """It may be to be had elsewhere, too."""
        if self._pull is not None and digest == self._pull.file.digest:
            with contextlib.suppress(WeightsError):  # no address; who is told so first says it
                self._pull.add_sources(sources)

    async def get(self, offer: PublishWeights) -> LocalVersion | None:
        """That of the offer, if it has one: proved. When this is cancelled, the fetch goes on.
        Raises WeightsError, OSError."""
        base = offer.base
        if base is None:
            return None
        if self._claim is not None and self._claim.digest != base.digest:
            await self.close()
        if self._held is not None and not self._is_doubted:
            return self._held
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch(offer, base), name="fetch base")
            self._fetching.add_done_callback(self._ended)
        return await asyncio.shield(self._fetching)

    def reject(self) -> None:
        """It may be what could not be loaded: it is proved once more before it is used again. Until
        then it stays open, as adapters that wait to be loaded name it."""
        self._is_doubted = True

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
        claim, self._claim = self._claim, None
        held, self._held = self._held, None
        if claim is not None:
            await self._server.retire(claim.digest)
            await in_thread(close_version, held)
            await in_thread(claim.release)

    def _ended(self, task: asyncio.Task[LocalVersion]) -> None:
        self._fetching = None
        if not task.cancelled():
            task.exception()  # who waited for it was told, if anybody did

    async def _fetch(self, offer: PublishWeights, base: WeightsBase) -> LocalVersion:
        was_doubted, self._is_doubted = self._is_doubted, False
        try:
            version = await self._obtain(offer, base)
        except BaseException:
            self._is_doubted |= was_doubted
            raise
        before, self._held = self._held, version
        await eventually(close_version, before)
        return version

    async def _obtain(self, offer: PublishWeights, base: WeightsBase) -> LocalVersion:
        begun_at = time.monotonic()
        if self._claim is None:
            size = base.num_bytes
            self._claim = await taken(Claim.release, self._store.claim, base.digest, size)
        claim = self._claim
        if (found := await self._find(claim)) is not None:
            return found
        async with claim.turn() as path:
            if (found := await self._find(claim)) is not None:
                return found  # who was in turn before has pulled it
            wanted = Wanted(0, base.digest, base.num_bytes, base.manifest_bytes)
            pull = self._make_pull(replace(offer, sources=base.sources), wanted, path)
            self._pull = pull
            try:
                await pull.run()
            finally:
                self._pull = None
            version = await taken(close_version, open_version, pull.file)
        if version is None:
            raise WeightsError(f"{path}: gone")
        seconds = time.monotonic() - begun_at
        logger.info("the base of all adapters: %d bytes in %.1f s", base.num_bytes, seconds)
        return version

    async def _find(self, claim: Claim) -> LocalVersion | None:
        """On this machine; proved, and served to others from now on."""
        if (found := await find_proved(claim)) is None:
            return None
        version, is_own = found
        if not is_own:
            try:
                self._server.publish(replace(version.file, policy_version=0))
            except WeightsError as e:  # others have it from elsewhere
                logger.warning("the base of adapters is not served here: %s", e)
        return version
