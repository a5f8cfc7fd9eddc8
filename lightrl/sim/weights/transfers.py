"""New weights on their way to the machines of a simulated fleet: published, pulled or broadcast,
loaded.

Owns which version each machine has and what the transfers took. The core decides who gets which
version from which sources and deltas; a scenario's `SimTransfer` has the rates. How bytes move:
`swarm.py`; broadcast groups: `broadcast.py`.
"""

import math
import random
from collections import deque
from dataclasses import dataclass

from lightrl.core.events import MessageArrived
from lightrl.core.weights.weight_sources import MAX_CHAIN
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.message import Message
from lightrl.messages.weights import PublishWeights, WeightsReady
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.fleet.messages import TRAINER, digest_of, publication, version_of
from lightrl.sim.mechanism import Simulation
from lightrl.sim.weights.broadcast import Broadcast
from lightrl.sim.weights.swarm import FluidSwarm, Parcel, SimPull

NOTHING = SimPull(deque(), 0.0)  # of a version that is not pulled


@dataclass(slots=True)
class _Inbound:
    """A version on its way to a machine."""

    machine: SimMachine
    version: int
    began_at: float
    # of the broadcast; "" = it is pulled
    group: str = ""
    pull: SimPull = NOTHING
    pull_s: float = 0.0


class Transfers:
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._transfer = transfer = world.scenario.transfer
        self._is_colocated = world.scenario.is_colocated
        sender, down = transfer.sender_bytes_per_s, transfer.receiver_bytes_per_s
        relay = transfer.relay_bytes_per_s or down
        self._swarm = FluidSwarm(sender, relay, down, transfer.relays)
        self._offered: list[tuple[SimMachine, PublishWeights]] = []  # by the current event
        self._inbound: dict[str, _Inbound] = {}  # by node, until its engine serves it
        self._broadcast = Broadcast(world, self._swarm, self._plan, self._received)
        self._ready_version, self._ready_s = -1, list[float]()  # measured times not used yet
        self._next_at = math.inf  # of the newest entry in the world's heap
        self._is_planned = False  # `_plan_next` is in the world's heap

    def publish(self, version: int) -> None:
        """The trainer holds a version, and the delta to the one before, and announces it."""
        transfer = self._transfer
        self._swarm.forget(version - MAX_CHAIN)
        message = publication(version, transfer.num_bytes, transfer.delta_bytes)
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

    def confirm(self, machine: SimMachine, version: int) -> WeightsReady:
        """Return the report of a machine whose engine serves this version."""
        name, now = machine.spec.name, self._world.now
        inbound = self._inbound.pop(name, None) or _Inbound(machine, version, now)
        self._swarm.end_pull(now, name)
        digest = digest_of(version)
        if inbound.group:
            num_bytes = round(self._transfer.num_bytes)
            return WeightsReady(version, digest, num_bytes, broadcast_s=now - inbound.began_at)
        self._serve(machine, version)
        self._plan()
        pull = inbound.pull
        return WeightsReady(
            version,
            digest,
            num_bytes=round(pull.num_bytes),
            pull_s=inbound.pull_s,
            load_s=self._transfer.loading_s,
            peer_bytes=round(pull.peer_bytes),
            delta_bytes=round(pull.delta_bytes),
        )

    def end(self) -> None:
        self._swarm.advance(self._world.now)
        self._world.outcome.weights.trainer_bytes += self._swarm.sent

    # Pull

    def _begin(self, machine: SimMachine, message: PublishWeights) -> None:
        world, name, version = self._world, machine.spec.name, message.policy_version
        inbound = _Inbound(machine, version, world.now, _group(message))
        self._inbound[name] = inbound
        if message.group is not None:
            self._swarm.end_pull(world.now, name)
            self._broadcast.join(machine, message.group)
            world.at(world.now, lambda: self._stop(inbound))
        elif self._transfer.num_bytes and not machine.is_with_trainer(self._is_colocated):
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
        """Schedule the next step of the swarm, once for all changes at this time."""
        if not self._is_planned and self._transfer.num_bytes:
            self._is_planned = True
            self._world.at(self._world.now, self._plan_next)

    def _plan_next(self) -> None:
        self._is_planned = False
        at = self._swarm.next_at()
        if at < self._next_at:
            self._next_at = at
            self._world.at(at, self._advance)

    def _advance(self) -> None:
        now = self._world.now
        if now < self._next_at:
            return  # superseded
        self._next_at = math.inf
        for node, pull in self._swarm.advance(now):
            if node == TRAINER:
                self._broadcast.sent()
            else:
                self._pulled(self._inbound[node], pull)
        self._plan()

    def _pulled(self, inbound: _Inbound, pull: SimPull) -> None:
        inbound.pull_s = self._world.now - inbound.began_at
        self._world.outcome.weights.add_pull(
            inbound.pull_s, pull.num_bytes, pull.peer_bytes, pull.delta_bytes
        )
        self._load(inbound)

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

    def _serve(self, machine: SimMachine, version: int) -> None:
        """Let peers pull it. On the trainer's machine the trainer serves it already."""
        if not machine.is_with_trainer(self._is_colocated):
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
            self._world.outcome.weights.add_broadcast(self._world.now - inbound.began_at)
            self._world.confirm(inbound.machine, inbound.version)

    def _loaded(self, inbound: _Inbound) -> None:
        machine = inbound.machine
        if self._is_current(inbound) and machine.asleep:
            machine.loading, machine.holds = -1, inbound.version
        elif self._is_current(inbound):
            self._world.confirm(machine, inbound.version)

    def _is_current(self, inbound: _Inbound) -> bool:
        """False if the machine has left, or gets a newer version."""
        return self._inbound.get(inbound.machine.spec.name) is inbound


def _group(message: PublishWeights) -> str:
    """The name of the group by which a version comes; "" = it is pulled."""
    return message.group.name if message.group is not None else ""
