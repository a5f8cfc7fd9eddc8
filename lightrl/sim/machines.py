"""The machines of a simulated fleet: an engine each, what it serves, when it comes and goes.

Owns the state of a machine that the core cannot know: whether it is really there, what it is
loading. Decides nothing and schedules nothing; `world` does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lightrl.errors import SimError
from lightrl.messages.load import Load
from lightrl.messages.nodes import Hello
from lightrl.messages.responses import TokenChunk
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
    # of its engine, by the scenario's engines: it takes turns with those of other sizes; 0 = not
    parallel: int = 0
    # devices of the smallest engine, times so many
    width: int = 1
    # of its engine, if it is known; else that of the scenario
    profile: EngineProfile | None = None


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What a node of a run did, so many seconds after a step had begun."""

    at_s: float
    spec: NodeSpec
    # ready = it serves the newest version; left = in peace; lost
    what: Literal["ready", "left", "lost"]


# By the step that had begun.
NodeChanges: TypeAlias = Mapping[int, Sequence[NodeChange]]


def can_group(nodes: Sequence[NodeSpec], sizes: Iterable[int]) -> bool:
    """Whether there are other sizes, and engines of all of them over the devices of these nodes."""
    fixed, known = sum(n.kind != SPOT for n in nodes), sorted(sizes)
    return fixed > 0 and len(known) > 1 and all(fixed % (k // known[0]) == 0 for k in known)


def of_all_sizes(nodes: Sequence[NodeSpec], sizes: Sequence[int]) -> list[NodeSpec]:
    """These nodes, with engines of the smallest size, and such of the others over the same devices;
    nodes that come and go do not take part. Raises SimError."""
    if not sizes:
        return list(nodes)
    least = min(sizes)
    fixed = [n for n in nodes if n.kind != SPOT]
    made = [n for n in nodes if n.kind == SPOT]
    for size in sorted(sizes):
        width = size // least
        if len(fixed) % width:
            raise SimError(
                f"engines of {size} devices: {len(fixed)} nodes with engines of {least} cannot be "
                f"grouped by {width}"
            )
        for first in range(0, len(fixed), width):
            group = fixed[first : first + width]
            name = group[0].name + (f"x{width}" if width > 1 else "")
            slots, slowness = sum(n.slots for n in group), max(n.slowness for n in group)
            made.append(NodeSpec(name, slots, group[0].kind, slowness, size, width))
    return made


@dataclass(slots=True)
class SimMachine:
    spec: NodeSpec
    engine: SimEngine
    # of the hardware, against that which the profile describes
    speed: float = 1.0
    # machines that work as one; 0 while it sleeps for others
    width: int = 1
    # as the core would see it
    present: bool = False
    # others have its devices: the trainer, or engines of another size
    asleep: bool = False
    # that came so far, to change sides
    order: int = 0
    # and ends; an engine that starts late must not join a machine that is gone
    boots: int = 0
    # when the newest began; the time until it joins is paid for
    booted_at: float = math.inf
    incarnation: int = 0
    # policy version whose digest was confirmed
    serves: int = -1
    # the one on its way, -1 = none
    loading: int = -1
    # the one that it serves, or will when it wakes
    holds: int = -1
    # what it comes with is loaded already
    comes_ready: bool = False
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
        said = hello(name, self.incarnation, "rollout", host, self.engine.slots, is_spot, shared)
        return replace(said, parallel=self.spec.parallel, is_released=self.asleep)

    def load(self) -> Load:
        """What its engine says of itself; engines that take turns also what their steps cost."""
        profile = self.engine.profile
        costs = profile.costs() if self.spec.parallel else None
        preemptions = self.total("num_preemptions")
        return Load(num_preemptions=preemptions, kv_tokens=profile.kv_tokens, costs=costs)

    def come(self, now: float) -> None:
        self.engine.now = self._since = now
        if (started_s := now - self.booted_at) > 0:
            times = self.engine.times
            times["start"] = times.get("start", 0.0) + started_s
            self.present_s += started_s * self.width
        self.booted_at = math.inf
        self.present, self.asleep = True, self.spec.parallel > 0
        if self.asleep:
            self.width = 0
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

    def turn(self, now: float, asleep: bool) -> None:
        """It sleeps for engines of another size, or wakes."""
        self.engine.account(now)
        self._past.append((self.engine, self.width))
        self.present_s += (now - self._since) * self.width
        self._since, before = now, self.engine
        self.asleep, self.width = asleep, 0 if asleep else self.spec.width
        self.engine = SimEngine(
            before.profile,
            before.slots,
            before.chunk_tokens,
            now,
            before.streams,
            before.prompt_batch,
            before.chunk_s,
            idle_label=before.idle_label,
        )
        self.scheduled_at = math.inf

    def times(self) -> dict[str, float]:
        """Seconds in each state, times the machines that worked as one."""
        total: dict[str, float] = {}
        for engine, width in (*self._past, (self.engine, self.width)):
            for label, seconds in engine.times.items():
                total[label] = total.get(label, 0.0) + width * seconds
        return total

    def total(self, name: str) -> int:
        return sum(getattr(engine, name) for engine, _ in (*self._past, (self.engine, self.width)))


def profile_of(
    spec: NodeSpec, engines: Mapping[int, EngineProfile], spot_kv_tokens: int
) -> EngineProfile:
    """`spot_kv_tokens`: of an engine that shares its GPUs with no trainer; 0 = of all the same."""
    if spec.profile is not None:
        return spec.profile.slower(spec.slowness)
    profile = engines[spec.parallel or min(engines)].slower(spec.slowness)
    is_other = spec.kind == SPOT and spot_kv_tokens > 0
    return replace(profile, kv_tokens=spot_kv_tokens) if is_other else profile


def new_machine(spec: NodeSpec, profile: EngineProfile, switches: Switches) -> SimMachine:
    engine = SimEngine(
        profile,
        spec.slots,
        switches.chunk_tokens,
        now=0.0,
        streams=switches.token_collection,
        prompt_batch=spec.slots if switches.exact_finishes else PROMPT_BATCH,
        chunk_s=switches.chunk_s,
    )
    return SimMachine(spec, engine, speed=1.0 / spec.slowness, width=spec.width)
