"""Devices that sample and train in turn: who shares them, and who has them now.

Owns that, and whether shards may leave for the ranks on them. Each rollout node that shares says
whose devices it uses; a trainer node's are free for training when all that share them sleep, and
free for engines when its ranks are parked. Decides nothing and sends nothing: `handover.py` does.
"""

from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState
from lightrl.core.trainers import Trainers
from lightrl.errors import InvariantViolation
from lightrl.messages import Hello

NO_TRAINER = "which is no trainer node of this run"


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
    if trainers.are_strangers({hello.shares} - own):
        return f"{shares}, {NO_TRAINER}"
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
    def __init__(self, num_parts: int) -> None:
        """`num_parts` of them can train without the others."""
        self.nodes: dict[str, Node] = {}  # that share
        self.sampling: set[str] = set()  # of these
        self.parallel: dict[str, Node] = {}  # that take turns with engines of other sizes
        self.wanted: frozenset[str] = frozenset()  # of these, for training
        self.parked: set[str] = set()  # trainer nodes, by their last word
        self.are_training = False  # the ranks were sent work since they were parked last
        self.num_moves: int = 0  # of any nodes, from one state to another
        self._num_parts = num_parts

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
    def num_awake(self) -> int:
        """Nodes that sample, or will in a moment."""
        coming = {NodeState.READY, NodeState.UPDATING}
        return sum(node.state in coming for node in self.nodes.values())

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
        if not (self.are_training or self.are_parked):
            return False
        asleep = {name for name, node in self.nodes.items() if node.is_asleep}
        return self.share_free > 0 and asleep <= self.wanted

    @property
    def share_free(self) -> float:
        """Of the devices, that can train now."""
        asleep = sum(node.is_asleep for node in self.nodes.values())
        is_enough = asleep * self._num_parts >= len(self.nodes)
        return asleep / len(self.nodes) if asleep and is_enough else 0.0

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
        self.are_training &= not self.are_parked
