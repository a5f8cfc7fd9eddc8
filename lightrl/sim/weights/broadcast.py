"""Broadcasts among simulated machines: a group forms, its trainer sends, its members receive.

Owns what the trainer answers to the core's orders, and when members have a version. Decides
nothing: the core decides who is a member, when a group is over and who pulls instead.

Members relay to each other, so the trainer's line carries the bytes once. A member checks what it
received beside the transfer, so only what that takes longer is added. Until the trainer has sent,
it does not train. A lost member holds up the others until the core ends the group.
"""

import math
from collections.abc import Callable

from lightrl.core.events import MessageArrived
from lightrl.messages.broadcasts import BroadcastGroup, BroadcastStatus, VersionTaken
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.simulation import Simulation
from lightrl.sim.trainer import TRAINER, SimTrainer
from lightrl.sim.weights.swarm import FluidSwarm, Parcel

BROADCAST = -2  # the base of what goes to a group: no other node can serve it


class Broadcast:
    def __init__(
        self,
        world: Simulation,
        trainer: SimTrainer,
        swarm: FluidSwarm,
        plan: Callable[[], None],
        received: Callable[[str], None],
    ) -> None:
        """`plan()` follows when lines carry something else than before; `received(group)` when its
        members have the version."""
        self._world = world
        self._trainer = trainer
        self._transfer = world.scenario.transfer
        self._swarm = swarm
        self._plan = plan
        self._received = received
        self._joined: tuple[str, ...] = ()  # of the newest group, the trainer first
        self._order: VersionTaken | None = None  # being carried out
        self._group = ""  # to which it sends
        self._began_at = 0.0
        self._is_awaited = False  # the trainer waits for members, or sends

    def deliver_to_trainer(self, message: VersionTaken) -> None:
        version, order = message.policy_version, message.broadcast
        self._stop()
        self._world.outcome.num_broken += self._is_awaited and order is None
        self._await(order is not None)
        if order is None:
            return
        self._order = message
        if order.group:
            self._send(message, order.group)
            return
        self._joined = (TRAINER,)
        status = BroadcastStatus(version, f"group-{version}", f"{TRAINER}:1")
        world = self._world
        world.at(world.now, lambda: world.feed(MessageArrived(TRAINER, status)))

    def join(self, machine: SimMachine, group: BroadcastGroup) -> None:
        """Members join after the trainer; the last one completes the group."""
        if machine.spec.name in self._joined:
            return
        self._joined = (*self._joined, machine.spec.name)
        order, world = self._order, self._world
        if order is not None and len(self._joined) == group.world:
            world.at(world.now + self._transfer.form_s, lambda: self._send(order, group.name))

    def lose(self, name: str) -> None:
        if name in self._joined:
            self._stop()

    def sent(self) -> None:
        """All bytes are with the members, which have checked them soon."""
        world, order = self._world, self._order
        checked_at = self._began_at + self._transfer.num_bytes / self._transfer.prove_bytes_per_s

        def check() -> None:
            if order is not None and self._order is order:
                self._order = None
                self._await(False)
                self._received(self._group)

        world.at(max(world.now, checked_at), check)

    def _send(self, order: VersionTaken, group: str) -> None:
        machines = self._world.machines
        is_there = all(machines[name].present for name in self._joined[1:])  # else one is lost soon
        if order is self._order and is_there:
            self._began_at, self._group = self._world.now, group
            sent = Parcel(order.policy_version, BROADCAST), self._transfer.num_bytes
            self._swarm.pull(self._world.now, TRAINER, (sent,))
            self._plan()

    def _stop(self) -> None:
        self._order = None
        self._swarm.end_pull(self._world.now, TRAINER)

    def _await(self, is_awaited: bool) -> None:
        """The trainer trains the next step when it has nothing more to send."""
        if self._is_awaited or is_awaited:
            self._is_awaited = is_awaited
            self._trainer.publish(math.inf if is_awaited else 0.0)
