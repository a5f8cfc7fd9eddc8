"""Who receives a version by broadcast: the groups of the training ranks and engines, one after the
other.

Owns who is a member and in which epoch, and what a version is sent to. A group lives for many
versions; it is decided anew only at the boundary of a step, when a version is to be sent. Whoever
joins between two boundaries pulls, and no group waits for it. Whoever is lost ends the epoch for
all: each survivor pulls what was being sent, and the next boundary forms another group without it.
Pure; sends nothing: what a node or the trainer is to be told is returned.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Mode = Literal["auto", "always", "off"]


class Phase(StrEnum):
    # there is no group
    NONE = "none"
    # members have been told where they meet; not all have said that they are there
    FORMING = "forming"
    # all are in it
    STANDING = "standing"
    # a version is on its way
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rollout node as it is at a boundary. Example: Candidate("rollout-0", 17, "host-a", 1)."""

    name: str
    incarnation: int
    host: str
    # of its engine, each a member of its own
    num_workers: int
    # serves, or is about to
    is_up: bool = True
    is_preemptible: bool = False
    # responses run there
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Epoch:
    """A group. `first_ranks[i]` is the place of the first worker of `members[i]`; the training
    ranks come before all of them. Example: Epoch(3, 2, ("rollout-0",), (17,), (2,), world=3)"""

    number: int
    num_ranks: int
    members: tuple[str, ...]
    incarnations: tuple[int, ...]
    first_ranks: tuple[int, ...]
    world: int


def choose(candidates: Iterable[Candidate], trainer_host: str, mode: Mode) -> tuple[Candidate, ...]:
    """The members at this boundary, by name.

    "auto": who is idle, so that nobody stands still who could generate, and not on the trainer's
    machine, where the version's file is mapped as it lies. "always": busy ones and those, too.
    Never one that may be taken away at any moment: it would end the epoch for all others.
    """
    if mode == "off":
        return ()
    fit = [c for c in candidates if c.is_up and not c.is_preemptible]
    if mode == "auto":
        fit = [c for c in fit if not c.is_busy and c.host != trainer_host]
    return tuple(sorted(fit, key=lambda c: c.name))


class BroadcastGroups:
    def __init__(self, num_ranks: int) -> None:
        self.phase = Phase.NONE
        self.epoch: Epoch | None = None  # None if and only if the phase is NONE
        self.num_epochs = 0
        self.num_lost = 0  # epochs that a lost member, or a failure, has ended
        self._num_ranks = num_ranks
        self._joined: set[str | None] = set()  # while it forms: nodes, and None for the trainer
        self._receiving: set[str] = set()  # while it sends: those that have not said how it ended

    def at_boundary(self, members: tuple[Candidate, ...]) -> Epoch | None:
        """The group that must be formed for these, or None: the one there is has just them, or
        there is nobody. Where it is another one, the one before is over; while one still forms or
        sends, the version is not for a broadcast and nothing changes."""
        if self.phase in {Phase.FORMING, Phase.SENDING}:
            return None
        wanted = tuple((m.name, m.incarnation) for m in members)
        if self.epoch is not None:
            if wanted == tuple(zip(self.epoch.members, self.epoch.incarnations, strict=True)):
                return None
            self.end()
        if not members:
            return None
        firsts: list[int] = []
        world = self._num_ranks
        for member in members:
            firsts.append(world)
            world += member.num_workers
        names, incarnations = zip(*wanted, strict=True)
        self.num_epochs += 1
        self.epoch = Epoch(
            self.num_epochs, self._num_ranks, names, incarnations, tuple(firsts), world
        )
        self.phase, self._joined = Phase.FORMING, set()
        return self.epoch

    def joined(self, number: int, name: str | None) -> bool:
        """A node, or with None the trainer, is in the group of this epoch; whether it stands
        now."""
        if self.epoch is None or self.epoch.number != number or self.phase is not Phase.FORMING:
            return False
        if name is None or name in self.epoch.members:
            self._joined.add(name)
        if len(self._joined) < 1 + len(self.epoch.members):
            return False
        self.phase = Phase.STANDING
        return True

    def begin_sending(self) -> tuple[str, ...]:
        """The nodes to which a version is sent now; none if no group stands."""
        if self.epoch is None or self.phase is not Phase.STANDING:
            return ()
        self.phase = Phase.SENDING
        self._receiving = set(self.epoch.members)
        return self.epoch.members

    def received(self, number: int, name: str) -> None:
        """A node has all of the version and has proved it."""
        if self.epoch is not None and self.epoch.number == number and self.phase is Phase.SENDING:
            self._receiving.discard(name)
            if not self._receiving:
                self.phase = Phase.STANDING

    def failed(self, number: int) -> tuple[str, ...]:
        """Somebody says that the group of this epoch is over, or that a proof failed. Returns the
        nodes that must pull."""
        if self.epoch is None or self.epoch.number != number:
            return ()
        self.num_lost += 1
        return self.end()

    def lost(self, name: str, is_trainer: bool = False) -> tuple[str, ...]:
        """A node has gone, or drains, or its engine has died. Returns the nodes that must pull."""
        if self.epoch is None or not (is_trainer or name in self.epoch.members):
            return ()
        self.num_lost += 1
        return tuple(n for n in self.end() if n != name)

    def end(self) -> tuple[str, ...]:
        """The epoch is over. Returns the nodes that were receiving and must pull."""
        were = tuple(sorted(self._receiving)) if self.phase is Phase.SENDING else ()
        self.phase, self.epoch = Phase.NONE, None
        self._joined, self._receiving = set(), set()
        return were

    def check(self) -> None:
        """Raises AssertionError if the parts contradict each other."""
        assert (self.epoch is None) == (self.phase is Phase.NONE)
        members: set[str] = set(self.epoch.members) if self.epoch is not None else set()
        assert self._receiving <= members
        assert (self.phase is Phase.SENDING) == bool(self._receiving)
