"""Advantages of the responses of one group, one small function for each algorithm.

Owns the formulas that need rewards only, and makes of a group that was sent what its samples are
worth. Pure Python, no torch: the daemon calls it as soon as a group is scored, while others still
generate. What needs all groups of a mini-batch, `whitened`, the ranks do when it ends.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import mul

from lightrl.config.algorithm import UNGROUPED
from lightrl.config.schema import Config
from lightrl.errors import TrainerError
from lightrl.messages.training import TrainGroup
from lightrl.trainer.protocol import MicroBatch, TrainSample
from lightrl.wire import LARGEST_F32, fits_f32, num_trained

STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8
ROUNDING = 1e-12  # relative


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """What is added to the reward of a response of `length` tokens, 0 to -1: "soft overlong
    punishment".

    0 up to max_length - buffer, from there on falling linearly, -1 at max_length and beyond. DAPO
    (Yu et al. 2025, arXiv 2503.14476, eq. 13, where L_cache is `buffer`); there the reward is 1 or
    -1. buffer 0: no penalty at all. Example: overlong_penalty(90, max_length=100, buffer=20) ==
    -0.5
    """
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))


def minus_mean(rewards_G: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r). Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which drops the division
    by std."""
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [r - mean for r in rewards_G]


def standardized(rewards_G: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4). GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 4).

    std is the sample standard deviation (n - 1), as TRL and verl compute it. Used unchanged by DAPO
    (arXiv 2503.14476), GSPO (arXiv 2507.18071) and CISPO (arXiv 2506.13585).
    """
    centred = minus_mean(rewards_G)
    std = math.sqrt(math.fsum(a * a for a in centred) / (len(centred) - 1))
    return [a / (std + STD_EPSILON) for a in centred]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the other rewards. RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section
    3)."""
    n = len(rewards_G)
    return [a * n / (n - 1) for a in minus_mean(rewards_G)]


def unchanged(rewards_G: Sequence[float]) -> list[float]:
    """A_i = r_i, which is compared with all of the step: see `whitened`. REINFORCE++ (Hu et al.
    2025, arXiv 2501.03262)."""
    return list(rewards_G)


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": standardized,
    "dr_grpo": minus_mean,
    "dapo": standardized,
    "gspo": standardized,
    "cispo": standardized,
    "rloo": leave_one_out,
    "reinforce++": unchanged,
    "reinforce++-baseline": minus_mean,
}


def advantages(name: str, rewards_G: Sequence[float]) -> list[float]:
    """The advantage of each response of a group, from the rewards of all of them.

    Where they are compared, exactly 0.0 if all are equal, which includes a group of one: there is
    no signal in it. Example: advantages("rloo", [1, 0, 0]) == [1, -0.5, -0.5] up to rounding.
    Raises TrainerError for a reward outside float32: it would poison the whole step.
    """
    _require_f32("reward", rewards_G)
    # the mean of equal floats need not equal them
    is_flat = not rewards_G or min(rewards_G) == max(rewards_G)
    if is_flat and name not in UNGROUPED:
        return [0.0] * len(rewards_G)
    return [max(-LARGEST_F32, min(LARGEST_F32, a)) for a in ADVANTAGES[name](rewards_G)]


def _require_f32(what: str, values: Sequence[float]) -> None:
    if wrong := [v for v in values if not fits_f32(v)]:
        raise TrainerError(f"a {what} is {wrong[0]}: all must be finite and in float32's range")


def whitened(
    batches: Sequence[MicroBatch], total: Callable[[Sequence[float]], Sequence[float]]
) -> list[MicroBatch]:
    """A' = (A - mean) / sqrt(var + 1e-8), mean and variance (n - 1) over the trained tokens of a
    whole mini-batch, each of which has the advantage of its response: REINFORCE++, with a baseline
    or without, as verl has it.

    `batches` are those of one rank, `total` adds up over all of them, and is called by each twice.
    Where all advantages are equal there is no signal in them: all become exactly 0.0. Raises
    TrainerError for one outside float32.
    """
    samples = [s for batch in batches for s in batch]
    lengths = [num_trained(s.token_ids, s.loss_mask) for s in samples]
    values = [s.advantage for s in samples]
    _require_f32("advantage", values)
    count, summed = total([math.fsum(lengths), math.fsum(map(mul, lengths, values))])
    mean = summed / max(1.0, count)
    (squares,) = total(
        [math.fsum(n * (a - mean) ** 2 for n, a in zip(lengths, values, strict=True))]
    )
    # of equal values, but for the rounding of their mean
    is_flat = squares <= count * (ROUNDING * mean) ** 2
    scale = 0.0 if is_flat else 1 / math.sqrt(squares / max(1.0, count - 1) + VARIANCE_EPSILON)
    return [
        tuple(replace(s, advantage=(s.advantage - mean) * scale) for s in batch)
        for batch in batches
    ]


def train_samples(group: TrainGroup, config: Config) -> list[TrainSample]:
    """The responses of a group that are trained, with their advantages, in its order; any penalty
    for length is in them. What is cut at the limit may count in those of the others only."""
    algorithm, limit = config.algorithm, config.rollout.max_response_length
    buffer, factor = algorithm.overlong_buffer, algorithm.overlong_penalty
    rewards_G = [
        r.reward + factor * overlong_penalty(num_trained(r.token_ids, r.loss_mask), limit, buffer)
        for r in group.responses
    ]
    values_G = advantages(algorithm.name, rewards_G)
    return [
        TrainSample(
            r.response,
            group.prompt,
            r.token_ids,
            r.rollout_logprobs,
            value,
            r.finish_reason,
            r.loss_mask,
            r.num_stale,
        )
        for r, value in zip(group.responses, values_G, strict=True)
        if not (algorithm.mask_truncated and r.finish_reason == "length")
    ]
