"""Broadcasts among simulated machines: a group forms, its trainer sends, its members verify.

Owns when the trainer and the members answer the core's orders. The core decides who is a member,
when a group is over, and who pulls instead.

The bytes go from member to member, so that each line carries them once in each direction, all at
the pace of the line with the least bandwidth beside the pulls. Checksums are computed during the
transfer; only the time that they take longer is added. The trainer does not train until it has
sent. A member that waits for a lost one waits until the core detects the loss.
"""

import math

from lightrl.core.events import BroadcastHeard, BroadcastNews
from lightrl.messages.broadcasts import (
    BroadcastJoined,
    BroadcastOpened,
    BroadcastSums,
    JoinBroadcast,
    OpenBroadcast,
    SendBroadcast,
    VersionTaken,
)
from lightrl.messages.message import Message
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.fleet.messages import TRAINER
from lightrl.sim.mechanism import Simulation
from lightrl.sim.weights.swarm import Parcel, Swarm


class Broadcast:
    def __init__(self, world: Simulation, swarm: Swarm) -> None:
        self._world = world
        self._transfer = world.scenario.transfer
        self._swarm = swarm
        self._path: tuple[str, ...] = ()  # of the newest group, the trainer first
        self._order: SendBroadcast | None = None  # being carried out
        self._began_at = 0.0
        self._is_awaited = False  # the trainer waits for orders, or sends

    def deliver_to_trainer(self, message: Message) -> None:
        match message:
            case VersionTaken(_, broadcasts):
                self._stop()
                self._world.outcome.weights.num_broken += self._is_awaited and not broadcasts
                self._await(broadcasts)
            case OpenBroadcast(epoch):
                self._answer(TRAINER, BroadcastOpened(epoch, f"group-{epoch}", f"{TRAINER}:1"))
            case JoinBroadcast(group):
                self._path = (TRAINER,)
                self._answer(TRAINER, BroadcastJoined(group), self._transfer.form_s)
            case SendBroadcast():
                self._send(message)
            case _:
                pass

    def join(self, machine: SimMachine, message: JoinBroadcast) -> None:
        """Members get the order by their ranks, after the trainer."""
        self._path = (*self._path, machine.spec.name)
        world, incarnation = self._world, machine.incarnation

        def joined() -> None:
            if machine.present and machine.incarnation == incarnation:
                self._answer(machine.spec.name, BroadcastJoined(message.group))

        world.at(world.now + self._transfer.form_s, joined)

    def lose(self, name: str) -> None:
        if name in self._path:
            self._stop()

    def sent(self) -> None:
        """All members have the bytes; the trainer reports its sums when they are computed."""
        world, order = self._world, self._order
        verified_at = self._began_at + self._transfer.num_bytes / self._transfer.prove_bytes_per_s

        def report() -> None:
            if order is not None and self._order is order:
                self._order = None
                self._await(False)
                sums = BroadcastSums(order.group, order.policy_version, (0,))
                world.feed(BroadcastHeard(TRAINER, sums))

        world.at(max(world.now, verified_at), report)

    def _send(self, order: SendBroadcast) -> None:
        machines = self._world.machines
        # else the core detects a loss soon
        if all(machines[name].present for name in self._path[1:]):
            self._order, self._began_at = order, self._world.now
            parcel = Parcel(order.policy_version)
            self._swarm.send(self._world.now, self._path, parcel, self._transfer.num_bytes)

    def _stop(self) -> None:
        self._order = None
        self._swarm.end_send(self._world.now)

    def _await(self, is_awaited: bool) -> None:
        """The trainer trains the next step when it has nothing more to send."""
        if self._is_awaited or is_awaited:
            self._is_awaited = is_awaited
            self._world.trainer.publish(self._world.now, math.inf if is_awaited else 0.0)
            self._world.plan_training()

    def _answer(self, name: str, message: BroadcastNews, after_s: float = 0.0) -> None:
        world = self._world
        world.at(world.now + after_s, lambda: world.feed(BroadcastHeard(name, message)))
