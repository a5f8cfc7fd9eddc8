"""The state of devices that sample and train in turn: the nodes that share them, and their side.

Also decides whether shards may be sent to the ranks on them. Each rollout node that shares devices
reports the trainer node and the part of its devices. A part is free for training if all nodes that
use it sleep, or none uses it; it is free for engines if all ranks are parked. `colocation.py`
decides about changes and sends the orders.
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
    """Return one line on why a node is refused; None if it shares with a trainer node that is here
    or may still join, or takes turns with engines of the sizes of this run."""
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
    """Return the states to pass through when a node reports a state that was not ordered."""
    if is_asleep == (state is NodeState.RELEASED):
        return ()
    if not is_asleep:
        return (NodeState.UPDATING,) if state is NodeState.RELEASED else ()
    through = (NodeState.RELEASING,) if state is NodeState.READY else ()
    return (*through, NodeState.RELEASED)


class SharedDevices:
    def __init__(self, num_parts: int, trainers: Trainers) -> None:
        """`num_parts`: parts that can train alone, equally many on each of the `trainers`."""
        self.nodes: dict[str, Node] = {}  # that share devices with the trainer
        self.sampling: set[str] = set()  # of `nodes`, those that sample
        self.parallel: dict[str, Node] = {}  # that take turns with engines of other sizes
        self.wanted: frozenset[str] = frozenset()  # of `nodes`, those that should train
        self.parked: set[str] = set()  # trainer nodes, as last reported
        self.are_training = False  # work was sent since the ranks were last parked
        self.given = NO_PARTS  # parts assigned to the ranks since then
        self.num_moves: int = 0  # changes of the state of any node
        self._num_parts = num_parts
        self._trainers = trainers

    def moved(self, node: Node) -> None:
        """Handle a change of the state of a node."""
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
        """Return whether the ranks have released all shared devices."""
        return all(name in self.parked for name in self.trainers)

    @property
    def are_whole(self) -> bool:
        """Return whether the devices change sides only as a whole."""
        return self._num_parts == 1

    @property
    def may_train(self) -> bool:
        """Return whether shards may be sent: a part is free, all sleeping engines are wanted for
        training, and the ranks either train already or are all parked."""
        if not self.nodes:
            return True
        if not (self.are_training or self.are_parked) or self.is_trespassed:
            return False
        asleep = {name for name, node in self.nodes.items() if node.is_asleep}
        return self.share_free > 0 and asleep <= self.wanted

    @property
    def share_free(self) -> float:
        """The share of the devices that can train now."""
        return max(0, self._num_parts - len(self._taken())) / self._num_parts

    @property
    def share_unused(self) -> float:
        """The share of the devices that no engine uses, so that they only train."""
        used = {self._part_of(node) for node in self.nodes.values()}
        return max(0, self._num_parts - len(used)) / self._num_parts

    @property
    def free(self) -> frozenset[int]:
        """The numbers of parts that can train now; empty while a trainer node is missing. Parts are
        numbered as ranks: first those of the leader, then those of the other nodes by name."""
        if not self._trainers.are_complete:
            return NO_PARTS
        taken, leader = self._taken(), self._trainers.leader
        names = sorted(self._trainers.names, key=lambda name: (name != leader, name))
        each = self._num_parts // len(names)
        parts = ((name, k) for name in names for k in range(each))
        return frozenset(number for number, part in enumerate(parts) if part not in taken)

    @property
    def is_trespassed(self) -> bool:
        """Return whether a node reports an active engine on a part that the ranks have."""
        is_given = bool(self.given) and self._trainers.are_complete
        return is_given and not self.given <= self.free

    def _taken(self) -> set[DevicePart]:
        """Return the parts with an engine that does not sleep."""
        return {self._part_of(node) for node in self.nodes.values() if not node.is_asleep}

    def _part_of(self, node: Node) -> DevicePart:
        return WHOLE if self.are_whole else (node.shares, node.part)

    def give(self, parts: frozenset[int]) -> None:
        """Assign these parts to the ranks, which may take them."""
        self.train()
        self.given = parts

    def train(self) -> None:
        """Mark the devices as training. Raises InvariantViolation if engines use them."""
        if not self.may_train:
            raise InvariantViolation("work for ranks whose devices sample")
        self.are_training = True
        self.parked.clear()

    def wake(self) -> None:
        """Check that an engine may wake. Raises InvariantViolation if ranks are not parked."""
        if not self.are_parked:
            raise InvariantViolation("an engine is to wake beside ranks")

    def park(self, trainer: str) -> None:
        """Mark the devices of a trainer node as released by its ranks."""
        self.parked.add(trainer)
        if self.are_parked:
            self.are_training, self.given = False, NO_PARTS
