"""What the trainer and the nodes of a seeded world make of orders to broadcast."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightrl.core.commands import Command
from lightrl.core.events import MessageArrived
from lightrl.messages.broadcasts import BroadcastStatus, VersionTaken
from lightrl.messages.nodes import Heartbeat
from lightrl.messages.responses import Generate
from lightrl.messages.weights import PublishWeights, WeightsFailed, WeightsReady
from tests.core.conftest import sent

if TYPE_CHECKING:
    from tests.core.world import World


class WorldBroadcasts:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.workers: dict[str, int] = {}
        self.fed: dict[str, int] = {}  # node -> the version that it has by broadcast, and no file
        self.order: VersionTaken | None = None  # to open a group, or to send to one
        self.group = ""  # that the trainer opened last
        self.receives: dict[str, tuple[str, int]] = {}  # node -> group and version
        self.is_sent: tuple[str, int] | None = None  # group and version
        self.num_received = 0
        self.num_sent = 0  # versions, to a whole group
        self.num_failed = 0
        self.num_hurried = 0  # groups whose members pulled after all

    def hear(self, commands: list[Command]) -> None:
        """Orders, and what must hold for all of them."""
        nodes = self._world.core.fleet.nodes
        for name, message in sent(commands, VersionTaken):
            assert name == "t"
            self.order = message if message.broadcast is not None else None
        for name, offer in sent(commands, PublishWeights):
            for source in offer.sources:
                fed = self.fed.get(source.node) == offer.policy_version
                assert not (fed and nodes[source.node].state == "ready"), "it has no file"
            if offer.group is not None:
                assert not offer.deltas
                self.receives[name] = offer.group.name, offer.policy_version
            else:
                self.num_hurried += self.receives.pop(name, None) is not None
        for name, _ in sent(commands, Generate):
            may_leave = nodes[name].shares  # by the next event that was answered with it
            assert nodes[name].state in ({"ready", "releasing"} if may_leave else {"ready"})
            assert not nodes[name].receives

    def forget(self, name: str) -> None:
        """Orders to this node are lost on their way."""
        self.receives.pop(name, None)
        if name == "t":
            self.order = None

    def start_engine(self, name: str) -> None:
        """Of a new process; its heartbeat may come later."""
        rng = self._world.rng
        self.forget(name)
        self.fed.pop(name, None)
        self.workers[name] = rng.choice([0, 1, 1, 1, 2])
        if rng.random() < 0.7:
            self.beat(name)

    def beat(self, name: str) -> None:
        heartbeat = Heartbeat(num_workers=self.workers.get(name, 0))
        self._world.feed(lambda: self._world.driver.feed(MessageArrived(name, heartbeat)))

    # What they report

    def speak(self) -> None:
        """Some do as they were ordered, or fail."""
        for _ in range(self._world.rng.randint(1, 3)):
            if acts := self._acts():
                self._world.rng.choice(acts)(fails=self._world.rng.random() < 0.12)

    def finish(self) -> None:
        """All do as they were ordered."""
        while acts := self._acts():
            acts[0](fails=False)

    def _acts(self) -> list[Callable[..., None]]:
        names = self._world.core.fleet.nodes
        for name in {*self.receives} - {*names}:
            self.forget(name)
        acts: list[Callable[..., None]] = []
        if self.order is not None and "t" in names:
            acts.append(self._send)
        arrived = [n for n, version in self.receives.items() if version == self.is_sent]
        return acts + [partial(self._confirm, name) for name in arrived]

    def _send(self, fails: bool) -> None:
        """The order, or the first half of it: to open the group."""
        order, self.order = self.order, None
        assert order is not None
        assert order.broadcast is not None
        version, group = order.policy_version, order.broadcast.group
        if not group:
            group = self.group = f"group {self._world.rng.getrandbits(32)}"
            if not fails or self._world.rng.random() < 0.5:
                self._say("t", BroadcastStatus(version, group, "h:1"))
        if fails:
            self._say("t", self._failed(version, group))
            return
        self.num_sent += 1
        self.is_sent = group, version

    def _confirm(self, name: str, fails: bool) -> None:
        group, version = self.receives.pop(name)
        world = self._world
        if fails and world.rng.random() < 0.5:
            self._say(name, self._failed(version, group))
        elif fails:
            refused = MessageArrived(name, WeightsFailed(version, "canary"))
            world.feed(lambda: world.driver.feed(refused))
        else:
            if world.core.fleet.nodes[name].state == "updating":
                world.give_up(name)
            self.num_received += 1
            self.fed[name] = version
            ready = WeightsReady(version, world.driver.digest(version), broadcast_s=0.1)
            world.feed(lambda: world.driver.feed(MessageArrived(name, ready)))

    def _failed(self, version: int, group: str) -> BroadcastStatus:
        self.num_failed += 1
        return BroadcastStatus(version, group, reason="timed out")

    def _say(self, name: str, status: BroadcastStatus) -> None:
        self._world.remember(MessageArrived(name, status))
