"""How versions of the weights reached the nodes, from what the nodes say when they have loaded one.

Counted are all loads since the record before: of the version that begins a step the first ones, of
the one before those that were late. Does no I/O.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightrl.core.fleet import Fleet
from lightrl.messages.weights import WeightsReady

SUMS = (
    "bytes",
    "full_bytes",
    "from_peers",
    "delta_bytes",
    "delta_full_bytes",
    "broadcast_nodes",
)
MAXIMA = ("publish_s", "broadcast_s", "pull_s", "pause_s", "canary")


@dataclass(slots=True)
class _Loads:
    """Of some nodes; bytes are sums, seconds those of the slowest."""

    num_bytes: int = 0
    # what it would have been, had each of them got the whole version
    full_bytes: int = 0
    peer_bytes: int = 0
    delta_bytes: int = 0
    # of the nodes that got differences
    delta_full_bytes: int = 0
    # nodes that got it by broadcast
    broadcast_nodes: int = 0
    broadcast_s: float = 0.0
    pull_s: float = 0.0
    pause_s: float = 0.0
    # of those that have compared
    canary: float | None = None

    def add(self, ready: WeightsReady, full_bytes: int) -> None:
        self.num_bytes += ready.num_bytes
        self.full_bytes += full_bytes
        self.peer_bytes += ready.peer_bytes
        if ready.delta_bytes:
            self.delta_bytes += ready.delta_bytes
            self.delta_full_bytes += full_bytes
        if ready.broadcast_s is not None:
            self.broadcast_nodes += 1
            self.num_bytes += full_bytes
            self.broadcast_s = max(self.broadcast_s, ready.broadcast_s)
        self.pull_s = max(self.pull_s, ready.pull_s)
        self.pause_s = max(self.pause_s, ready.load_s)
        if ready.canary_diff is not None:
            self.canary = max(self.canary or 0.0, ready.canary_diff)


@dataclass(slots=True)
class WeightsNote:
    """Of all steps: sums, and the worst, by the names above."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    maxima: dict[str, float] = field(default_factory=dict[str, float])


class WeightsMetrics:
    def __init__(self) -> None:
        self._news = _Loads()  # since the last figures
        self._all = WeightsNote()

    def heard(self, fleet: Fleet, node: str, message: object) -> None:
        """Before the core hears it: of a version that the node has not confirmed yet."""
        if isinstance(message, WeightsReady) and fleet.awaits(node, message):
            assert fleet.published is not None
            self._news.add(message, fleet.published.num_bytes)

    def figures(self) -> dict[str, float]:
        """Of the step that ends; none if no node has loaded anything."""
        news, self._news = self._news, _Loads()
        if not news.full_bytes:
            return {}
        figures = {
            "weights/bytes": float(news.num_bytes),
            "weights/full_bytes": float(news.full_bytes),
            "weights/from_peers": float(news.peer_bytes),
            "weights/pull_s": news.pull_s,
            "weights/pause_s": news.pause_s,
        }
        if news.broadcast_nodes:
            figures["weights/broadcast_nodes"] = float(news.broadcast_nodes)
            figures["weights/broadcast_s"] = news.broadcast_s
        if news.delta_full_bytes:
            figures["weights/delta_bytes"] = float(news.delta_bytes)
            figures["weights/delta_full_bytes"] = float(news.delta_full_bytes)
            figures["weights/delta_ratio"] = news.delta_bytes / news.delta_full_bytes
        if news.canary is not None:
            figures["weights/canary"] = news.canary
        return figures

    def count(self, record: Mapping[str, float]) -> None:
        """A step of the run, of this coordinator or an earlier one."""
        for name in SUMS:
            self._all.sums[name] += record.get(f"weights/{name}", 0.0)
        for name in MAXIMA:
            value = record.get(f"weights/{name}")
            if value is not None and math.isfinite(value):  # a note says nothing else
                self._all.maxima[name] = max(value, self._all.maxima.get(name, value))

    def note(self) -> WeightsNote:
        return WeightsNote(dict(self._all.sums), dict(self._all.maxima))

    def recall(self, note: WeightsNote) -> None:
        """Of all steps so far, counted or not."""
        self._all = WeightsNote(dict(note.sums), dict(note.maxima))

    def whole(self) -> dict[str, float]:
        """Of all steps that were counted: bytes added up, seconds and canary at their worst."""
        sums = {name: value for name, value in self._all.sums.items() if value}
        figures = sums | self._all.maxima
        if full_bytes := sums.get("delta_full_bytes"):
            figures["delta_ratio"] = sums.get("delta_bytes", 0.0) / full_bytes
        return figures
