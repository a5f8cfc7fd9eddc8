"""Who receives a version by broadcast: the groups of the training ranks and engines, one after the
other.

Owns who is a member and in which epoch, who still has to get the version at hand, and who is no
candidate any more. A group lives for many versions; it is decided anew only at the boundary of a
step, when a version is to be sent. Whoever joins between two boundaries pulls, and no group waits
for it. Whoever is lost ends the epoch for all: each survivor pulls what was being sent, and a later
boundary forms another group without it. Pure; sends nothing: `broadcasts.py` does.

A member can end an epoch by a word, and make others pull; it must not be able to do so for ever:

- A process that could not reach the trainer (nobody answered at that address until the time limit,
  or there is no way to it) is no candidate again while this process of the trainer is there. Its
  word counts also when the group is over, as it mostly is: the trainer's own time limit ends at the
  same time. It does not depend on the group whether anybody answers for an address. Whoever is
  refused there has reached the machine, and the group may simply be over: that is a failure as any
  other, and nothing at all where the group is over already.
- Who has ended MAX_MARKS epochs by its own word (a failure, a refused version, another hello), or
  was still at a version when the next one came, is none either. FORGIVEN_AFTER versions received
  take one such mark away. So it spoils about one version in FORGIVEN_AFTER at most.
- Who says so because another member has died is not to blame: the mark is taken back if one is
  lost before the next boundary.
- Epochs that were over before they brought a version to all, whoever ended them, put the next
  attempt off by 1, 2, 4, ... boundaries, MAX_PAUSE at most: so those who come under ever new names
  cost little, and weights come by pull.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

Mode = Literal["auto", "always", "off"]
Backend = Literal["gloo", "nccl"]

MAX_MARKS = 3
FORGIVEN_AFTER = 8  # versions
MAX_PAUSE = 64  # boundaries
MAX_REMEMBERED = 1024  # processes with marks; the first are forgotten first


class Phase(StrEnum):
    # there is no group
    NONE = "none"
    # the trainer was asked where members can meet
    OPENING = "opening"
    # members have been told; not all have said that they are there
    FORMING = "forming"
    # a version is on its way
    SENDING = "sending"
    # all have it; the next one will come
    STANDING = "standing"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rollout node as it is at a boundary. Example: Candidate("rollout-0", 17, "host-a", 1)."""

    name: str
    incarnation: int
    host: str
    # of its engine, each a member of its own
    num_workers: int
    # responses run there
    is_busy: bool = False
    is_cuda: bool = False


@dataclass(frozen=True, slots=True)
class Epoch:
    """A group. `first_ranks[i]` is the place of the first worker of `members[i]`; the training
    ranks come before all of them. Example: Epoch(3, 2, ("rollout-0",), (17,), (2,), 3, "gloo")"""

    number: int
    num_ranks: int
    members: tuple[str, ...]
    incarnations: tuple[int, ...]
    first_ranks: tuple[int, ...]
    world: int
    backend: Backend

    def incarnation_of(self, member: str) -> int:
        return self.incarnations[self.members.index(member)]


def choose(
    candidates: Iterable[Candidate], trainer_host: str, trainer_is_cuda: bool, mode: Mode
) -> tuple[tuple[Candidate, ...], Backend]:
    """The members at this boundary, by name, and what they speak.

    "auto": who is idle, so that nobody stands still who could generate, and not on the trainer's
    machine, where the version's file is mapped as it lies. "always": busy ones and those, too; but
    not with NCCL, where two processes of one device cannot be two members.
    """
    fit = [] if mode == "off" else list(candidates)
    if mode == "auto":
        fit = [c for c in fit if not c.is_busy and c.host != trainer_host]
    backend: Backend = "nccl" if trainer_is_cuda and all(c.is_cuda for c in fit) else "gloo"
    if backend == "nccl":
        fit = [c for c in fit if c.host != trainer_host]
    return tuple(sorted(fit, key=lambda c: c.name)), backend


