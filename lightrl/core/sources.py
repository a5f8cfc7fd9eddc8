"""From whom a node pulls a version of the weights. A pure function: a run, the simulator and the
tests agree.

Owns the order in which a node asks and how many it is told of. Who holds what, and who has sent
wrong bytes, is kept in `offers.py`. How the bytes travel: weights/pull.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import filterfalse, islice

MAX_PEERS = 16  # rollout nodes that one node is told of, beside the trainer


def choose(
    index: int,
    whole: Sequence[str],
    partial: Sequence[str],
    trainer: str | None,
    is_barred: Callable[[str], bool],
) -> tuple[str, ...]:
    """Nodes in the order in which a node should ask them: those that hold all of the version, those
    that are still at it and serve what they have, the trainer. While that is away, one that has all
    of the version comes last instead: whoever is last is spared by those who can help each other.

    `index` is the place of the node that asks, in `partial` if it is there: each begins elsewhere,
    so that no source is the first of all. `is_barred`: who it must not be sent to, itself included;
    never the trainer.
    """
    holders = _take(whole, index, MAX_PEERS, is_barred)
    others = _take(partial, index, MAX_PEERS - len(holders), is_barred)
    if trainer is not None:
        return (*holders, *others, trainer)
    return (*holders[1:], *others, *holders[:1])


def _take(
    ring: Sequence[str], start: int, count: int, is_barred: Callable[[str], bool]
) -> list[str]:
    size = len(ring)
    few = (ring[(start + step) % size] for step in _distances(size))
    taken = dict.fromkeys(islice(filterfalse(is_barred, few), count))
    for step in range(size):
        if len(taken) >= count:
            break
        name = ring[(start + step) % size]
        if not is_barred(name):
            taken[name] = None
    return list(taken)


@lru_cache(maxsize=4096)  # sizes: a fleet that joins passes through all
def _distances(size: int) -> tuple[int, ...]:
    """Of the neighbours that a place in a ring of this size has: few near, few far.

    Were all of them near, a bucket would need size / MAX_PEERS relays to come around; so it needs
    about log(size). Every place is the neighbour of as many others as it has neighbours.
    """
    if size <= MAX_PEERS:
        return ()
    return tuple(sorted({int(size ** (k / MAX_PEERS)) for k in range(MAX_PEERS)}))


class Ring:
    """Names in some fixed order. Adding one and removing one costs the same however many there
    are."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._places: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self.names)

    def place(self, name: str, default: int) -> int:
        return self._places.get(name, default)

    def put(self, name: str, is_member: bool) -> None:
        """From now on it is one of them, or not."""
        place = self._places.get(name)
        if is_member and place is None:
            self._places[name] = len(self.names)
            self.names.append(name)
        elif not is_member and place is not None:
            del self._places[name]
            last = self.names.pop()
            if last != name:
                self.names[place] = last
                self._places[last] = place

    def clear(self) -> None:
        self.names.clear()
        self._places.clear()
