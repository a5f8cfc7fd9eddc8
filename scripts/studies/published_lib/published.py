"""Figures that others have published, as data: what the simulator is calibrated against.

From RollPacker (arXiv 2509.21009): figure 12, read off its bars, and table 2 with the step times of
its section 7. A round is short (4 of 5 with eta = 1.25) or long. From RLBoost (arXiv 2510.19225):
what a number of preemptible instances that stay brings and costs. Every step of both holds 128
prompts x 8 responses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PROMPTS_PER_STEP, GROUP_SIZE, ENGINES = 128, 8, 16
SLOTS = 100  # of an engine: 160 prompts x 10 responses on 16 of them
# RLBoost: engines on eight reserved devices, two of them each; responses that one is given at once.
# Its balancer moves what waits at one engine to another (algorithm 2), so that nothing waits for
# room in a cache while there is room elsewhere: an engine is given no more than its cache
# holds, 347,000 tokens at 4,600 of context on average. veRL gives each engine its share at once.
RESERVED_ENGINES, INSTANCE_SLOTS, BALANCED_SLOTS = 4, 256, 75
# seconds of its window with so many instances and Qwen3-14B: constants in the authors' release
# (Terra-Flux/PolyRL, rollout-manager, balance.rs), where 5 s is the least
WINDOW_S = {1: 346.0, 2: 212.0, 3: 145.0, 4: 60.0, 5: 8.0, 6: 5.0}
LEAST_WINDOW_S = 5.0
ETA = 1.25


@dataclass(frozen=True, slots=True)
class Bar:
    """Figure 12: mean rollout seconds of a round over whole periods, by surplus of prompts and
    responses."""

    name: str
    eta_prompts: float
    eta_responses: float
    rollout_s: float


@dataclass(frozen=True, slots=True)
class Study:
    """One of the workloads, under the name of its preset; table 2 is speed-ups over veRL."""

    workload: str
    bars: tuple[Bar, ...]
    tail_batching: float
    # with all above
    reward_scheduler: float
    planner: float
    # that is all of RollPacker
    stream_trainer: float
    # the same over RLHFuse, which was given asynchronous rewards and the stream trainer
    over_rlhfuse: float
    # steps of all of RollPacker
    short_s: float
    long_s: float
    # not published: from these two and the speed-up
    verl_s: float


def _bars(*seconds: float) -> tuple[Bar, ...]:
    etas = [(1, 1), (1, 1.125), (1, 1.25), (1, 1.5), (1.125, 1), (1.25, 1), (1.5, 1), (1.25, 1.25)]
    return tuple(
        Bar(f"prompts x {p:g}, responses x {r:g}", p, r, s)
        for (p, r), s in zip(etas, seconds, strict=True)
    )


STUDIES = (
    Study(
        "rollpacker-7b-8k", _bars(82, 77, 71, 54, 77, 72, 60, 47),
        1.30, 2.01, 2.01, 2.03, 1.14, 106, 129, 225,
    ),
    Study(
        "rollpacker-14b-16k", _bars(277, 260, 232, 115, 244, 169, 143, 88),
        1.48, 1.99, 2.02, 2.22, 1.68, 134, 302, 372,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instances:
    """What preemptible instances bring, by their number, against none; changes are relative."""

    workload: str
    speed_up: Mapping[int, float]
    # of a token
    cost: Mapping[int, float]
    # throughput without a window, mean over one to six instances
    no_window: float
    # throughput with memory, while their number changes
    memory: float
    # three of six die 200 s into a step: of the time that this adds if their responses start again
    moving: float
    # the best number of them, by the limit of a response
    best: Mapping[int, int]


RLBOOST = Instances(
    "rlboost-14b-14k",
    {1: 1.37, 6: 2.25},
    {1: 0.78, 6: 0.78 * 0.79},
    no_window=-0.19,
    memory=0.06,
    moving=-0.76,
    best={5120: 3, 14_336: 6},
)
