"""Which events a seed gives to those whose devices sample and train in turn, and in which phase of
a change of sides.

Pure: owns what such a change must survive, and as what it is seen. Who is hit is found in world.py.
"""

import random
from dataclasses import replace

from chaos_lib.plan import Event, Phase
from lightrl.messages.snapshot import NodeRow, Snapshot

SIDES: tuple[Phase, ...] = ("releasing", "released", "parking", "waking")
# Of emulated parts: long enough to be seen, and hit, wherever one is looked for.
SHARED_EMULATED = (
    "rollout.engine_args={t0_ms=8.0,mean_length=25.0,train_token_ms=0.1,train_step_ms=60.0,"
    "sleep_ms=500.0,wake_ms=500.0,park_ms=1000.0,fetch_ms=300.0}",
)
# No event reports when ranks park. They do at the end of a step, which takes less than this.
TRAINED_WITHIN_S = 0.6
MAX_DELAY_S = 0.2  # from the moment the phase was seen
LONG_S = (1.3, 2.0)  # of a stop, in leases of a node

# "kill other": a node that has devices of its own; another one joins in its place
_KINDS: dict[str, tuple[Phase, ...]] = {
    "kill engine": ("releasing", "released", "waking"),
    "freeze engine": ("releasing", "waking"),
    "kill rollout": ("releasing", "released", "waking"),
    "freeze rollout": ("releasing", "waking"),
    "kill rank": SIDES,
    "kill trainer": SIDES,
    "freeze trainer": ("releasing", "parking"),
    "kill head": SIDES,
    "kill other": ("releasing", "released"),
}
CARDS = tuple((kind, phase) for kind, phases in _KINDS.items() for phase in phases)


def draw_sharing(
    seed: int,
    events: int,
    steps: int,
    nodes: int,
    lease_s: float,
    trainers: int = 1,
    parks_are_seen: bool = True,
) -> list[Event]:
    """In the order in which they come, one a step at most; seeds in a row share out the pairs of
    kind and phase. From the first step on there is one node with devices of its own.
    `parks_are_seen`: else ranks park too quickly, and nothing waits for that."""
    if events >= steps:
        raise ValueError(f"{events} events: at most one a step, none in the last")
    rng = random.Random(seed)
    targets = {
        "rollout": [f"rollout-{k}" for k in range(nodes)],
        "rank": (names := [f"trainer-{k}" for k in range(trainers)]),
        "trainer": names,
        "head": ["head"],
    }
    num_joined, last_engine = 1, ""
    plan = [Event("join", "late-1", 0, "any")]
    hits = sorted(rng.sample(range(steps - 1), events))
    for (kind, phase), step in zip(_deal(seed, events), hits, strict=True):
        what = kind.split()[1]
        if phase == "parking" and not parks_are_seen:
            phase = "released"
        event = Event(kind, "", step, phase, rng.uniform(0, MAX_DELAY_S))
        if what == "other":
            plan.append(replace(event, kind="kill rollout", target=f"late-{num_joined}"))
            num_joined += 1
            plan.append(Event("join", f"late-{num_joined}", step, "any", together=True))
            continue
        if what == "engine":  # whose engines die asleep twice in a row samples no more
            others = [n for n in targets["rollout"] if n != last_engine]
            last_engine = rng.choice(others or targets["rollout"])
            event = replace(event, target=last_engine)
        else:
            event = replace(event, target=rng.choice(targets[what]))
        if kind.startswith("freeze"):
            event = replace(event, hold_s=lease_s * rng.uniform(*LONG_S))
        plan.append(event)
    return plan


def _deal(seed: int, events: int) -> list[tuple[str, Phase]]:
    first = seed * events
    return [
        random.Random(n // len(CARDS)).sample(CARDS, len(CARDS))[n % len(CARDS)]
        for n in range(first, first + events)
    ]


def side(snapshot: Snapshot, target: str, is_training: bool) -> str:
    """On the way to which side `target` is, or any node that shares devices if it is none of them;
    "" = it samples, or nobody shares. `is_training`: the round has closed."""
    shared = [n for n in snapshot.nodes if n.state_s is not None]
    meant = [n for n in shared if n.name == target] or shared
    if any(n.state == "releasing" for n in meant):
        return "releasing"
    if any(n.state == "updating" for n in meant):
        return "waking"
    if not shared or any(n.state != "released" for n in shared):
        return ""
    has_trained = is_training and min(map(_state_s, shared)) > TRAINED_WITHIN_S
    return "parking" if has_trained else "released"


def _state_s(node: NodeRow) -> float:
    return node.state_s or 0.0
