"""What speculation did in a step, from what the nodes' engines count since they started.

An engine that starts again counts from zero; a node that has left keeps what it did. Does no I/O.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

from lightrl.messages.load import Drafting
from lightrl.messages.nodes import Heartbeat

MAX_KNOWN = 10_000  # processes of nodes, the one heard of longest ago is forgotten first


@dataclass(slots=True)
class SpeculationNote:
    """Sums over all steps."""

    drafted: float = 0.0
    kept: float = 0.0
    forwards: float = 0.0
    emitted: float = 0.0


class SpeculationMetrics:
    def __init__(self) -> None:
        # identity of a node -> what it said last
        self._last: OrderedDict[str, Drafting] = OrderedDict()
        self._news = Drafting()  # of all nodes, since the last figures
        self._all = SpeculationNote()

    def heard(self, identity: str, message: object) -> None:
        if not isinstance(message, Heartbeat):
            return
        before = self._last.get(identity)
        said = message.load.drafting or before or Drafting()
        # An engine that counts already when its node is first heard of did so for an earlier
        # coordinator.
        if before is not None and said is not before:
            if any(s < b for s, b in zip(astuple(said), astuple(before), strict=True)):
                before = Drafting()  # another engine
            self._news = _plus(self._news, said, before)
        self._last[identity] = said
        self._last.move_to_end(identity)
        if len(self._last) > MAX_KNOWN:
            self._last.popitem(last=False)

    def figures(self) -> dict[str, float]:
        """Of the step that ends; none if no engine speculates."""
        news, self._news = self._news, Drafting()
        if not news.forwards:
            return {}
        figures = _ratios(news.drafted, news.accepted, news.forwards, news.emitted)
        figures["speculation/forwards"] = float(news.forwards)
        if news.engine_s:
            figures["speculation/draft_share"] = news.draft_s / news.engine_s
        return figures

    def count(self, record: Mapping[str, float]) -> None:
        """A step of the run, of this coordinator or an earlier one."""
        drafted, forwards = (
            record.get("speculation/drafted", 0.0),
            record.get("speculation/forwards", 0.0),
        )
        self._all.drafted += drafted
        self._all.kept += drafted * record.get("speculation/acceptance", 0.0)
        self._all.forwards += forwards
        self._all.emitted += forwards * record.get("speculation/tokens_per_forward", 0.0)

    def note(self) -> SpeculationNote:
        return replace(self._all)

    def recall(self, note: SpeculationNote) -> None:
        """Of all steps so far, counted or not."""
        self._all = replace(note)

    def whole(self) -> dict[str, float]:
        """Of all steps that were counted; none if no engine speculated."""
        s = self._all
        return _ratios(s.drafted, s.kept, s.forwards, s.emitted) if s.forwards else {}


def _ratios(drafted: float, kept: float, forwards: float, emitted: float) -> dict[str, float]:
    figures = {
        "speculation/drafted": float(drafted),
        "speculation/tokens_per_forward": emitted / forwards,
    }
    if drafted:
        figures["speculation/acceptance"] = kept / drafted
    return figures


def _plus(total: Drafting, said: Drafting, before: Drafting) -> Drafting:
    columns = zip(astuple(total), astuple(said), astuple(before), strict=True)
    return Drafting(*(t + s - b for t, s, b in columns))
