"""The version that adapters adapt: fetched once, held and served by a node for the whole run.

A fetch that newer adapters cut short is resumed from its partial download. Never blocks the event
loop: files are read and closed in threads.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lightrl.errors import WeightsError
from lightrl.messages.weights import PublishWeights
from lightrl.rollout.fetched import obtain, run_in_thread
from lightrl.weights.machine.local import LocalVersion
from lightrl.weights.machine.store import Store
from lightrl.weights.pull.connection import Wanted
from lightrl.weights.pull.transfer import Pull
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

MakePull = Callable[[PublishWeights, Wanted, Path], Pull]


class BaseVersion:
    """Fetches the base and holds it. `get` it for each version; `await close()` at the end."""

    def __init__(self, store: Store, server: WeightServer, make_pull: MakePull) -> None:
        """`make_pull(offer, wanted, path)`: from the sources of the offer."""
        self._store = store
        self._server = server
        self._make_pull = make_pull
        self._held: LocalVersion | None = None
        self._is_doubted = False

    async def get(self, offer: PublishWeights) -> LocalVersion | None:
        """Return the base of the offer, verified; None if it has none. Raises WeightsError,
        OSError."""
        base, before = offer.base, self._held
        if base is None:
            return None
        if before is not None and before.file.digest == base.digest and not self._is_doubted:
            return before
        begun_at, was_pulled = time.monotonic(), False
        wanted = Wanted(0, base.digest, base.num_bytes, base.manifest_bytes)

        async def pull_to(path: Path) -> VersionFile:
            nonlocal was_pulled
            pull = self._make_pull(replace(offer, sources=base.sources), wanted, path)
            await pull.run()
            was_pulled = True  # and is served
            seconds = time.monotonic() - begun_at
            logger.info("the base of all adapters: %d bytes in %.1f s", base.num_bytes, seconds)
            return pull.file

        version, is_own = await obtain(self._store, wanted, pull_to)
        self._held, self._is_doubted = version, False
        if not is_own and not was_pulled:
            try:
                self._server.publish(replace(version.file, policy_version=0))
            except WeightsError as e:  # others have it from elsewhere
                logger.warning("the base of adapters is not served here: %s", e)
        if before is not None:
            if before.file.digest != base.digest:
                self._server.retire(before.file.digest)
            await run_in_thread(before.close)
        return version

    def reject(self) -> None:
        """Adapters could not be loaded: verify the base once more before it is used again. Until
        then it stays open for adapters that wait to be loaded."""
        self._is_doubted = True

    async def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await self._server.retire(held.file.digest)
            await run_in_thread(held.close)
