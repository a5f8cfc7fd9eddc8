"""The machines of a simulated fleet: an engine each, what it serves, when it comes and goes.

Owns the state of a machine that the core cannot know: whether it is really there, what it is
loading. Decides nothing and schedules nothing; `world` does.
"""

import math
from dataclasses import dataclass, field

from lightrl.messages import Hello, TokenChunk
from lightrl.sim.engine import PROMPT_BATCH, SimDelta, SimEngine
from lightrl.sim.engine_profile import EngineProfile
from lightrl.sim.messages import TRAINER, chunk_of, hello
from lightrl.sim.scenario import Switches

SPOT = "spot"  # the kind of nodes that come and go; they never train


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One rollout node as a user describes it."""

    name: str
    slots: int
    # its row in the report
    kind: str = "rollout"
    # how many times as long everything takes
    slowness: float = 1.0


@dataclass(slots=True)
class SimMachine:
    spec: NodeSpec
    engine: SimEngine
    # of the hardware, against that which the profile describes
    speed: float = 1.0
    # machines that work as one
    width: int = 1
    # as the core would see it
    present: bool = False
    # its devices train
    asleep: bool = False
    # that came so far, to change sides
    order: int = 0
    # part of another one's width
    merged: bool = False
    # and ends; an engine that starts late must not join a machine that is gone
    boots: int = 0
    incarnation: int = 0
    # policy version whose digest was confirmed
    serves: int = -1
    # the one on its way, -1 = none
    loading: int = -1
    # the one that it serves, or will when it wakes
    holds: int = -1
    # of its entry in the world's heap
    scheduled_at: float = math.inf
    # x width
    present_s: float = 0.0
    _since: float = 0.0
    # that it had before
    _past: list[tuple[SimEngine, int]] = field(default_factory=list[tuple[SimEngine, int]])

    def chunk(self, deltas: list[SimDelta]) -> TokenChunk:
        return chunk_of(self.serves, deltas)

    def is_with_trainer(self, is_colocated: bool) -> bool:
        """On its machine: `is_colocated`, unless it is a spot node."""
        return is_colocated and self.spec.kind != SPOT

    def hello(self, is_colocated: bool, shares: bool) -> Hello:
        """`shares`: nodes that are with the trainer use its devices in turn with it."""
        name, is_spot = self.spec.name, self.spec.kind == SPOT
        is_with = self.is_with_trainer(is_colocated)
        host, shared = TRAINER if is_with else name, TRAINER if is_with and shares else ""
        return hello(name, self.incarnation, "rollout", host, self.engine.slots, is_spot, shared)

    def come(self, now: float) -> None:
        self.engine.now = self._since = now
        self.present, self.asleep, self.merged = True, False, False
        self.incarnation += 1
        self.order += 1
        self.serves = self.loading = self.holds = -1

    def go(self, now: float) -> None:
        if self.present:
            self.engine.clear(now)
            self.engine.hold(now, None)
            self.present_s += (now - self._since) * self.width
            self._since = now
        self.present, self.loading = False, -1

    def refit(self, now: float, profile: EngineProfile, slots: int, width: int) -> None:
        """Another engine, from now on."""
        self._past.append((self.engine, self.width))
        before = self.engine
        self.engine = SimEngine(
            profile, slots, before.chunk_tokens, now, before.streams, before.prompt_batch
        )
        self.scheduled_at, self.width = math.inf, width

    def times(self) -> dict[str, float]:
        """Seconds in each state, times the machines that worked as one."""
        total: dict[str, float] = {}
        for engine, width in (*self._past, (self.engine, self.width)):
            for label, seconds in engine.times.items():
                total[label] = total.get(label, 0.0) + width * seconds
        return total

    def total(self, name: str) -> int:
        return sum(getattr(engine, name) for engine, _ in (*self._past, (self.engine, self.width)))


def new_machine(spec: NodeSpec, profile: EngineProfile, switches: Switches) -> SimMachine:
    engine = SimEngine(
        profile,
        spec.slots,
        switches.chunk_tokens,
        now=0.0,
        streams=switches.token_collection,
        prompt_batch=spec.slots if switches.exact_finishes else PROMPT_BATCH,
    )
    return SimMachine(spec, engine, speed=1.0 / spec.slowness)
