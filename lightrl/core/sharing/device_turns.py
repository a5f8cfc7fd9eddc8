"""Send orders to sleep and to wake to nodes whose engines take turns on devices.

A node takes turns with the trainer's ranks or with engines of other sizes; `colocation` and
`engine_sizes` decide which side has the turn, and call this module. Owns the numbers of orders: an
answer repeats the number, and an older answer is ignored. A node that does not answer an order to
sleep within `release_s` is lost: it would have killed its engine by then. An engine that was not
ready may have to start before it can sleep, so its node gets `patience_s` more.
"""

from lightrl.core.commands import Outbox
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState
from lightrl.messages.sharing import DevicesReleased, SetDevices

AWAKE = {NodeState.JOINING, NodeState.LOADING, NodeState.READY, NodeState.UPDATING}


class DeviceTurns:
    def __init__(
        self, settings: Settings, fleet: Fleet, table: ResponseTable, outbox: Outbox
    ) -> None:
        self.num_orders = 0
        self._release_s, self._patience_s = settings.release_s, settings.patience_s
        self._fleet = fleet
        self._devices = fleet.devices
        self._table = table
        self._outbox = outbox
        self._may_start: set[str] = set()  # nodes whose engines were not up when ordered to sleep
        self._deadline: float | None = None
        self._seen: tuple[int, int] = (0, 0)  # (transitions, orders) of which the deadline is

    def sleep(self, node: Node) -> None:
        """Order a node to put its engine to sleep, and send it no more work."""
        is_up = node.state is NodeState.READY
        (self._may_start.discard if is_up else self._may_start.add)(node.name)
        self._fleet.release(node)
        self._send(node, active=False)

    def wake(self, node: Node) -> None:
        """Order a sleeping node to sample again."""
        if node.shares:
            self._devices.wake()
        self._fleet.wake(node)
        self._send(node, active=True)

    def repeat(self, node: Node) -> None:
        """Repeat the order to sleep to a node that has reconnected: the first may be lost."""
        if node.state is NodeState.RELEASING:
            self._send(node, active=False)

    def _send(self, node: Node, active: bool) -> None:
        self.num_orders += 1
        node.order += 1
        self._outbox.send(node.name, SetDevices("rollout", node.order, active))

    def on_asleep(self, name: str, message: DevicesReleased) -> None:
        """Handle an engine that sleeps; its responses resume on other nodes."""
        node = self._fleet.nodes.get(name)
        if node is None or node.state is not NodeState.RELEASING or message.number != node.order:
            return
        self._table.requeue_all(node)
        self._fleet.on_asleep(node)

    def on_refused(self, name: str) -> None:
        """Extend the deadline of a node whose engine has died: it may have died before the order
        arrived, and may be starting again."""
        if (node := self._fleet.nodes.get(name)) and node.state is NodeState.RELEASING:
            self._may_start.add(name)
            self._seen = (0, 0)

    # Time

    @property
    def deadline(self) -> float | None:
        """The time at which the first node is late."""
        if self._seen != (seen := (self._devices.num_transitions, self.num_orders)):
            self._seen = seen
            ordered = self._ordered()
            self._deadline = min((n.since + self.limit_s(n) for n in ordered), default=None)
        return self._deadline

    def late(self, now: float) -> list[Node]:
        """Return nodes that have not answered in time."""
        if self.deadline is None or now < self.deadline:
            return []
        return [n for n in self._ordered() if n.since + self.limit_s(n) <= now]

    def limit_s(self, node: Node) -> float:
        """Return the seconds within which a node must answer an order to sleep."""
        return self._release_s + (self._patience_s if node.name in self._may_start else 0.0)

    def _ordered(self) -> list[Node]:
        """Return nodes that have not answered an order to sleep."""
        nodes = (*self._devices.nodes.values(), *self._devices.parallel.values())
        return [n for n in nodes if n.state is NodeState.RELEASING]
