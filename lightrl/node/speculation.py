"""What speculation did in a step, from what the nodes' engines count since they started.

An engine that starts again counts from zero; a node that has left keeps what it did. Does no I/O.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import astuple

from lightrl.messages import Drafting, Heartbeat

MAX_KNOWN = 10_000  # processes of nodes, the one heard of longest ago is forgotten first


class Speculation:
    def __init__(self) -> None:
        self._last: OrderedDict[str, Drafting] = OrderedDict()  # identity of a node -> what it said last
        self._news = Drafting()  # of all nodes, since the last figures
        self._drafted = self._kept = self._forwards = self._emitted = 0.0  # of all steps

    def heard(self, identity: str, message: object) -> None:
        if not isinstance(message, Heartbeat):
            return
        # An engine that counts already when its node is first heard of did so for an earlier coordinator.
        said = message.load.drafting or self._last.get(identity, Drafting())
        before = self._last.get(identity, said)
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
        figures = {
            "speculation/drafted": float(news.drafted),
            "speculation/forwards": float(news.forwards),
            "speculation/tokens_per_forward": news.emitted / news.forwards,
        }
        if news.drafted:
            figures["speculation/acceptance"] = news.accepted / news.drafted
        if news.engine_s:
            figures["speculation/draft_share"] = news.draft_s / news.engine_s
        return figures

    def count(self, record: Mapping[str, float]) -> None:
        """A step of the run, of this coordinator or an earlier one."""
        drafted, forwards = record.get("speculation/drafted", 0.0), record.get("speculation/forwards", 0.0)
        self._drafted += drafted
        self._kept += drafted * record.get("speculation/acceptance", 0.0)
        self._forwards += forwards
        self._emitted += forwards * record.get("speculation/tokens_per_forward", 0.0)

    def whole(self) -> dict[str, float]:
        """Of all steps that were counted; none if no engine speculated."""
        if not self._forwards:
            return {}
        figures = {
            "speculation/drafted": self._drafted,
            "speculation/tokens_per_forward": self._emitted / self._forwards,
        }
        if self._drafted:
            figures["speculation/acceptance"] = self._kept / self._drafted
        return figures


def _plus(total: Drafting, said: Drafting, before: Drafting) -> Drafting:
    columns = zip(astuple(total), astuple(said), astuple(before), strict=True)
    return Drafting(*(t + s - b for t, s, b in columns))
