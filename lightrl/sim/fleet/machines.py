"""One machine of a simulated fleet: its engine, what it serves, when it joins and leaves.

Owns what the core cannot know of a machine: whether it is present, and what it is loading.
Schedules nothing; `world` does.
"""

import math
from dataclasses import dataclass

from lightrl.messages.load import Load
from lightrl.messages.responses import ResponseTokens, TokenChunk
from lightrl.sim.fleet.engine import SimEngine
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.nodes import SPOT, NodeSpec
from lightrl.sim.inputs.scenario import Switches


def digest_of(policy_version: int) -> str:
    return f"version-{policy_version}"


def version_of(digest: str) -> int:
    return int(digest.rpartition("-")[2])


@dataclass(slots=True)
class SimMachine:
    """A machine; the core learns of it when it joins."""

    spec: NodeSpec
    engine: SimEngine
    present: bool = False
    # its engine sleeps: the trainer, or an engine of another size, has its devices
    asleep: bool = False
    # counts when it joins, leaves or gets an order: what began before that must not end after it
    changes: int = 0
    # when the newest boot began; the time until it joins is paid for
    booted_at: float = math.inf
    # policy version whose digest was confirmed
    serves: int = -1
    # version that is being pulled or loaded, -1 = none
    loading: int = -1
    # version that it serves, or will when it wakes
    holds: int = -1
    # it joins with a loaded version
    joins_ready: bool = False

    @property
    def speed(self) -> float:
        return 1.0 / self.spec.slowness

    @property
    def is_spot(self) -> bool:
        return self.spec.kind == SPOT

    def chunk(self, deltas: list[ResponseTokens]) -> TokenChunk:
        return TokenChunk(self.serves, digest_of(self.serves), tuple(deltas))

    def load(self) -> Load:
        """Return the load of its engine; with several sizes of engines also the cost of its
        steps."""
        profile = self.engine.profile
        costs = profile.costs() if self.spec.parallel else None
        preemptions = self.engine.num_preemptions
        return Load(num_preemptions=preemptions, kv_tokens=profile.kv_tokens, costs=costs)

    def join(self, now: float) -> None:
        self.engine.now = now
        if (start_s := now - self.booted_at) > 0:
            times = self.engine.times
            times["start"] = times.get("start", 0.0) + start_s * self.engine.width
        self.booted_at = math.inf
        self.present, self.asleep = True, self.spec.parallel > 0
        if self.asleep:
            self.engine.width = 0
        self.changes += 1
        self.serves = self.loading = self.holds = -1

    def leave(self, now: float) -> None:
        if self.present:
            self.engine.clear(now)
            self.engine.hold(now, None)
        self.changes += 1
        self.present, self.loading = False, -1

    def turn(self, now: float, asleep: bool) -> None:
        """Sleep for engines of another size, or wake."""
        self.engine.account(now)
        self.engine.hold(now, None)
        self.engine.width = 0 if asleep else self.spec.width

    def node_s(self, now: float) -> float:
        """Return the seconds so far in which it was present and awake; those of a slow machine
        count less."""
        if self.present:
            self.engine.account(now)
        times = self.engine.times
        return self.speed * (sum(times.values()) - times.get("start", 0.0)) / self.spec.width


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
    return SimMachine(spec, engine)
