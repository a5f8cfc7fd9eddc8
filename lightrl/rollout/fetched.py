"""Versions that a node has, ready to be loaded, and how one gets a version onto its machine."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from lightrl.engine.base import EngineLoaded
from lightrl.errors import WeightsError
from lightrl.messages.weights import PublishWeights, WeightsReady
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import taken_in_thread
from lightrl.weights.machine.local import LocalVersion, close_version, open_version
from lightrl.weights.machine.store import Store
from lightrl.weights.pull.connection import Wanted
from lightrl.weights.pull.transfer import PullStats
from lightrl.weights.version.manifest import VersionFile

P = ParamSpec("P")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

NOTHING_PULLED = PullStats(0, 0.0)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version on this machine, verified, and the cost of fetching it."""

    offer: PublishWeights
    version: LocalVersion
    # the trainer in this process serves it
    is_own: bool
    stats: PullStats = NOTHING_PULLED
    delta_bytes: int = 0  # of what was pulled
    # of adapters: the version that they adapt, held for the whole run
    base: LocalVersion | None = None

    @property
    def file(self) -> VersionFile:
        return replace(self.version.file, policy_version=self.offer.policy_version)

    @property
    def base_file(self) -> VersionFile | None:
        return self.base.file if self.base is not None else None


@dataclass(frozen=True, slots=True)
class Announced:
    """A version that comes by broadcast: of its `file` only the manifest is here, verified."""

    offer: PublishWeights
    file: VersionFile

    def remove(self) -> None:
        Path(self.file.manifest_path).unlink(missing_ok=True)


def wanted_of(offer: PublishWeights) -> Wanted:
    return Wanted(offer.policy_version, offer.digest, offer.num_bytes, offer.manifest_bytes)


def are_same(one: PublishWeights, other: PublishWeights) -> bool:
    """Return whether both offer the same version, in the same way."""
    return one.group == other.group and (one.digest, one.policy_version) == (
        other.digest,
        other.policy_version,
    )


def confirmation(
    loaded: EngineLoaded, fetched: Fetched | Announced, seconds: float
) -> WeightsReady:
    """`seconds`: from the command to load the version until the engine had loaded it."""
    ready = WeightsReady(
        loaded.policy_version,
        loaded.digest,
        load_s=loaded.load_s,
        canary_diff=loaded.canary_diff,
    )
    if isinstance(fetched, Announced):
        return replace(ready, broadcast_s=seconds)
    return replace(
        ready,
        num_bytes=fetched.stats.num_bytes,
        pull_s=fetched.stats.seconds,
        peer_bytes=fetched.stats.peer_bytes,
        delta_bytes=fetched.delta_bytes,
    )


async def run_in_thread(
    act: Callable[P, Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """Run `act` in a thread, and wait while this machine lacks one."""
    return await closing_in_thread(lambda result: None, act, *args, **kwargs)


async def closing_in_thread(
    close: Callable[[Result], object],
    act: Callable[P, Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """The same; if this is cancelled, `close` gets the result."""
    call = partial(taken_in_thread, close, partial(act, *args, **kwargs))
    return await retry_on_resource_limit(call, "a thread for the weights", logger.warning)


async def find(store: Store, wanted: Wanted) -> tuple[LocalVersion, bool] | None:
    """`Store.find` in a thread. A cancellation ends the search soon."""
    is_ended = threading.Event()
    try:
        return await closing_in_thread(
            lambda found: found and found[0].close(),
            store.find,
            *(wanted.digest, wanted.num_bytes, is_ended),
        )
    except asyncio.CancelledError:
        is_ended.set()
        raise


async def obtain(
    store: Store, wanted: Wanted, pull_to: Callable[[Path], Awaitable[VersionFile]]
) -> tuple[LocalVersion, bool]:
    """Find a version on this machine, or pull it once for all its nodes. Returns it, and whether
    the trainer in this process has it. Raises WeightsError, OSError."""
    if (found := await find(store, wanted)) is not None:
        return found
    async with store.lock(wanted.digest, wanted.num_bytes) as path:
        if (found := await find(store, wanted)) is not None:
            return found  # the node before has pulled it
        file = await pull_to(path)
        version = await closing_in_thread(close_version, open_version, file)
        if version is None:
            raise WeightsError(f"{path}: gone")
        return version, False
