"""The nodes that train together: which node leads, and whether all take part.

Also sends TrainerSet, which names the leader and the followers; not sent with a single trainer
node, which leads. `trainer_feed.py` sends the leader its shards; trainer/nodes/node.py starts the
ranks of a node and handles their loss.
"""

from lightrl.core.commands import Outbox
from lightrl.messages.nodes import Hello
from lightrl.messages.trainers import TrainerSet


class Trainers:
    def __init__(self, num_needed: int, outbox: Outbox) -> None:
        self.leader: str | None = None
        self.num_needed = num_needed
        self._outbox = outbox
        self._numbers: dict[str, int] = {}  # by node: number of its last Hello
        self._num_hellos = 0
        self._sent: dict[str, TrainerSet] = {}  # sent since the last Hello of each

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
        """Return text that names what is missing; "" if nothing is."""
        if self.num_needed == 1:
            return "a trainer" if self.num_missing else ""
        missing = self.num_missing
        return f"{missing} of {self.num_needed} trainer nodes" if missing else ""

    def lost_message(self, seconds: float) -> str:
        """Return the line to report when a trainer node was lost."""
        return f"the run waits {seconds:g} s for {self.missing_text()} to come back"

    def why_refused(self, hello: Hello) -> str | None:
        """Return why the node is refused, in one line; None if the run lacks a trainer node."""
        if len(self._numbers.keys() - {hello.node}) < self.num_needed:
            return None
        many = f"{self.num_needed} trainer nodes" if self.num_needed > 1 else "a trainer node"
        return f"this run has {many} already"

    def has_unknown(self, names: set[str]) -> bool:
        """Return whether a name is not of a trainer node; False until all trainer nodes have
        joined."""
        return not self.num_missing and not names <= self._numbers.keys()

    def on_hello(self, hello: Hello) -> None:
        """Handle the Hello of a trainer node.

        The former leader, which controls all ranks, leads again; otherwise the first node by name
        leads once all have joined.
        """
        self._num_hellos += 1
        self._numbers[hello.node] = self._num_hellos
        self._sent.pop(hello.node, None)
        if self.leader is None and hello.leads:
            self.leader = hello.node
        elif self.leader is None and not self.num_missing:
            self.leader = self.names[0]

    def lost(self, name: str) -> None:
        self._numbers.pop(name, None)
        self._sent.pop(name, None)
        if name == self.leader:
            self.leader = None

    def may_relay(self, sender: str, receiver: str) -> bool:
        """Return whether messages between two nodes are relayed: one of them must lead."""
        return sender in self and receiver in self and self.leader in (sender, receiver)

    def send_set(self) -> None:
        """Send each trainer node the current TrainerSet, if it has changed."""
        if self.num_needed == 1:
            return
        followers = [name for name in self.names if name != self.leader]
        numbered = tuple((name, self._numbers[name]) for name in followers)
        now = TrainerSet(self.leader or "", numbered if self.are_complete else ())
        for name in self.names:
            if self._sent.get(name) != now:
                self._sent[name] = now
                self._outbox.send(name, now)
