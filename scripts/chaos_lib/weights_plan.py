"""Which events a seed gives to those who publish, send, relay, pull and load versions, and in which
phase of that.

Pure: owns what the weights must survive. What is done to whom is in world.py and machines.py, by
what a phase is seen in watch.py.
"""

import random

from chaos_lib.plan import Event, Phase

NODES = 3  # so that one who pulls relays to another
SHORT_S, LONG_S = (0.3, 0.6), (1.3, 2.0)  # of a stop or a cut, in leases of a node
MAX_DELAY_S = 0.3  # from the moment the phase was seen

# Seen on one node: the one that is hit, or any if that is no rollout node.
# The phases of a broadcast (forming, sending, proving) and "patching" come here as soon as `lightrl
# status` shows them, with what hits a member and a rank in them in PHASES.
ON_NODE: tuple[Phase, ...] = ("pulling", "loading")

PHASES: dict[str, tuple[Phase, ...]] = {
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
TARGETS = {"trainer": "trainer-0", "rank": "trainer-0", "head": "head"}


def nodes() -> list[str]:
    return [f"far-{k}" for k in range(NODES)]


def draw_weights(
    seed: int, events: int, steps: int, lease_s: float, loads_are_seen: bool = True
) -> list[Event]:
    """In the order in which they come, one a step at most; seeds in a row share out the kinds.
    `loads_are_seen`: else they are over too soon, and nothing waits for them."""
    if events >= steps:
        raise ValueError(f"{events} events: at most one a step, none in the last")
    rng = random.Random(seed)
    hand = _deal(seed, events)
    plan: list[Event] = []
    for kind, step in zip(hand, sorted(rng.sample(range(steps - 1), events)), strict=True):
        what = kind.split()[1]
        phases = [p for p in PHASES[kind] if loads_are_seen or p != "loading"]
        phase, hold_s = rng.choice(phases), 0.0
        if not kind.startswith("kill"):
            hold_s = lease_s * rng.uniform(*rng.choice((SHORT_S, LONG_S)))
        target = TARGETS.get(what) or rng.choice(nodes())
        plan.append(Event(kind, target, step, phase, rng.uniform(0, MAX_DELAY_S), hold_s))
    return plan


def _deal(seed: int, events: int) -> list[str]:
    kinds = list(PHASES)
    first = seed * events
    return [
        random.Random(n // len(kinds)).sample(kinds, len(kinds))[n % len(kinds)]
        for n in range(first, first + events)
    ]
