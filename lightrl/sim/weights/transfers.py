"""New weights on their way to the machines of a simulated fleet: published, pulled or broadcast,
loaded.

Owns which version each machine has and what the transfers took. The core decides who gets which
version from which sources and deltas; a scenario's `SimTransfer` has the rates. How bytes move:
`swarm.py`; broadcast groups: `broadcast.py`.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field

from lightrl.core.events import MessageArrived
from lightrl.core.weights.weight_sources import MAX_CHAIN
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.message import Message
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsReady
from lightrl.sim.fleet.machines import SimMachine, digest_of, version_of
from lightrl.sim.simulation import Simulation
from lightrl.sim.trainer import TRAINER, SimTrainer
from lightrl.sim.weights.broadcast import Broadcast
from lightrl.sim.weights.swarm import FluidSwarm, Parcel, SimPull


@dataclass(slots=True)
class _Inbound:
    """A version on its way to a machine."""

    machine: SimMachine
    version: int
    began_at: float
    # of the broadcast; "" = it is pulled
    group: str = ""
    pull: SimPull = field(default_factory=lambda: SimPull(deque(), 0.0))


class Transfers:
    def __init__(self, world: Simulation, trainer: SimTrainer) -> None:
        self._world = world
        self._transfer = transfer = world.scenario.transfer
        sender, down = transfer.sender_bytes_per_s, transfer.receiver_bytes_per_s
        relay = transfer.relay_bytes_per_s or down
        self._swarm = FluidSwarm(sender, relay, down, transfer.relays)
        self._offered: list[tuple[SimMachine, PublishWeights]] = []  # by the current event
        self._inbound: dict[str, _Inbound] = {}  # by node, until its engine serves it
        self._broadcast = Broadcast(world, trainer, self._swarm, self._plan, self._received)
        self._ready_version, self._ready_s = -1, list[float]()  # measured times not used yet

    def publish(self, version: int) -> None:
        """The trainer holds a version, and the delta to the one before, and announces it."""
        transfer, digest, deltas = self._transfer, digest_of(version), ()
        self._swarm.forget(version - MAX_CHAIN)
        if transfer.delta_bytes and version:
            base = digest_of(version - 1)
            num_bytes = math.ceil(transfer.delta_bytes)
            deltas = (DeltaOffer(base, digest, f"{base}-{digest}", 0, num_bytes),)
        message = PublishWeights(version, digest, math.ceil(transfer.num_bytes), 1, deltas=deltas)
        self._world.feed(MessageArrived(TRAINER, message))

    def num_workers(self, machine: SimMachine) -> int:
        """Return the workers of its engine that can join a broadcast group: none for an engine that
        takes turns with other sizes, or without bytes to send."""
        can_join = self._transfer.num_bytes and self._world.settings.broadcast != "off"
        return int(can_join and not machine.spec.parallel)

    def deliver(self, machine: SimMachine, message: Message) -> None:
        if isinstance(message, PublishWeights):
            machine.loading = message.policy_version
            self._offered.append((machine, message))

    def deliver_to_trainer(self, message: Message) -> None:
        if isinstance(message, VersionTaken):
            self._broadcast.deliver_to_trainer(message)
            self._plan()

    def begin(self) -> None:
        """Begin all transfers that were offered by the current event."""
        if not self._offered:
            return
        offered, self._offered = self._offered, []
        for machine, message in offered:
            inbound = self._inbound.get(machine.spec.name)
            current = (inbound.version, inbound.group) if inbound is not None else None
            if current == (message.policy_version, _group(message)):
                continue  # it has another source: nodes pull from all
            if not machine.engine.running:
                machine.engine.hold(self._world.now, "weights")
            self._begin(machine, message)
        self._plan()

    def lose(self, machine: SimMachine) -> None:
        world, name = self._world, machine.spec.name
        self._inbound.pop(name, None)
        self._swarm.lose(world.now, name)
        self._broadcast.lose(name)
        self._plan()

    def confirm(self, machine: SimMachine, version: int) -> None:
        """The engine of a machine serves this version from now on."""
        name, now = machine.spec.name, self._world.now
        machine.loading, machine.serves, machine.holds = -1, version, version
        machine.engine.cached.clear()
        machine.engine.hold(now, "train" if machine.asleep else None)
        machine.engine.idle_label = "idle"
        inbound = self._inbound.pop(name, None) or _Inbound(machine, version, now)
        pull = inbound.pull
        self._swarm.end_pull(now, name)
        if inbound.group:
            num_bytes, broadcast_s = round(self._transfer.num_bytes), now - inbound.began_at
            ready = WeightsReady(version, digest_of(version), num_bytes, broadcast_s=broadcast_s)
        else:
            self._serve(machine, version)
            self._plan()
            ready = WeightsReady(
                version,
                digest_of(version),
                num_bytes=round(pull.num_bytes),
                pull_s=pull.seconds,
                load_s=self._transfer.loading_s,
                peer_bytes=round(pull.peer_bytes),
                delta_bytes=round(pull.delta_bytes),
            )
        self._world.feed(MessageArrived(name, ready))

    def end(self) -> None:
        self._swarm.advance(self._world.now)
        self._world.outcome.trainer_bytes = self._swarm.sent

    # Pull

    def _begin(self, machine: SimMachine, message: PublishWeights) -> None:
        world, name, version = self._world, machine.spec.name, message.policy_version
        inbound = _Inbound(machine, version, world.now, _group(message))
        self._inbound[name] = inbound
        if message.group is not None:
            self._swarm.end_pull(world.now, name)
            self._broadcast.join(machine, message.group)
            world.at(world.now, lambda: self._stop(inbound))
        elif self._transfer.num_bytes and not self._is_with_trainer(machine):
            inbound.pull = self._swarm.pull(world.now, name, self._parcels(machine, message))
        else:
            world.at(world.now + self._transfer.verify_file_s, lambda: self._load(inbound))

    def _parcels(self, machine: SimMachine, message: PublishWeights) -> deque[tuple[Parcel, float]]:
        """Return the deltas to what it holds or pulls, else the whole version."""
        whole = Parcel(message.policy_version), float(message.num_bytes)
        chain = deque(
            (Parcel(version_of(d.target), version_of(d.base)), float(d.num_bytes))
            for d in message.deltas
        )
        if not chain:
            return deque((whole,))
        base = chain[0][0].base
        if base == machine.serves:
            return chain
        left = self._swarm.left(self._world.now, machine.spec.name, Parcel(base))
        if left is None or left + sum(size for _, size in chain) >= message.num_bytes:
            return deque((whole,))
        chain.appendleft((Parcel(base), float(message.num_bytes)))
        return chain

    def _plan(self) -> None:
        """Look at the swarm once all changes at this time are made."""
        self._world.set_alarm("weights", self._world.now, self._advance)

    def _advance(self) -> None:
        for node, pull in self._swarm.advance(self._world.now):
            if node == TRAINER:
                self._broadcast.sent()
            else:
                inbound = self._inbound[node]
                pull.seconds = self._world.now - inbound.began_at
                self._world.outcome.pulls.append(pull)
                self._load(inbound)
        self._world.set_alarm("weights", self._swarm.next_at(), self._advance)

    # Load

    def _load(self, inbound: _Inbound) -> None:
        if self._is_current(inbound):
            # peers can pull it before it is loaded
            self._serve(inbound.machine, inbound.version)
            self._stop(inbound)
            loaded_at = self._world.now + self._load_s(inbound)
            self._world.at(loaded_at, lambda: self._loaded(inbound))

    def _load_s(self, inbound: _Inbound) -> float:
        """Return the seconds of a load. Measured times are dealt out to the nodes, in another order
        for each version; more or fewer nodes get the same distribution."""
        machine, measured = inbound.machine, sorted(self._transfer.ready_s)
        if machine.joins_ready:
            machine.joins_ready = False
            return 0.0
        if not measured:
            return self._transfer.loading_s
        if inbound.version != self._ready_version:
            num = sum(m.present for m in self._world.machines.values())
            places = [(k + 0.5) / num * len(measured) for k in range(num)]
            self._ready_s = [measured[int(place)] for place in places]
            random.Random(inbound.version).shuffle(self._ready_s)
            self._ready_version = inbound.version
        return self._ready_s.pop() if self._ready_s else measured[-1]

    def _is_with_trainer(self, machine: SimMachine) -> bool:
        return self._world.scenario.is_colocated and not machine.is_spot

    def _serve(self, machine: SimMachine, version: int) -> None:
        """Let peers pull it. On the trainer's machine the trainer serves it already."""
        if not self._is_with_trainer(machine):
            self._swarm.hold(self._world.now, machine.spec.name, Parcel(version))

    def _stop(self, inbound: _Inbound) -> None:
        """Stop the engine; its responses resume under the new version."""
        world, machine = self._world, inbound.machine
        if not self._is_current(inbound):
            return
        deltas = machine.engine.abort_all(world.now)
        machine.engine.hold(world.now, "weights")
        if deltas:
            world.feed(MessageArrived(machine.spec.name, machine.chunk(deltas)))

    def _received(self, group: str) -> None:
        """The members of this group have their version, in place."""
        for inbound in [i for i in self._inbound.values() if i.group == group]:
            self._world.outcome.broadcasts_s.append(self._world.now - inbound.began_at)
            self.confirm(inbound.machine, inbound.version)

    def _loaded(self, inbound: _Inbound) -> None:
        machine = inbound.machine
        if self._is_current(inbound) and machine.asleep:
            machine.loading, machine.holds = -1, inbound.version
        elif self._is_current(inbound):
            self.confirm(machine, inbound.version)

    def _is_current(self, inbound: _Inbound) -> bool:
        """False if the machine has left, or gets a newer version."""
        return self._inbound.get(inbound.machine.spec.name) is inbound


def _group(message: PublishWeights) -> str:
    """The name of the group by which a version comes; "" = it is pulled."""
    return message.group.name if message.group is not None else ""
