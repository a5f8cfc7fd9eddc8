"""Older processes of nodes that have been started again since: what they still say counts no more.

Remembered, not told by their numbers: these come from clocks, and a clock may jump.
"""

from collections import deque

GHOSTS_REMEMBERED = 16  # of one name, the newest: so many processes of it are never alive,
GHOST_NAMES_REMEMBERED = 4096  # and the names that were followed last: more than a run has nodes


class Ghosts:
    def __init__(self) -> None:
        self._replaced: dict[str, deque[int]] = {}  # incarnations that were followed by another

    def __contains__(self, process: tuple[str, int]) -> bool:
        """Whether this incarnation of a node was followed by another."""
        name, incarnation = process
        return incarnation in self._replaced.get(name, ())

    def __len__(self) -> int:
        """Names that are remembered."""
        return len(self._replaced)

    def add(self, name: str, incarnation: int) -> None:
        """Another incarnation speaks for this name from now on."""
        ghosts = self._replaced.pop(name, None) or deque(maxlen=GHOSTS_REMEMBERED)
        ghosts.append(incarnation)
        self._replaced[name] = ghosts  # the last of them now
        if len(self._replaced) > GHOST_NAMES_REMEMBERED:
            del self._replaced[next(iter(self._replaced))]
