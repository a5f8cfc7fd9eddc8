"""What a node has of a version that it was offered, ready to be loaded. Values only."""

from dataclasses import dataclass, replace

from lightrl.engine.base import EngineLoaded
from lightrl.messages.weights import PublishWeights, WeightsReady
from lightrl.weights.machine.local import LocalVersion
from lightrl.weights.machine.store import Claim
from lightrl.weights.pull.transfer import PullStats, Wanted
from lightrl.weights.version.manifest import VersionFile

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
    # of adapters: what they are beside, held for the whole run
    base: LocalVersion | None = None

    @property
    def file(self) -> VersionFile:
        return replace(self.version.file, policy_version=self.offer.policy_version)

    @property
    def base_file(self) -> VersionFile | None:
        return self.base.file if self.base is not None else None


@dataclass(frozen=True, slots=True)
class Announced:
    """A version that comes by broadcast: of its `file` only the manifest is here, proved."""

    offer: PublishWeights
    file: VersionFile
    # that the manifest stays
    claim: Claim


def wanted_of(offer: PublishWeights) -> Wanted:
    return Wanted(offer.policy_version, offer.digest, offer.num_bytes, offer.manifest_bytes)


def are_same(one: PublishWeights, other: PublishWeights) -> bool:
    """The same version, in the same way."""
    return one.group == other.group and (one.digest, one.policy_version) == (
        other.digest,
        other.policy_version,
    )


def confirmation(
    loaded: EngineLoaded, fetched: Fetched | Announced, seconds: float
) -> WeightsReady:
    """`seconds` from the order to load it until the engine had."""
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
        pull_s=fetched.seconds,
        peer_bytes=fetched.stats.peer_bytes,
        delta_bytes=fetched.delta_bytes,
    )
