"""Which events a seed gives to those who publish, send, relay, receive, pull and load versions, and
in which phase of that.

Pure: lists the faults that weights must survive. world.py and machines.py carry them out, watch.py
sees the phases.
"""

import random
from typing import Literal

from chaos_lib.plan import Event, Phase

# how versions come to nodes: whole, as differences, or by broadcast
Way = Literal["pull", "delta", "broadcast"]

SPARE = 3  # steps at the end of a run with broadcasts: nodes that pulled late are no members
NODES = 3  # so that one who pulls relays to another
SHORT_S, LONG_S = (0.3, 0.6), (1.3, 2.0)  # of a stop or a cut, in leases of a node
MAX_DELAY_S = 0.3  # from the moment the phase was seen
BRIEF: dict[Phase, float] = {"patching": 0.01}

# Seen on one node: the one that is hit, or any if that is no rollout node.
ON_NODE: tuple[Phase, ...] = (
    *("pulling", "patching", "loading"),
    *("forming", "sending"),
)

Kinds = dict[str, tuple[Phase, ...]]
_PULL: Kinds = {
    "kill rollout": ("pulling", "pulling", "loading"),
    "freeze rollout": ("pulling", "loading"),
    "cut rollout": ("pulling", "loading"),
    "kill engine": ("loading", "pulling"),
    "freeze engine": ("loading", "pulling"),
    "kill trainer": ("publishing", "pulling"),
    "freeze trainer": ("publishing", "pulling"),
    "kill rank": ("training", "publishing"),  # it publishes at the end of the former
    "freeze rank": ("training", "publishing"),
    "kill head": ("publishing", "pulling", "loading"),
    "freeze head": ("publishing", "pulling"),
    "cut head": ("publishing", "pulling"),  # and the trainer, which is on the same machine
}
PHASES: dict[Way, Kinds] = {
    "pull": _PULL,
    "delta": dict.fromkeys(_PULL, ("patching", "patching", "pulling")),
    "broadcast": dict.fromkeys(_PULL, ("forming", "sending")),
}
TARGETS = {"trainer": "trainer-0", "rank": "trainer-0", "head": "head"}


def nodes() -> list[str]:
    return [f"far-{k}" for k in range(NODES)]


def draw_weights(
    seed: int,
    events: int,
    steps: int,
    lease_s: float,
    loads_are_seen: bool = True,
    way: Way = "pull",
) -> list[Event]:
    """In the order in which they come, one a step at most; seeds in a row share out the kinds.
    `loads_are_seen`: else they are over too soon, and nothing waits for them."""
    if events >= steps:
        raise ValueError(f"{events} events: at most one a step, none in the last")
    rng = random.Random(seed)
    hand = _deal(seed, events, way)
    plan: list[Event] = []
    end = max(events, steps - 1 - (SPARE if way == "broadcast" else 0))
    for kind, step in zip(hand, sorted(rng.sample(range(end), events)), strict=True):
        what = kind.split()[1]
        phases = [p for p in PHASES[way][kind] if loads_are_seen or p != "loading"]
        phase, hold_s = rng.choice(phases), 0.0
        if not kind.startswith("kill"):
            hold_s = lease_s * rng.uniform(*rng.choice((SHORT_S, LONG_S)))
        target = TARGETS.get(what) or rng.choice(nodes())
        delay_s = rng.uniform(0, BRIEF.get(phase, MAX_DELAY_S))
        if phase == "forming":  # a stopped member keeps the group from forming; see world.py
            other = rng.choice([name for name in nodes() if name != target])
            plan.append(Event("kill rollout", other, step, "sending", 0.0))
        plan.append(Event(kind, target, step, phase, delay_s, hold_s))
    return plan


def unhit_phases(plan: list[Event], missed: list[Event]) -> list[Phase]:
    """Those in which something was to happen and nothing did."""
    hit = {event.phase for event in plan if event not in missed}
    return sorted({event.phase for event in plan} - hit)


def _deal(seed: int, events: int, way: Way) -> list[str]:
    kinds = list(PHASES[way])
    first = seed * events
    return [
        random.Random(n // len(kinds)).sample(kinds, len(kinds))[n % len(kinds)]
        for n in range(first, first + events)
    ]
