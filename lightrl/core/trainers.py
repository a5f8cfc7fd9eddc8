"""The nodes that train together: which of them leads, and whether all are there.

Owns that, and what they are told of each other. What the leader is sent to train is in
`trainer_feed.py`; how the nodes start and lose their ranks is theirs (trainer/nodes/node.py).
With one trainer node it leads, and nothing is told.
"""

from lightrl.core.commands import Outbox
from lightrl.messages.nodes import Hello
from lightrl.messages.trainers import TrainerSet


class Trainers:
    def __init__(self, num_needed: int, outbox: Outbox) -> None:
        self.leader: str | None = None
        self.num_needed = num_needed
        self._outbox = outbox
        self._numbers: dict[str, int] = {}  # of the last hello of each that is here
        self._num_hellos = 0
        self._told: dict[str, TrainerSet] = {}  # since the last hello of each

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    @property
    def names(self) -> list[str]:
        return sorted(self._numbers)

    @property
    def num_missing(self) -> int:
        return self.num_needed - len(self._numbers)

    @property
    def are_complete(self) -> bool:
        return self.leader is not None and not self.num_missing

    def missing_text(self) -> str:
        """In words; "" if all are here."""
        if self.num_needed == 1:
            return "a trainer" if self.num_missing else ""
        missing = self.num_missing
        return f"{missing} of {self.num_needed} trainer nodes" if missing else ""

    def lost_message(self, seconds: float) -> str:
        """What is said when one was lost."""
        return f"the run waits {seconds:g} s for {self.missing_text()} to come back"

    def why_refused(self, hello: Hello) -> str | None:
        """In one line, or None if there is room for it."""
        if len(self._numbers.keys() - {hello.node}) < self.num_needed:
            return None
        many = f"{self.num_needed} trainer nodes" if self.num_needed > 1 else "a trainer node"
        return f"this run has {many} already"

    def has_unknown(self, names: set[str]) -> bool:
        """Whether it is certain that one of these is no trainer node."""
        return not self.num_missing and not names <= self._numbers.keys()

    def heard(self, hello: Hello) -> None:
        """It takes part, or says so again.

        Who led before leads again, for it has the ranks of all; else one is chosen when all are
        there: the first by name, so that it is the one beside the coordinator where names say so.
        """
        self._num_hellos += 1
        self._numbers[hello.node] = self._num_hellos
        self._told.pop(hello.node, None)
        if self.leader is None and hello.leads:
            self.leader = hello.node
        elif self.leader is None and not self.num_missing:
            self.leader = self.names[0]

    def lost(self, name: str) -> None:
        self._numbers.pop(name, None)
        self._told.pop(name, None)
        if name == self.leader:
            self.leader = None

    def may_relay(self, sender: str, receiver: str) -> bool:
        """Whether what one says to the other is to be passed on: one of them leads."""
        return sender in self and receiver in self and self.leader in (sender, receiver)

    def tell(self) -> None:
        """Each of them who takes part now, if that is news to it."""
        if self.num_needed == 1:
            return
        followers = [name for name in self.names if name != self.leader]
        numbered = tuple((name, self._numbers[name]) for name in followers)
        now = TrainerSet(self.leader or "", numbered if self.are_complete else ())
        for name in self.names:
            if self._told.get(name) != now:
                self._told[name] = now
                self._outbox.send(name, now)
