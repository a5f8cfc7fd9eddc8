"""Devices that sample and train in turn, in a seeded world: who really has them.

Nodes and the trainer do what they are told, sooner or later, and in order. Whatever goes wrong, an
engine never wakes beside ranks that have its devices, and no shard leaves for ranks while an engine
has them, unless the core was told that its node was gone.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

from lightrl.core.commands import Command, ReplayShards, Send
from lightrl.core.events import MessageArrived
from lightrl.core.sharing.sharing_rules import Change, StepTimes, View
from lightrl.messages.message import Message
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import TrainShard
from lightrl.messages.weights import WeightsFailed

if TYPE_CHECKING:
    from tests.core.world import World

SHARED = "abc"  # names of nodes that share


class Whim:
    """A rule that decides as the seed has it."""

    def __init__(self, world: "World") -> None:
        self._rng = world.rng
        self.is_on = True
        self.num_released = self.num_taken_back = 0

    def decide(self, view: View, now: float) -> Change:
        draw = self._rng.random() if self.is_on else 0.5
        if draw < 0.4 and view.sampling:
            going = view.sampling
            if view.in_parts and self._rng.random() < 0.5:
                going = going[: len(going) // 2]
            self.num_released += len(going)
            return Change(release=tuple(node.name for node in going))
        if draw > 0.6 and view.released:
            self.num_taken_back += len(view.released)
            return Change(take_back=tuple(node.name for node in view.released))
        return Change(look_at=now + 1.0) if draw < 0.5 else Change()

    def learn(self, step: StepTimes) -> None:
        pass


class WorldSharing:
    def __init__(self, world: "World", is_on: bool, is_whim: bool) -> None:
        """`is_whim`: sides change as the seed has it, not by the core's own rule."""
        self._world = world
        self.is_on = is_on
        self.is_whim = is_whim
        self.rule = Whim(world)
        self.awake: set[str] = set()  # nodes whose engines have their devices
        self.train = False  # the ranks have them
        self.given: set[int] = set()  # which parts of them, since their last hello
        self.held: set[int] = set()  # that they may still have
        self.orders: dict[str, deque[Message]] = {}  # that were sent, and not carried out
        self.given_up: set[str] = set()  # nodes that were awake when the core was told to lose them
        self.num_wakes = self.num_parks = self.num_slept = 0
        self.num_given = 0  # times that the ranks were given some devices, and not all
        self.num_within = 0  # orders to release that came while their round was open
        self.adopt()

    def adopt(self) -> None:
        """The core of this world, maybe a new one, decides as the seed has it."""
        if self.is_on and self.is_whim:
            self._world.core.policy.rule = self.rule

    def fields(self, name: str, is_new: bool = True) -> dict[str, Any]:
        """What its hello says of that."""
        if not self.is_on or (name not in SHARED and name != "healer"):
            return {}
        self.orders.pop(name, None)  # what came before its welcome counts no more
        if is_new:
            self.awake.discard(name)
            if self._world.rng.random() < 0.2:
                self.awake.add(name)
                self.given_up.add(name)  # nobody could say no
        return {"shares": "t", "is_released": name not in self.awake, "part": self.part_of(name)}

    def part_of(self, name: str) -> int:
        """Of the trainer's devices. Of two parts the first one is used by two nodes."""
        return (*SHARED, "healer").index(name) % self._world.core.settings.device_parts

    @property
    def may_finish(self) -> bool:
        """The ranks have what the last update of a step needs."""
        num = self._world.core.settings.device_parts
        return not self.is_on or num == 1 or len(self.given) == num

    def lose(self, name: str, is_dead: bool = True) -> None:
        """The core is told that it is gone."""
        if is_dead:
            self.orders.pop(name, None)
            self.awake.discard(name)
        elif name in self.awake:
            self.given_up.add(name)

    def hear(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send(_, TrainShard()) | ReplayShards():
                    self.fetch()
                case Send("t", SetDevices("trainer", step, True, parts)):
                    self.give(step, set(parts))
                case Send(name, SetDevices() as order):
                    self.orders.setdefault(name, deque()).append(order)
                    is_wanted = name in self._world.core.policy.wanted
                    self.num_within += is_wanted and (order.role == "rollout" and not order.active)
                case _:
                    pass

    def fetch(self) -> None:
        if self.is_on:
            self.train = True
            if self._world.core.fleet.devices.are_whole:
                there = self._there()
                assert there <= self.given_up, f"a shard for ranks beside {there}"
            else:
                assert self.given, "a shard for ranks that were given no device"

    def give(self, step: int, parts: set[int]) -> None:
        assert self.is_on
        assert not self._world.core.fleet.devices.are_whole
        if step != self._world.trained_step:
            return  # of the step before, to which it was on its way
        assert parts > self.given, "nothing is taken back so"
        beside = {name for name in self._there() if self.part_of(name) in parts}
        assert beside <= self.given_up, f"ranks are given devices of {beside}"
        self.given = parts
        self.held |= parts
        self.num_given += len(parts) < self._world.core.settings.device_parts

    def _there(self) -> set[str]:
        """Nodes whose engines are awake, as far as the core can know."""
        return self.awake & set(self._world.core.fleet.nodes)

    def park(self, number: int = 0) -> None:
        """The ranks give the devices back."""
        if self.is_on:
            self.lose_devices()
            said = MessageArrived("t", DevicesReleased("trainer", number, 1000, 0.1))
            self._world.feed(lambda: self._world.driver.feed(said))

    def lose_devices(self) -> None:
        """The ranks have parked, or are gone."""
        self.train = False
        self.given, self.held = set(), set()

    def obey(self) -> None:
        """Somebody carries out the order that came first."""
        names = sorted(n for n, orders in self.orders.items() if orders)
        if names:
            self._obey(self._world.rng.choice(names))

    def obey_all(self) -> None:
        while names := [n for n, orders in self.orders.items() if orders]:
            self._obey(names[0])

    def _obey(self, name: str) -> None:
        world, order = self._world, self.orders[name].popleft()
        match order:
            case SetDevices("trainer", number, False):
                if world.has_trainer:
                    self.num_parks += 1
                    self.park(number)
            case SetDevices("rollout", number, False):
                world.give_up(name)
                self.awake.discard(name)
                self.given_up.discard(name)
                self.num_slept += 1
                said = MessageArrived(name, DevicesReleased("rollout", number, 1000, 0.1))
                world.remember(said)
            case SetDevices("rollout", active=True):
                self.num_wakes += 1
                whole = world.core.fleet.devices.are_whole
                assert not (self.train and whole), f"{name} wakes beside the ranks"
                assert self.part_of(name) not in self.held, f"{name} wakes beside ranks"
                self.awake.add(name)
            case _:
                raise AssertionError(order)

    def die_asleep(self) -> None:
        """The engine of a node that has none on its devices; its daemon finds out."""
        fleet = self._world.core.fleet
        asleep = [n for n in SHARED if n in fleet.nodes and n not in self.awake]
        if asleep and fleet.published is not None:
            name = self._world.rng.choice(asleep)
            died = WeightsFailed(fleet.published.policy_version, "engine killed by SIGKILL")
            self._world.feed(lambda: self._world.driver.feed(MessageArrived(name, died)))
