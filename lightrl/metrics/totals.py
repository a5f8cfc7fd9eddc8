"""What speculation did, and how versions of the weights reached the nodes: figures of each step,
and totals of all counted steps.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from lightrl.core.nodes.fleet import Fleet
from lightrl.messages.load import Drafting
from lightrl.messages.nodes import Heartbeat
from lightrl.messages.weights import WeightsReady

MAX_PROCESSES = 10_000  # of nodes; the one with the oldest heartbeat is removed first


@dataclass(slots=True)
class Totals:
    """Sums and maxima by name, as they are in the journal."""

    sums: dict[str, float] = field(default_factory=dict[str, float])
    maxima: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, sums: Mapping[str, float], maxima: Mapping[str, float | None]) -> None:
        """Add figures; of the maxima None is unknown."""
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


class SpeculationMetrics:
    """Sum the counters of engines, which begin at zero with each engine. Counters of a node that
    has left are kept."""

    def __init__(self) -> None:
        # identity of a node -> its newest counters
        self._last: OrderedDict[str, Drafting] = OrderedDict()
        self._news = Drafting()  # of all nodes, since the last figures
        self.total = Drafting()  # of all steps so far

    def received(self, identity: str, message: object) -> None:
        if not isinstance(message, Heartbeat):
            return
        before = self._last.get(identity)
        now = message.load.drafting or before or Drafting()
        # The first counters of a node may be of work for an earlier coordinator: not counted.
        if before is not None and now is not before:
            if any(n < b for n, b in zip(astuple(now), astuple(before), strict=True)):
                before = Drafting()  # another engine
            self._news = _added(self._news, _added(now, before, -1))
        self._last[identity] = now
        self._last.move_to_end(identity)
        if len(self._last) > MAX_PROCESSES:
            self._last.popitem(last=False)

    def figures(self) -> dict[str, float]:
        """Return the figures of the step that ends; none if no engine speculates."""
        news, self._news = self._news, Drafting()
        self.total = _added(self.total, news)
        figures = _ratios(news)
        if figures:
            figures["speculation/forwards"] = float(news.forwards)
        if figures and news.engine_s:
            figures["speculation/draft_share"] = news.draft_s / news.engine_s
        return figures

    def whole(self) -> dict[str, float]:
        """Return the figures of all steps so far; none if no engine speculated."""
        return _ratios(self.total)


def _added(one: Drafting, other: Drafting, times: int = 1) -> Drafting:
    pairs = zip(astuple(one), astuple(other), strict=True)
    return Drafting(*(a + times * b for a, b in pairs))


def _ratios(of: Drafting) -> dict[str, float]:
    if not of.forwards:
        return {}
    figures = {
        "speculation/drafted": float(of.drafted),
        "speculation/tokens_per_forward": of.emitted / of.forwards,
    }
    if of.drafted:
        figures["speculation/acceptance"] = of.accepted / of.drafted
    return figures


class WeightsMetrics:
    """From the reports of each load. A record counts all loads since the record before: the first
    ones of the version that begins a step, and late ones of the version before."""

    def __init__(self) -> None:
        self._news = Totals()  # since the last figures
        self.totals = Totals()  # of all steps so far

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

    def figures(self, publish_s: float | None = None) -> dict[str, float]:
        """Return the figures of the step that ends; none if no node has loaded anything.
        `publish_s`: to write its version, None = unknown."""
        news, self._news = self._news, Totals()
        news.add({}, {"publish_s": publish_s})
        # the journal holds finite numbers alone
        self.totals.add(news.sums, {n: v for n, v in news.maxima.items() if math.isfinite(v)})
        return {f"weights/{name}": float(value) for name, value in news.figures().items()}
