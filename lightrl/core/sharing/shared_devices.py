"""Devices that sample and train in turn: who shares them, and who has them now.

Owns that, and whether shards may leave for the ranks on them. Each rollout node that shares says
whose devices it uses, and which part of them; a part is free for training when all that use it
sleep, or nobody does, and free for engines when all ranks are parked. Decides nothing and sends
nothing: `colocation.py` does.
"""

from typing import TypeAlias

from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState
from lightrl.core.training.trainers import Trainers
from lightrl.errors import InvariantViolation
from lightrl.messages.nodes import Hello

NO_TRAINER = "which is no trainer node of this run"
DevicePart: TypeAlias = tuple[str, int]  # a trainer node, and a number among its parts
WHOLE: DevicePart = ("", 0)
NO_PARTS = frozenset[int]()


def why_not_shared(hello: Hello, trainers: Trainers, settings: Settings) -> str | None:
    """In one line, or None: it shares with a trainer node, or with one that may still come; or it
    takes turns with engines of other sizes, and this run has such."""
    if hello.parallel and (hello.shares or hello.parallel not in settings.parallel):
        known = ", ".join(map(str, settings.parallel)) or "none"
        return f"has an engine of {hello.parallel} devices; such that take turns here: {known}"
    if not hello.shares:
        return None
    shares = f"shares the devices of {hello.shares}"
    if settings.max_staleness:
        return f"{shares}, which async.max_staleness = {settings.max_staleness} needs all the time"
    own = {hello.node} if "trainer" in hello.roles else set[str]()
    if trainers.has_unknown({hello.shares} - own):
        return f"{shares}, {NO_TRAINER}"
    if hello.part >= (num := settings.device_parts // settings.num_trainers or 1):
        parts = f"which has parts 0 to {num - 1}" if num > 1 else "which change sides as a whole"
        return f"uses part {hello.part} of the devices of {hello.shares}, {parts}"
    return None


def way_to_side(state: NodeState, is_asleep: bool) -> tuple[NodeState, ...]:
    """The states that follow when a node says, out of turn, whether its engine sleeps."""
    if is_asleep == (state is NodeState.RELEASED):
        return ()
    if not is_asleep:
        return (NodeState.UPDATING,) if state is NodeState.RELEASED else ()
    through = (NodeState.RELEASING,) if state is NodeState.READY else ()
    return (*through, NodeState.RELEASED)


class SharedDevices:
    def __init__(self, num_parts: int, trainers: Trainers) -> None:
        """`num_parts` of them can train without the others, as many at each of the `trainers`."""
        self.nodes: dict[str, Node] = {}  # that share
        self.sampling: set[str] = set()  # of these
        self.parallel: dict[str, Node] = {}  # that take turns with engines of other sizes
        self.wanted: frozenset[str] = frozenset()  # of these, for training
        self.parked: set[str] = set()  # trainer nodes, by their last word
        self.are_training = False  # the ranks were sent work since they were parked last
        self.given = NO_PARTS  # that the ranks were told of since then
        self.num_moves: int = 0  # of any nodes, from one state to another
        self._num_parts = num_parts
        self._trainers = trainers

    def moved(self, node: Node) -> None:
        """A node is in another state."""
        self.num_moves += 1
        if not node.takes_turns:
            return
        if node.shares:
            is_ready = node.state is NodeState.READY
            (self.sampling.add if is_ready else self.sampling.discard)(node.name)
        listed = self.nodes if node.shares else self.parallel
        if node.state is NodeState.GONE:
            listed.pop(node.name, None)
        else:
            listed[node.name] = node
            if node.state is not NodeState.DRAINING:
                node.is_asleep = node.state is NodeState.RELEASED

    @property
    def trainers(self) -> list[str]:
        """Trainer nodes whose devices are shared."""
        return sorted({node.shares for node in self.nodes.values()})

    @property
    def are_parked(self) -> bool:
        """Nothing of the ranks is on any of them."""
        return all(name in self.parked for name in self.trainers)

    @property
    def are_whole(self) -> bool:
        """They change sides together."""
        return self._num_parts == 1

    @property
    def may_train(self) -> bool:
        """Whether shards may leave: the engines sleep that use what is to train, none of those is
        to wake, and the ranks begin from where they were parked."""
        if not self.nodes:
            return True
        if not (self.are_training or self.are_parked) or self.is_trespassed:
            return False
        asleep = {name for name, node in self.nodes.items() if node.is_asleep}
        return self.share_free > 0 and asleep <= self.wanted

    @property
    def share_free(self) -> float:
        """Of the devices, that can train now."""
        return max(0, self._num_parts - len(self._taken())) / self._num_parts

    @property
    def share_unused(self) -> float:
        """Of the devices, that no engine uses: they only train."""
        used = {self._part_of(node) for node in self.nodes.values()}
        return max(0, self._num_parts - len(used)) / self._num_parts

    @property
    def free(self) -> frozenset[int]:
        """Parts that can train now, by their numbers in the run: those of the node that leads come
        first, then those of the others by name, as their ranks do. None while a node is missing."""
        if not self._trainers.are_complete:
            return NO_PARTS
        taken, leader = self._taken(), self._trainers.leader
        names = sorted(self._trainers.names, key=lambda name: (name != leader, name))
        each = self._num_parts // len(names)
        parts = ((name, k) for name in names for k in range(each))
        return frozenset(number for number, part in enumerate(parts) if part not in taken)

    @property
    def is_trespassed(self) -> bool:
        """An engine is on a part that the ranks were given, by its own word."""
        is_given = bool(self.given) and self._trainers.are_complete
        return is_given and not self.given <= self.free

    def _taken(self) -> set[DevicePart]:
        """Parts with an engine that does not sleep."""
        return {self._part_of(node) for node in self.nodes.values() if not node.is_asleep}

    def _part_of(self, node: Node) -> DevicePart:
        return WHOLE if self.are_whole else (node.shares, node.part)

    def give(self, parts: frozenset[int]) -> None:
        """The ranks are told that they have these, and may take them."""
        self.train()
        self.given = parts

    def train(self) -> None:
        """The ranks are sent work: they take the devices, if nobody else has them."""
        if not self.may_train:
            raise InvariantViolation("work for ranks whose devices sample")
        self.are_training = True
        self.parked.clear()

    def wake(self) -> None:
        """A node takes its devices, if the ranks have given back all of them."""
        if not self.are_parked:
            raise InvariantViolation("an engine is to wake beside ranks")

    def park(self, trainer: str) -> None:
        """The ranks of this trainer node have given its devices back."""
        self.parked.add(trainer)
        if self.are_parked:
            self.are_training, self.given = False, NO_PARTS
