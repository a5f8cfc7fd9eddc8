"""Who receives a version by broadcast: the groups of the training ranks and engines, one after the
other.

Owns the members of the current epoch, which of them still need the version, and which nodes are
excluded. A group lives for many versions; its members are decided again only at the boundary of a
step, when a version is to be sent. A node that joins between two boundaries pulls, and no group
waits for it. A lost member ends the epoch for all: each survivor pulls the version that was being
sent, and a later boundary forms a group without it. Pure; sends nothing: `broadcasts.py` does.

- A process that could not reach the trainer is excluded while this process of the trainer lives.
  Its report counts also after the group has ended, since the trainer's own time limit ends at the
  same moment. A node that was refused has reached the machine: that is a failure like any other.
- A process that has ended MAX_FAILURES groups in a row before they brought a version is excluded,
  too: it reported a failure, refused the version, sent another hello, drained or was late. The row
  starts again for the other members of the latest group if one of its members is lost.
- Groups that ended before they brought a version put the next attempt off by 1, 2, 4, ...
  boundaries, at most MAX_PAUSE. Weights are pulled meanwhile.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

Mode = Literal["auto", "always", "off"]
Backend = Literal["gloo", "nccl"]

MAX_FAILURES = 3
MAX_PAUSE = 64  # boundaries
MAX_PROCESSES = 1024  # with failures; the first are dropped first


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
        # (name, incarnation) -> failures in a row
        self._failures: dict[tuple[str, int], int] = {}
        self._trainer: tuple[str, int] | None = None  # this process
        self._over: tuple[str, Epoch] | None = None  # the last group with a name, which has ended

    def trained_by(self, name: str, incarnation: int) -> None:
        """The trainer is this process. A node may reach another process that could not reach the
        one before, so failures and late reports about groups of that one are dropped."""
        if self._trainer != (name, incarnation):
            self._trainer, self._over = (name, incarnation), None
            self._failures.clear()

    def at_boundary(self, members: tuple[Candidate, ...], backend: Backend = "gloo") -> None:
        """A version is to be sent to these. The phase is SENDING afterwards if there is a group of
        just them, OPENING if there must be one, and NONE if it is not for a broadcast: there is
        nobody, attempts are put off, or the version before was still on its way."""
        self._put_off = max(0, self._put_off - 1)
        if self.receiving and self.epoch is not None:
            late = self.receiving if self.phase is Phase.SENDING else ()
            for name in late:
                self._add_failure(self.epoch, name)
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
                self._failures.pop((member, self.epoch.incarnation_of(member)), None)

    # How it ends

    def fail(self, culprit: str | None = None, is_unreachable: bool = False) -> set[str]:
        """The epoch is over because of a failure; `culprit` is the member that says so, if it was
        one. Returns the nodes that were receiving and must pull."""
        if self.epoch is None:
            return set()
        self.num_lost += 1
        if culprit in self.epoch.members:
            self._add_failure(self.epoch, culprit, is_unreachable)
        return self.end()

    def lost(self, name: str, is_trainer: bool = False) -> set[str]:
        """A process has gone. Returns the nodes that were receiving and must pull. Other members of
        its group may have reported its death: their failures in a row start again."""
        group = self.epoch or (self._over[1] if self._over is not None else None)
        if group is not None and (is_trainer or name in group.members):
            for process in zip(group.members, group.incarnations, strict=True):
                if not self.excludes(*process):
                    self._failures.pop(process, None)
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

    # Which nodes are excluded

    def excludes(self, name: str, incarnation: int) -> bool:
        """Whether this process must not be a member again."""
        return self._failures.get((name, incarnation), 0) >= MAX_FAILURES

    def exclude_late(self, group: str, name: str) -> bool:
        """A member reports after the group has ended that it could not reach the trainer. Returns
        whether it was not excluded yet."""
        if self._over is None or self._over[0] != group or name not in self._over[1].members:
            return False
        epoch = self._over[1]
        is_new = not self.excludes(name, epoch.incarnation_of(name))
        self._add_failure(epoch, name, is_unreachable=True)
        return is_new

    def _add_failure(self, epoch: Epoch, name: str, is_unreachable: bool = False) -> None:
        process = name, epoch.incarnation_of(name)
        if is_unreachable:
            self._failures[process] = MAX_FAILURES
        elif not self._has_sent:
            self._failures[process] = self._failures.get(process, 0) + 1
        if len(self._failures) > MAX_PROCESSES:
            del self._failures[next(iter(self._failures))]

    def check(self) -> None:
        """Raises AssertionError if the parts contradict each other."""
        assert (self.epoch is None) == (self.phase is Phase.NONE)
        members: set[str] = set(self.epoch.members) if self.epoch is not None else set()
        assert self.receiving <= members
        assert bool(self.receiving) == (self.phase not in {Phase.NONE, Phase.STANDING})
        assert bool(self.name) == (self.phase not in {Phase.NONE, Phase.OPENING})
