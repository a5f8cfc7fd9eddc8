"""Choose the events of a seed, with their targets and times. Pure, so that a seed can be repeated.

Owns what a run must survive, and that each event leaves it somebody to go on with. Signals nobody.
"""

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

Phase = Literal[
    "any",
    "rollout",
    "training",
    "publishing",
    "evaluation",
    # of the weights, on one node: see weights_plan.py
    "pulling",
    "patching",
    "loading",
    "forming",
    "sending",
    # of a change of sides: see sharing_plan.py
    "releasing",
    "released",
    "parking",
    "waking",
]

SHORT_S, LONG_S = (0.2, 0.6), (1.3, 2.0)  # pauses, in leases of a node
MAX_LATE = 2  # nodes that join and are there at a time
MAX_PER_STEP = 2  # a run that is hit again and again without a step done gives up, as it should
MAX_DELAY_S = {"any": 0.4, "rollout": 0.4}  # from the moment an event waits for
HASTE_S = 0.05  # in the phases that are soon over
TOGETHER = 0.25  # share of events that come while the one before is still felt

KINDS = (
    "kill rollout",
    "term rollout",
    "pause rollout",
    "freeze rollout",
    "freeze engine",
    "kill engine",
    "kill reward",
    "kill rank",
    "kill trainer",
    "freeze trainer",
    "kill head",
    "kill head",  # twice: it has the most to lose
    "freeze head",
    "kill up",
    "join",
    "drain",
)
# with episodes
ENVIRONMENT_KINDS = (
    *KINDS,
    *("kill worker", "kill worker", "freeze worker"),
    *("kill environment", "kill environment", "freeze environment"),
)
LEAVING = {"term rollout", "drain"}


@dataclass(frozen=True)
class Event:
    """Example: Event("freeze rollout", "rollout-1", step=3, phase="rollout", delay_s=0.1,
    hold_s=3.1)."""

    kind: str
    # a daemon; "" = lightrl up itself
    target: str
    # optimizer steps done when it comes
    step: int
    phase: Phase
    # after the phase was seen
    delay_s: float = 0.0
    # until a stopped process continues
    hold_s: float = 0.0
    # waits for nothing: the event before has just come
    together: bool = False

    def __str__(self) -> str:
        what = f"{self.kind} {self.target}".strip()
        return f"{what} for {self.hold_s:.1f} s" if self.hold_s else what


class Fleet:
    """Which rollout nodes there are when all events so far have been felt."""

    def __init__(self, nodes: int, trainers: int = 1) -> None:
        self._nodes = nodes
        self._trainers = [f"trainer-{k}" for k in range(trainers)]
        self.own = [f"rollout-{k}" for k in range(nodes)]
        self.late: list[str] = []
        self._joined = 0

    def may(self, kind: str) -> bool:
        if kind in LEAVING:
            return len(self.own) + len(self.late) > 1
        return kind != "join" or len(self.late) < MAX_LATE

    def target(self, kind: str, rng: random.Random) -> str:
        match kind.split()[-1]:
            case "rollout" | "drain":
                return self._leaver(rng) if kind in LEAVING else rng.choice([*self.own, *self.late])
            case "engine":
                return rng.choice(self.own)
            case "trainer" | "rank":
                return self._trainers[0] if len(self._trainers) == 1 else rng.choice(self._trainers)
            case "head" | "reward":
                return "head"
            case "worker" | "environment":
                return "environment-0"
            case "join":
                self._joined += 1
                return f"late-{self._joined}"
            case _:
                return ""

    def feel(self, kind: str, target: str) -> None:
        if kind == "join":
            self.late.append(target)
        elif kind == "kill up":  # stops the run in order; `lightrl resume` starts all of its own
            self.own, self.late = [f"rollout-{k}" for k in range(self._nodes)], []
        elif kind in LEAVING or (kind == "kill rollout" and target in self.late):
            (self.own if target in self.own else self.late).remove(target)

    def _leaver(self, rng: random.Random) -> str:
        """Never the last one that is started again when it dies."""
        return rng.choice([*self.late, *(self.own if len(self.own) > 1 else [])])


def each_phase(trainers: int, eval_interval: int) -> list[Event]:
    """Each trainer is killed once in each phase, two steps apart."""
    plan: list[Event] = []
    phases: tuple[Phase, ...] = ("rollout", "training", "publishing")
    names = [f"trainer-{k}" for k in range(trainers)]
    for k, (phase, name) in enumerate(product(phases, names)):
        plan.append(Event("kill trainer", name, 2 * k + 1, phase))
    begins = -(-(2 * len(plan) + 1) // eval_interval) * eval_interval
    for k, name in enumerate(names):
        plan.append(Event("kill trainer", name, begins + k * eval_interval, "evaluation"))
    return plan


def draw(
    seed: int,
    events: int,
    steps: int,
    nodes: int,
    lease_s: float,
    eval_interval: int = 0,
    trainers: int = 1,
    kinds: tuple[str, ...] = KINDS,
) -> list[Event]:
    """In the order in which they come; seeds in a row share out the kinds among them."""
    if events > MAX_PER_STEP * steps:
        raise ValueError(f"{events} events: at most {MAX_PER_STEP} a step")
    rng = random.Random(seed)
    fleet = Fleet(nodes, trainers)
    hand = _deal(seed, events, kinds)
    plan: list[Event] = []
    for step in sorted(rng.sample([s for s in range(steps) for _ in range(MAX_PER_STEP)], events)):
        kind = next(filter(fleet.may, [*hand, *rng.sample(kinds, len(kinds))]))
        if kind in hand:
            hand.remove(kind)
        target = fleet.target(kind, rng)
        fleet.feel(kind, target)
        phase = _phase(rng, step, steps, eval_interval)
        event = Event(kind, target, step, phase, rng.uniform(0, MAX_DELAY_S.get(phase, HASTE_S)))
        if kind.startswith(("pause", "freeze")):
            low, high = SHORT_S if kind.startswith("pause") else LONG_S
            event = replace(event, hold_s=lease_s * rng.uniform(low, high))
        close = (
            bool(plan)
            and plan[-1].step == step
            and not plan[-1].together
            and plan[-1].kind != "kill up"
        )
        plan.append(replace(event, together=close and rng.random() < TOGETHER))
    return plan


def _deal(seed: int, events: int, kinds: tuple[str, ...]) -> list[str]:
    """From one endless row of shuffled packs, so that few seeds have all kinds."""
    first = seed * events
    packs = range(first // len(kinds), (first + events) // len(kinds) + 1)
    row = [kind for pack in packs for kind in random.Random(pack).sample(kinds, len(kinds))]
    skipped = first % len(kinds)
    return row[skipped : skipped + events]


def _phase(rng: random.Random, step: int, steps: int, eval_interval: int) -> Phase:
    if step == steps - 1:
        return "rollout"  # the run may be over before another phase is seen
    phases: list[Phase] = ["any", "rollout", "training", "publishing"]
    if step == 0 or (eval_interval and step % eval_interval == 0):
        phases.append("evaluation")
    return rng.choice(phases)
