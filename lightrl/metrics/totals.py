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
# names of weights/..., over nodes and over steps
SUMS = ("bytes", "full_bytes", "from_peers", "delta_bytes", "delta_full_bytes", "broadcast_nodes")
MAXIMA = ("publish_s", "broadcast_s", "pull_s", "pause_s", "canary")


@dataclass(slots=True)
class Totals:
    """Sums and maxima by name, as they are in the journal."""

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


class SpeculationMetrics:
    """Sum the counters of engines, which begin at zero with each engine. Counters of a node that
    has left are kept."""

    def __init__(self) -> None:
        # identity of a node -> its newest counters
        self._last: OrderedDict[str, Drafting] = OrderedDict()
        self._news = Drafting()  # of all nodes, since the last figures
        self.totals = Totals()

    def received(self, identity: str, message: object) -> None:
        if not isinstance(message, Heartbeat):
            return
        before = self._last.get(identity)
        now = message.load.drafting or before or Drafting()
        # The first counters of a node may be of work for an earlier coordinator: not counted.
        if before is not None and now is not before:
            if any(n < b for n, b in zip(astuple(now), astuple(before), strict=True)):
                before = Drafting()  # another engine
            columns = zip(astuple(self._news), astuple(now), astuple(before), strict=True)
            self._news = Drafting(*(t + n - b for t, n, b in columns))
        self._last[identity] = now
        self._last.move_to_end(identity)
        if len(self._last) > MAX_PROCESSES:
            self._last.popitem(last=False)

    def figures(self) -> dict[str, float]:
        """Return the figures of the step that ends; none if no engine speculates."""
        news, self._news = self._news, Drafting()
        if not news.forwards:
            return {}
        figures = _ratios(news.drafted, news.accepted, news.forwards, news.emitted)
        figures["speculation/forwards"] = float(news.forwards)
        if news.engine_s:
            figures["speculation/draft_share"] = news.draft_s / news.engine_s
        return figures

    def count(self, record: Mapping[str, float]) -> None:
        """Count the record of a step."""
        get = record.get
        drafted, forwards = get("speculation/drafted", 0.0), get("speculation/forwards", 0.0)
        sums = {
            "drafted": drafted,
            "kept": drafted * get("speculation/acceptance", 0.0),
            "forwards": forwards,
            "emitted": forwards * get("speculation/tokens_per_forward", 0.0),
        }
        self.totals.add(sums, {})

    def whole(self) -> dict[str, float]:
        """Return the figures of all counted steps; none if no engine speculated."""
        sums = self.totals.sums
        return _ratios(**sums) if sums.get("forwards") else {}


def _ratios(drafted: float, kept: float, forwards: float, emitted: float) -> dict[str, float]:
    figures = {
        "speculation/drafted": float(drafted),
        "speculation/tokens_per_forward": emitted / forwards,
    }
    if drafted:
        figures["speculation/acceptance"] = kept / drafted
    return figures


class WeightsMetrics:
    """From the reports of each load. A record counts all loads since the record before: the first
    ones of the version that begins a step, and late ones of the version before."""

    def __init__(self) -> None:
        self._news = Totals()  # since the last figures
        self.totals = Totals()  # of all counted steps

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
        news, self._news = self._news, Totals()
        return {f"weights/{name}": float(value) for name, value in news.figures().items()}

    def count(self, record: Mapping[str, float]) -> None:
        """Count the record of a step."""
        sums = {n: record[f"weights/{n}"] for n in SUMS if record.get(f"weights/{n}")}
        maxima = {n: record.get(f"weights/{n}", math.nan) for n in MAXIMA}
        # the journal holds finite numbers alone
        self.totals.add(sums, {n: value for n, value in maxima.items() if math.isfinite(value)})
