"""One machine of a simulated fleet: its engine, what it serves, when it joins and leaves.

Owns what the core cannot know of a machine: whether it is present, and what it is loading.
Schedules nothing; `world` does.
"""

import math
from dataclasses import dataclass, replace

from lightrl.messages.load import Load
from lightrl.messages.nodes import Hello
from lightrl.messages.responses import TokenChunk
from lightrl.sim.fleet.engine import SimDelta, SimEngine
from lightrl.sim.fleet.messages import TRAINER, chunk_of, hello
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.nodes import SPOT, NodeSpec
from lightrl.sim.inputs.scenario import Switches


@dataclass(slots=True)
class SimMachine:
    spec: NodeSpec
    engine: SimEngine
    # relative to the hardware of the profile
    speed: float = 1.0
    # of the real machine; the core detects a loss later
    present: bool = False
    # the trainer, or an engine of another size, has its devices
    asleep: bool = False
    # number of the newest order to change sides
    order: int = 0
    # joins and losses so far; an engine that starts late must not join a lost machine
    boots: int = 0
    # when the newest boot began; the time until it joins is paid for
    booted_at: float = math.inf
    incarnation: int = 0
    # policy version whose digest was confirmed
    serves: int = -1
    # version that is being pulled or loaded, -1 = none
    loading: int = -1
    # version that it serves, or will when it wakes
    holds: int = -1
    # it joins with a loaded version
    joins_ready: bool = False
    # of its newest entry in the world's heap
    scheduled_at: float = math.inf
    # times the machines that worked as one
    present_s: float = 0.0
    _since: float = 0.0

    def chunk(self, deltas: list[SimDelta]) -> TokenChunk:
        return chunk_of(self.serves, deltas)

    def is_with_trainer(self, is_colocated: bool) -> bool:
        """Return whether it is the trainer's machine: `is_colocated`, unless it is a spot node."""
        return is_colocated and self.spec.kind != SPOT

    def hello(self, is_colocated: bool, shares: bool) -> Hello:
        """`shares`: nodes with the trainer use its devices in turn with it."""
        name, is_spot = self.spec.name, self.spec.kind == SPOT
        is_with = self.is_with_trainer(is_colocated)
        host, shared = TRAINER if is_with else name, TRAINER if is_with and shares else ""
        message = hello(name, self.incarnation, "rollout", host, self.engine.slots, is_spot, shared)
        return replace(message, parallel=self.spec.parallel, is_released=self.asleep)

    def load(self) -> Load:
        """Return the load of its engine; with several sizes of engines also the cost of its
        steps."""
        profile = self.engine.profile
        costs = profile.costs() if self.spec.parallel else None
        preemptions = self.engine.num_preemptions
        return Load(num_preemptions=preemptions, kv_tokens=profile.kv_tokens, costs=costs)

    def join(self, now: float) -> None:
        self.engine.now = self._since = now
        if (start_s := now - self.booted_at) > 0:
            times = self.engine.times
            times["start"] = times.get("start", 0.0) + start_s
            self.present_s += start_s * self.engine.width
        self.booted_at = math.inf
        self.present, self.asleep = True, self.spec.parallel > 0
        if self.asleep:
            self.engine.width = 0
        self.incarnation += 1
        self.order += 1
        self.serves = self.loading = self.holds = -1

    def leave(self, now: float) -> None:
        if self.present:
            self.engine.clear(now)
            self.engine.hold(now, None)
            self._count_presence(now)
        self.present, self.loading = False, -1

    def turn(self, now: float, asleep: bool) -> None:
        """Sleep for engines of another size, or wake."""
        self.engine.account(now)
        self.engine.hold(now, None)
        self._count_presence(now)
        self.asleep, self.engine.width = asleep, 0 if asleep else self.spec.width

    def _count_presence(self, now: float) -> None:
        self.present_s += (now - self._since) * self.engine.width
        self._since = now


def new_machine(spec: NodeSpec, profile: EngineProfile, switches: Switches) -> SimMachine:
    engine = SimEngine(
        profile,
        spec.slots,
        switches.chunk_tokens,
        now=0.0,
        streams=switches.token_collection,
        prompt_batch=switches.prompt_batch,
        chunk_s=switches.chunk_s,
        width=spec.width,
    )
    return SimMachine(spec, engine, speed=1.0 / spec.slowness)
