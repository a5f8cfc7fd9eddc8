"""Which nodes are not assigned as sources of the weights any more, because they sent wrong bytes.

Owns the reports and the rule by which they are believed. Every bucket is proved by whoever receives
it, so a source that lies costs time, never a wrong weight; and so does a node that lies about its
sources. Neither may cost much:

- Who reports a source is not sent to it again for this version. That harms nobody else.
- Nobody is sent to it for this version, if it is among the first MAX_BELIEVED that this node has
  reported of the version, and while no more than half of all sources are barred.
- Once two nodes have been believed, of the same version or of different ones, it is barred for all
  versions, until another process has its name.
- Who is barred itself is not believed: else a liar could take its accusers with it.
- The trainer is never barred. Digests come from it; if it cannot be pulled from, nobody can serve.

So one liar keeps at most MAX_BELIEVED nodes from serving, for a version each; and any number of
liars at most half of them, while the trainer and the other half serve everybody.
"""

MAX_BELIEVED = 2
MAX_REPORTERS = 4096  # of one version; more than a run has nodes
MAX_REMEMBERED = 1024  # sources that were reported of any version; the first are forgotten first


class BadSources:
    def __init__(self) -> None:
        # of the version at hand: reporter -> the sources that it has named, in order
        self._named: dict[str, dict[str, None]] = {}
        self._barred: set[str] = set()  # for all, of the version at hand
        # source -> its process, and who was believed, of any version
        self._believed: dict[str, tuple[int, set[str]]] = {}

    @property
    def has_any(self) -> bool:
        """Else `bars` is false whomever it is asked of."""
        return bool(self._named or self._barred or self._believed)

    def begin_version(self) -> None:
        """What was said of the version before holds for that one alone."""
        self._named.clear()
        self._barred.clear()

    def joined(self, name: str, incarnation: int) -> None:
        """A process begins with a clean slate; one that comes back does not."""
        if name in self._believed and self._believed[name][0] != incarnation:
            del self._believed[name]

    def report(self, reporter: str, source: str, incarnation: int, num_sources: int) -> bool:
        """Whether that is news. `incarnation`: of the source; `num_sources`: rollout nodes that can
        serve."""
        named = self._named.get(reporter, {})
        if source in named or len(self._named) >= MAX_REPORTERS:
            return False
        self._named[reporter] = named | {source: None}
        if len(named) >= MAX_BELIEVED or self.is_barred_for_all(reporter):
            return True
        if 2 * len(self._barred | {source}) > num_sources:
            return True
        self._barred.add(source)
        known, believed = self._believed.pop(source, (incarnation, set[str]()))
        believed = believed if known == incarnation else set[str]()
        self._believed[source] = incarnation, believed | {reporter}
        if len(self._believed) > MAX_REMEMBERED:
            del self._believed[next(iter(self._believed))]
        return True

    def is_barred_for_all(self, source: str) -> bool:
        return source in self._barred or len(self._believed.get(source, (0, ()))[1]) > 1

    def bars(self, node: str, source: str) -> bool:
        """Whether this node must not be sent to that source."""
        return self.is_barred_for_all(source) or source in self._named.get(node, ())
