"""The receiver's side of a weight pull (signatures; the code follows)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightrl.messages import WeightsProgress, WeightsSource
from lightrl.weights.manifest import Manifest, VersionFile
from lightrl.weights.serve import WeightServer


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to pull, as PublishWeights (or a DeltaOffer) says it."""

    policy_version: int
    digest: str
    num_bytes: int
    manifest_bytes: int


@dataclass(frozen=True, slots=True)
class PullStats:
    """What one pull cost. `num_bytes` were transferred; a resumed pull needs fewer than the version
    has."""

    num_bytes: int
    seconds: float
    # of num_bytes: from others than the last of the sources, which is the trainer
    peer_bytes: int = 0
    # by node
    by_source: dict[str, int] = field(default_factory=dict)


def partial_path(path: Path) -> Path:
    """Where a version that will be at `path` grows: "path.part". What an earlier pull left there,
    of whatever process, is hashed and used as far as it is right."""
    return path.with_name(path.name + ".part")


class Pull:
    """One version on its way to `path`. `await run()` once; cancelling it ends within seconds.

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
        streams: int = 4,
        timeout_s: float = 60.0,
        on_bad: Callable[[str, str], None] | None = None,
        on_progress: Callable[[WeightsProgress], None] | None = None,
        order: int | None = None,
    ) -> None:
        """`node`: this one, for which the tickets are. `server`: serves what is proved meanwhile,
        and the whole version at the end, until it is retired there. `on_bad(node, reason)` and
        `on_progress` are called in the event loop, the latter each PROGRESS_S. `order`: which of
        the pullers this is, None = by its name: each begins elsewhere in the file."""
        raise NotImplementedError

    @property
    def file(self) -> VersionFile:
        """The version at `path`; complete once `run` has returned."""
        raise NotImplementedError

    @property
    def manifest(self) -> Manifest:
        """Proved. Once `run` has returned."""
        raise NotImplementedError

    def add_sources(self, sources: Sequence[WeightsSource]) -> None:
        """Before and while it runs: in the order in which they should be asked, the trainer last.
        Known ones keep what was learned of them, except that refusals are forgotten. Raises
        WeightsError for an address that nobody could connect to."""
        raise NotImplementedError

    async def run(self) -> PullStats:
        """Every bucket proved; `path` appears complete or not at all, the manifest beside it
        (write.manifest_path).

        A source that cannot be reached or breaks off is tried again and again; waiting in a queue
        is no failure however long it takes. Raises WeightsError when nothing has arrived for
        `timeout_s`, not even a sign that we are queued; sooner if every source keeps refusing or
        sent wrong bytes; at once for a disk that is too small. The partial file stays, for the next
        pull; it is the owner's to remove.
        """
        raise NotImplementedError