class BroadcastGroups:
    def __init__(self, num_ranks: int) -> None:
        self.phase = Phase.NONE
        self.epoch: Epoch | None = None  # None if and only if the phase is NONE
        self.name = ""  # of the group; "" until it is opened
        # members that do not have the version at hand: some while it opens, forms or sends
        self.receiving: set[str] = set()
        self.num_epochs = 0
        self.num_sent = 0  # versions that all members have got
        self.num_lost = 0  # epochs that a lost or late member, or a failure, has ended
        self._num_ranks = num_ranks
        self._joined: set[str | None] = set()  # while it forms: nodes, and None for the trainer
        self._has_sent = False  # a version, in this epoch
        self._pause = 1  # boundaries that the next attempt is put off, if this one fails
        self._put_off = 0  # boundaries until there may be another attempt
        # name -> process, and its marks times FORGIVEN_AFTER
        self._marks: dict[str, tuple[int, int]] = {}
        self._unreached: dict[str, int] = {}  # name -> process that could not reach
        self._trainer: tuple[str, int] | None = None  # this process
        self._over: tuple[str, Epoch] | None = None  # the last group with a name, which has ended
        # who has got a mark since the last boundary, and the other members
        self._blamed: tuple[str, frozenset[str]] | None = None

    def trained_by(self, name: str, incarnation: int) -> None:
        """The trainer is this process. Another one may be reached by who could not reach the one
        before; and what is still said of groups of that one, whose machine may have gone with it,
        says nothing."""
        if self._trainer != (name, incarnation):
            self._trainer, self._over = (name, incarnation), None
            self._unreached.clear()

    def at_boundary(self, members: tuple[Candidate, ...], backend: Backend = "gloo") -> None:
        """A version is to be sent to these. The phase is SENDING afterwards if there is a group of
        just them, OPENING if there must be one, and NONE if it is not for a broadcast: there is
        nobody, attempts are put off, or the version before was still on its way."""
        self._put_off = max(0, self._put_off - 1)
        self._blamed = None
        if self.receiving and self.epoch is not None:
            late = self.receiving if self.phase is Phase.SENDING else ()
            for name in late:
                self._mark(self.epoch, name)
            self.num_lost += 1
            self.end()
            return
        wanted = self._epoch_of(members, backend)
        if self.epoch is not None and replace(self.epoch, number=wanted.number) == wanted:
            self.phase = Phase.SENDING
            self.receiving = set(wanted.members)
            return
        self.end()
        if not members or self._put_off:
            return
        self.num_epochs += 1
        self.phase, self.epoch, self.receiving = Phase.OPENING, wanted, set(wanted.members)

    def _epoch_of(self, members: tuple[Candidate, ...], backend: Backend) -> Epoch:
        firsts: list[int] = []
        world = self._num_ranks
        for member in members:
            firsts.append(world)
            world += member.num_workers
        names = tuple(m.name for m in members)
        incarnations = tuple(m.incarnation for m in members)
        number = self.num_epochs + 1
        return Epoch(number, self._num_ranks, names, incarnations, tuple(firsts), world, backend)

    def opened(self, number: int, name: str) -> Epoch | None:
        """The members of this epoch can meet, under this name. None: it is not awaited."""
        if self.epoch is None or self.epoch.number != number or self.phase is not Phase.OPENING:
            return None
        self.phase, self.name, self._joined = Phase.FORMING, name, set()
        return self.epoch

    def joined(self, group: str, name: str | None) -> bool:
        """A node, or with None the trainer, is in this group; whether all are, so that the version
        can be sent."""
        if self.epoch is None or self.name != group or self.phase is not Phase.FORMING:
            return False
        if name is None or name in self.epoch.members:
            self._joined.add(name)
        if len(self._joined) < 1 + len(self.epoch.members):
            return False
        self.phase = Phase.SENDING
        return True

    def received(self, name: str) -> None:
        """A node has all of the version that is being sent and has proved it."""
        if self.phase is not Phase.SENDING or self.epoch is None or name not in self.receiving:
            return
        self.receiving.discard(name)
        if not self.receiving:
            self.phase = Phase.STANDING
            self.num_sent += 1
            self._has_sent = True
            self._pause = 1
            for member in self.epoch.members:
                self._forgive(member)

    # How it ends

    def fail(self, culprit: str | None = None, is_unreachable: bool = False) -> set[str]:
        """The epoch is over because of a failure; `culprit` is the member that says so, if it was
        one. Returns the nodes that were receiving and must pull."""
        if self.epoch is None:
            return set()
        self.num_lost += 1
        if culprit in self.epoch.members and is_unreachable:
            self._bar(self.epoch, culprit)
        elif culprit in self.epoch.members:
            self._mark(self.epoch, culprit)
            self._blamed = culprit, frozenset(self.epoch.members) - {culprit}
        return self.end()

    def lost(self, name: str, is_trainer: bool = False) -> set[str]:
        """A process has gone. Returns the nodes that were receiving and must pull."""
        if self._blamed is not None and (is_trainer or name in self._blamed[1]):
            self._forgive(self._blamed[0], FORGIVEN_AFTER)
            self._blamed = None
        if self.epoch is None or not (is_trainer or name in self.epoch.members):
            return set()
        self.num_lost += 1
        return self.end() - {name}

    def end(self) -> set[str]:
        """The epoch is over. Returns the nodes that were receiving and must pull."""
        if self.epoch is not None and not self._has_sent:
            self._put_off, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)
        if self.epoch is not None and self.name:
            self._over = self.name, self.epoch
        were = self.receiving
        self.phase, self.epoch, self.name = Phase.NONE, None, ""
        self.receiving, self._joined, self._has_sent = set(), set(), False
        return were

    # Who is no candidate

    def bars(self, name: str, incarnation: int) -> bool:
        """Whether this process must not be a member again."""
        process, marks = self._marks.get(name, (incarnation, 0))
        has_ended_too_many = process == incarnation and marks > (MAX_MARKS - 1) * FORGIVEN_AFTER
        return has_ended_too_many or self._unreached.get(name) == incarnation

    def bar_late(self, group: str, name: str) -> bool:
        """A member could not reach the trainer, and says so when the group is over; whether that is
        news."""
        if self._over is None or self._over[0] != group or name not in self._over[1].members:
            return False
        epoch = self._over[1]
        is_news = not self.bars(name, epoch.incarnation_of(name))
        self._bar(epoch, name)
        return is_news

    def _bar(self, epoch: Epoch, name: str) -> None:
        self._unreached.pop(name, None)
        self._unreached[name] = epoch.incarnation_of(name)
        if len(self._unreached) > MAX_REMEMBERED:
            del self._unreached[next(iter(self._unreached))]

    def _mark(self, epoch: Epoch, name: str) -> None:
        incarnation = epoch.incarnation_of(name)
        process, marks = self._marks.pop(name, (incarnation, 0))
        before = marks if process == incarnation else 0
        self._marks[name] = incarnation, before + FORGIVEN_AFTER
        if len(self._marks) > MAX_REMEMBERED:
            del self._marks[next(iter(self._marks))]

    def _forgive(self, name: str, share: int = 1) -> None:
        """One mark has FORGIVEN_AFTER shares."""
        if name in self._marks:
            process, marks = self._marks[name]
            self._marks[name] = process, max(0, marks - share)

    def check(self) -> None:
        """Raises AssertionError if the parts contradict each other."""
        assert (self.epoch is None) == (self.phase is Phase.NONE)
        members: set[str] = set(self.epoch.members) if self.epoch is not None else set()
        assert self.receiving <= members
        assert bool(self.receiving) == (self.phase not in {Phase.NONE, Phase.STANDING})
        assert bool(self.name) == (self.phase not in {Phase.NONE, Phase.OPENING})
