"""The deltas that one node uses instead of pulling a version whole, and keeps for its peers.

Owns the rule when deltas are used, and the files of those that are here. The rule is applied before
a pull: a chain of deltas from the version that this node holds is used if it is short and has less
than MAX_SHARE of the bytes. Each delta is pulled like a version. The pull of the version itself
then makes the buckets of the one before, and verifies each by the version's own digests; what
deltas cannot make is pulled.
"""

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightrl.core.weights.weight_sources import MAX_CHAIN, MAX_SHARE
from lightrl.errors import WeightsError
from lightrl.messages.weights import DeltaOffer, PublishWeights
from lightrl.rollout.fetched import obtain, run_in_thread
from lightrl.weights.machine.local import LocalVersion
from lightrl.weights.machine.store import Store
from lightrl.weights.pull.connection import Wanted
from lightrl.weights.pull.transfer import Pull, PullStats
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile

if TYPE_CHECKING:  # numpy is loaded with the first delta, in a thread
    from lightrl.weights.delta.patch import Patch

logger = logging.getLogger(__name__)

# from the offer of a version; the deltas to it mostly follow sooner
DELTA_WAIT_S = 15.0
DELTA_TIMEOUT_S = 5.0  # without a byte of a delta, after which the version is pulled instead

# a pull from the sources of the offer
MakePull = Callable[[PublishWeights, Wanted, Path], Pull]


@dataclass(frozen=True, slots=True)
class Chain:
    """Deltas, oldest first, that lead from a version that is held to another one."""

    base: LocalVersion
    links: tuple[DeltaOffer, ...]

    @property
    def num_bytes(self) -> int:
        return sum(link.num_bytes + link.manifest_bytes for link in self.links)


class Deltas:
    """Pulls deltas, and serves them to peers. `patch` for each version; `await close()` at the
    end."""

    def __init__(self, store: Store, server: WeightServer, make_pull: MakePull) -> None:
        self._store = store
        self._server = server
        self._make_pull = make_pull
        self._kept: dict[str, LocalVersion] = {}  # by digest, oldest first

    @contextlib.asynccontextmanager
    async def patch(
        self, offer: PublishWeights, chain: Chain | None, pulls: list[PullStats]
    ) -> AsyncIterator["Patch | None"]:
        """What makes the version of one that is held, with all deltas here; None if the version is
        to be pulled. `pulls` gets the stats of each delta."""
        self._serve_kept(offer.policy_version)
        if chain is None:
            yield None
            return
        descriptor = os.dup(chain.base.descriptor)
        try:
            patch: Patch | None = None
            try:
                files = [await self._get(link, offer, pulls) for link in chain.links]
                patch = await run_in_thread(
                    _open_patch, descriptor, chain.links, files, offer.num_bytes
                )
            except (WeightsError, OSError) as e:
                version = offer.policy_version
                logger.warning("version %d: pulled whole, not by deltas: %s", version, e)
            yield patch
        finally:
            os.close(descriptor)

    async def close(self) -> None:
        for version in self._kept.values():
            await run_in_thread(version.close)
        self._kept.clear()

    async def _get(
        self, link: DeltaOffer, offer: PublishWeights, pulls: list[PullStats]
    ) -> VersionFile:
        """A delta from this machine, or from a source."""
        wanted = Wanted(offer.policy_version, link.digest, link.num_bytes, link.manifest_bytes)

        async def pull_to(path: Path) -> VersionFile:
            pull = self._make_pull(offer, wanted, path)
            pulls.append(await pull.run())
            return pull.file

        if link.digest not in self._kept:
            version, _ = await obtain(self._store, wanted, pull_to)
            self._kept[link.digest] = version
            await self._drop_old(offer)
            self._serve_kept(offer.policy_version)
        return self._kept[link.digest].file

    async def _drop_old(self, offer: PublishWeights) -> None:
        used = {link.digest for link in offer.deltas}
        while len(self._kept) > MAX_CHAIN and (digest := next(iter(self._kept))) not in used:
            version = self._kept.pop(digest)
            await self._server.retire(digest)
            await run_in_thread(version.close)

    def _serve_kept(self, policy_version: int) -> None:
        """To nodes whose tickets are for this version."""
        for version in self._kept.values():
            try:
                self._server.publish(replace(version.file, policy_version=policy_version))
            except WeightsError as e:  # peers have it from elsewhere
                logger.warning("a delta is not served here: %s", e)


def leads_from(digest: str, offer: PublishWeights) -> bool:
    """Return whether deltas of the offer lead from the version with this digest."""
    return any(link.base == digest for link in offer.deltas)


def find_chain(
    offer: PublishWeights, missing_bytes: int, held: Sequence[LocalVersion]
) -> Chain | None:
    """The shortest chain to the version offered; None if there is none, or it has too many bytes
    beside those that are missing of the version."""
    links = offer.deltas
    if links and links[-1].target == offer.digest:
        for first in reversed(range(len(links))):
            if first + 1 < len(links) and links[first].target != links[first + 1].base:
                break
            for version in held:
                if version.file.digest == links[first].base:
                    chain = Chain(version, links[first:])
                    return chain if chain.num_bytes < MAX_SHARE * missing_bytes else None
    return None


def _open_patch(
    base: int, chain: Sequence[DeltaOffer], files: Sequence[VersionFile], num_bytes: int
) -> "Patch":
    from lightrl.weights.delta.patch import open_patch

    return open_patch(base, chain[0].base, chain[-1].target, num_bytes, files)
