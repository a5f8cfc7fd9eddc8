"""Advantages of the responses of one group, one small function for each algorithm.

Owns the formulas that need rewards only, and makes of a group that was sent what its samples are
worth. Pure Python, no torch: the daemon calls it as soon as a group is scored, while others still
generate.
"""

import math
from collections.abc import Callable, Sequence

from lightrl.config import Config
from lightrl.errors import TrainerError
from lightrl.messages import TrainGroup
from lightrl.trainer.protocol import TrainSample

STD_EPSILON = 1e-4


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


# REINFORCE++ with the group mean as baseline (Hu et al. 2025, arXiv 2501.03262) also divides by the
# standard deviation over the whole batch. That is not known while groups stream in; the policy
# gradient is linear in it, so the rank divides once, when the step ends (see
# `loss.advantage_scale`).
ALGORITHM: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": standardized,
    "dr_grpo": minus_mean,
    "dapo": standardized,
    "gspo": standardized,
    "cispo": standardized,
    "rloo": leave_one_out,
    "reinforce++": minus_mean,
}


def advantages(name: str, rewards_G: Sequence[float]) -> list[float]:
    """The advantage of each response of a group, from the rewards of all of them.

    Exactly 0.0 when all rewards are equal, which includes a group of one: there is no signal in it.
    Example: advantages("rloo", [1, 0, 0]) == [1, -0.5, -0.5] up to rounding.
    Raises TrainerError for a reward that is not finite: it would poison the whole step.
    """
    if not all(math.isfinite(r) for r in rewards_G):
        raise TrainerError(f"rewards {list(rewards_G)}: all must be finite numbers")
    # the mean of equal floats need not equal them
    if not rewards_G or min(rewards_G) == max(rewards_G):
        return [0.0] * len(rewards_G)
    return ALGORITHM[name](rewards_G)


def train_samples(group: TrainGroup, config: Config) -> list[TrainSample]:
    """The responses of a group with their advantages, in its order; any penalty for length is in
    them."""
    buffer, limit = config.algorithm.overlong_buffer, config.rollout.max_response_length
    rewards_G = [
        r.reward + overlong_penalty(len(r.token_ids) // 4, limit, buffer) for r in group.responses
    ]
    values_G = advantages(config.algorithm.name, rewards_G)
    return [
        TrainSample(
            r.response, group.prompt, r.token_ids, r.rollout_logprobs, value, r.finish_reason
        )
        for r, value in zip(group.responses, values_G, strict=True)
    ]
