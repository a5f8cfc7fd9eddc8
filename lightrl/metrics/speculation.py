"""What speculation did in a step, from the counters of the nodes' engines, which begin at zero with
each engine. A node that has left keeps what it did.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from lightrl.messages.load import Drafting
from lightrl.messages.nodes import Heartbeat

MAX_KNOWN = 10_000  # processes of nodes; the one with the oldest heartbeat is removed first


@dataclass(slots=True)
class SpeculationTotals:
    """Sums over all steps."""

    drafted: float = 0.0
    kept: float = 0.0
    forwards: float = 0.0
    emitted: float = 0.0


class SpeculationMetrics:
    def __init__(self) -> None:
        # identity of a node -> its newest counters
        self._last: OrderedDict[str, Drafting] = OrderedDict()
        self._news = Drafting()  # of all nodes, since the last figures
        self.totals = SpeculationTotals()

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
        if len(self._last) > MAX_KNOWN:
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
        get, totals = record.get, self.totals
        drafted, forwards = get("speculation/drafted", 0.0), get("speculation/forwards", 0.0)
        totals.drafted += drafted
        totals.kept += drafted * get("speculation/acceptance", 0.0)
        totals.forwards += forwards
        totals.emitted += forwards * get("speculation/tokens_per_forward", 0.0)

    def whole(self) -> dict[str, float]:
        """Return the figures of all counted steps; none if no engine speculated."""
        t = self.totals
        return _ratios(t.drafted, t.kept, t.forwards, t.emitted) if t.forwards else {}


def _ratios(drafted: float, kept: float, forwards: float, emitted: float) -> dict[str, float]:
    figures = {
        "speculation/drafted": float(drafted),
        "speculation/tokens_per_forward": emitted / forwards,
    }
    if drafted:
        figures["speculation/acceptance"] = kept / drafted
    return figures
