"""How versions of the weights reached the nodes, from their reports of each load.

A record counts all loads since the record before: the first ones of the version that begins a step,
and late ones of the version before.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightrl.core.nodes.fleet import Fleet
from lightrl.messages.weights import WeightsReady

# names of weights/..., over nodes and over steps
SUMS = ("bytes", "full_bytes", "from_peers", "delta_bytes", "delta_full_bytes", "broadcast_nodes")
MAXIMA = ("publish_s", "broadcast_s", "pull_s", "pause_s", "canary")


@dataclass(slots=True)
class WeightsTotals:
    sums: dict[str, float] = field(default_factory=dict[str, float])
    maxima: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, sums: Mapping[str, float], maxima: Mapping[str, float | None]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in maxima.items():
            if value is not None:
                self.maxima[name] = max(value, self.maxima.get(name, value))

    def figures(self) -> dict[str, float]:
        figures = self.sums | self.maxima
        if full_bytes := self.sums.get("delta_full_bytes"):
            figures["delta_ratio"] = self.sums.get("delta_bytes", 0.0) / full_bytes
        return figures


class WeightsMetrics:
    def __init__(self) -> None:
        self._news = WeightsTotals()  # since the last figures
        self.totals = WeightsTotals()  # of all counted steps

    def received(self, fleet: Fleet, node: str, message: object) -> None:
        """Count a load. Call it before the core handles the message: a version that the node has
        confirmed already does not count."""
        if not isinstance(message, WeightsReady) or not fleet.awaits(node, message):
            return
        assert fleet.published is not None
        full_bytes, ready = fleet.published.num_bytes, message
        is_broadcast = ready.broadcast_s is not None
        sums = {
            "bytes": ready.num_bytes + full_bytes * is_broadcast,
            # if each node had got the whole version
            "full_bytes": full_bytes,
            "from_peers": ready.peer_bytes,
        }
        if ready.delta_bytes:
            sums |= {"delta_bytes": ready.delta_bytes, "delta_full_bytes": full_bytes}
        if is_broadcast:
            sums["broadcast_nodes"] = 1
        maxima = {
            "broadcast_s": ready.broadcast_s,
            "pull_s": ready.pull_s,
            "pause_s": ready.load_s,
            "canary": ready.canary_diff,
        }
        self._news.add(sums, maxima)

    def figures(self) -> dict[str, float]:
        """Return the figures of the step that ends; none if no node has loaded anything."""
        news, self._news = self._news, WeightsTotals()
        return {f"weights/{name}": float(value) for name, value in news.figures().items()}

    def count(self, record: Mapping[str, float]) -> None:
        """Count the record of a step."""
        sums = {n: record[f"weights/{n}"] for n in SUMS if record.get(f"weights/{n}")}
        maxima = {n: record.get(f"weights/{n}", math.nan) for n in MAXIMA}
        # the journal holds finite numbers alone
        self.totals.add(sums, {n: value for n, value in maxima.items() if math.isfinite(value)})
