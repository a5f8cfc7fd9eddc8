"""What the trainer and the nodes of a seeded world make of what they are told of broadcasts."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightrl.core.commands import Command
from lightrl.core.events import BroadcastHeard, NodeHeard, WeightsConfirmed, WeightsRefused
from lightrl.messages.broadcasts import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastOpened,
    BroadcastSums,
    JoinBroadcast,
    OpenBroadcast,
    SendBroadcast,
    VersionTaken,
)
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
        self.to_open: int | None = None  # epoch
        self.to_join: dict[str, str] = {}  # node or trainer -> group
        self.to_send: tuple[str, int] | None = None  # group and version
        self.receives: dict[str, tuple[str, int]] = {}  # node -> group and version
        self.sums: dict[str, tuple[str, int]] = {}
        self.num_opened = 0
        self.num_received = 0
        self.num_sent = 0  # versions, to a whole group
        self.num_failed = 0
        self.num_hurried = 0  # groups whose members pulled after all

    def hear(self, commands: list[Command]) -> None:
        """Orders, and what must hold for all of them."""
        nodes = self._world.core.fleet.nodes
        for name, message in sent(commands, OpenBroadcast):
            assert name == "t"
            self.to_open = message.epoch
        for name, message in sent(commands, JoinBroadcast):
            self.to_join[name] = message.group
        for name, message in sent(commands, SendBroadcast):
            assert name == "t"
            self.to_send = message.group, message.policy_version
        for name, _ in sent(commands, VersionTaken):
            assert name == "t"
        for name, message in sent(commands, BroadcastSums):
            self.sums[name] = message.group, message.policy_version
        for name, offer in sent(commands, PublishWeights):
            for source in offer.sources:
                fed = self.fed.get(source.node) == offer.policy_version
                assert not (fed and nodes[source.node].state == "ready"), "it has no file"
            if offer.group:
                assert not offer.deltas
                self.receives[name] = offer.group, offer.policy_version
            else:
                self.num_hurried += self.receives.pop(name, None) is not None
                self.sums.pop(name, None)
        for name, _ in sent(commands, Generate):
            may_leave = nodes[name].shares  # by the next event that was answered with it
            assert nodes[name].state in ({"ready", "releasing"} if may_leave else {"ready"})
            assert not nodes[name].receives

    def forget(self, name: str) -> None:
        """Orders to this node are lost on their way."""
        self.to_join.pop(name, None)
        self.receives.pop(name, None)
        self.sums.pop(name, None)
        if name == "t":
            self.to_open = self.to_send = None

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
        self._world.feed(lambda: self._world.driver.feed(NodeHeard(name, heartbeat)))

    # What is said

    def speak(self) -> None:
        """Some do what they were told, or fail."""
        for _ in range(self._world.rng.randint(1, 3)):
            if acts := self._acts():
                self._world.rng.choice(acts)(fails=self._world.rng.random() < 0.12)

    def finish(self) -> None:
        """All do as they were told."""
        while acts := self._acts():
            acts[0](fails=False)

    def _acts(self) -> list[Callable[..., None]]:
        names = self._world.core.fleet.nodes
        for name in {*self.to_join, *self.receives} - {*names}:
            self.forget(name)
        acts: list[Callable[..., None]] = []
        if self.to_open is not None and "t" in names:
            acts.append(self._open)
        acts += [partial(self._join, name) for name in self.to_join]
        if self.to_send is not None and "t" in names:
            acts.append(self._send)
        told = [n for n, version in self.receives.items() if self.sums.get(n) == version]
        return acts + [partial(self._confirm, name) for name in told]

    def _open(self, fails: bool) -> None:
        epoch, self.to_open = self.to_open, None
        assert epoch is not None
        self.num_opened += 1
        reason = "no address" if fails else ""
        self._say("t", BroadcastOpened(epoch, f"group {self.num_opened}", "h:1", reason))

    def _join(self, name: str, fails: bool) -> None:
        group = self.to_join.pop(name)
        self._say(name, self._failed(group) if fails else BroadcastJoined(group))

    def _send(self, fails: bool) -> None:
        assert self.to_send is not None
        (group, version), self.to_send = self.to_send, None
        self.num_sent += not fails
        self._say("t", self._failed(group) if fails else BroadcastSums(group, version, (1, 2)))

    def _confirm(self, name: str, fails: bool) -> None:
        group, version = self.receives.pop(name)
        world = self._world
        if fails and world.rng.random() < 0.5:
            self._say(name, self._failed(group))
        elif fails:
            refused = WeightsRefused(name, WeightsFailed(version, "canary"))
            world.feed(lambda: world.driver.feed(refused))
        else:
            if world.core.fleet.nodes[name].state == "updating":
                world.give_up(name)
            self.num_received += 1
            self.fed[name] = version
            ready = WeightsReady(version, world.driver.digest(version), broadcast_s=0.1)
            world.feed(lambda: world.driver.feed(WeightsConfirmed(name, ready)))

    def _failed(self, group: str) -> BroadcastFailed:
        self.num_failed += 1
        return BroadcastFailed(group, "timed out", self._world.rng.random() < 0.2)

    def _say(
        self,
        name: str,
        message: BroadcastOpened | BroadcastJoined | BroadcastSums | BroadcastFailed,
    ) -> None:
        self._world.remember(BroadcastHeard(name, message))
