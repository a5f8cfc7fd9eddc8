"""Losses per token, one small function for each algorithm, and how a step's loss is normalised.

Owns formulas on tensors; knows no model and no process group. All sums are un-normalised: gradients
are accumulated while a round still runs, and only its end knows the denominator. Notation: logprobs
and masks are float32 [rows, width], one column per response token, advantages [rows, 1]; mask is 1
at response tokens and 0 at padding.

`old_logprobs` are those of the policy before the update. With one update per step they equal the
current ones: ratios are exactly 1 and nothing is clipped. The ratios stay in the formulas because
they carry the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.config import AlgorithmSection, LossNorm


@dataclass(frozen=True)
class Clip:
    """Ratios are held to [1 - low, 1 + high]."""

    low: float
    high: float

    def apply(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.low, 1 + self.high)

    def pessimistic(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """-min(ratio A, clip(ratio) A), and where it takes the clipped branch, so that no gradient flows."""
        loss = -torch.minimum(ratio * advantages, self.apply(ratio) * advantages)
        above = (ratio > 1 + self.high) & (advantages > 0)
        return loss, above | ((ratio < 1 - self.low) & (advantages < 0))


# (logprobs, old_logprobs, advantages, mask, clip) -> (loss per token, where clipped)
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor]]


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), r = pi / pi_old per token. PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    GRPO, Dr. GRPO and RLOO use it as it is; DAPO with clip_high > clip_low ("clip-higher", 0.28 and
    0.2 in arXiv 2503.14476).
    """
    return clip.pessimistic((logprobs - old_logprobs).exp(), advantages)


def sequence_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-min(s A, clip(s) A), s = (pi(y) / pi_old(y))^(1/|y|), the same for all tokens of a response.

    GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5 and 7); its ranges are far narrower (3e-4, 4e-4).
    """
    length = mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (((logprobs - old_logprobs) * mask).sum(1, keepdim=True) / length).exp()
    return clip.pessimistic(ratio.expand_as(logprobs), advantages)


def clipped_weight(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-sg(clip(r)) A log pi: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the paper leaves the lower side open).
    """
    ratio = (logprobs - old_logprobs).exp().detach()
    weight = clip.apply(ratio)
    return -weight * advantages * logprobs, weight != ratio


@dataclass(frozen=True)
class Recipe:
    """The loss of an algorithm and the normalisation its paper prescribes."""

    policy_loss: PolicyLoss
    norm: LossNorm


ALGORITHM: dict[str, Recipe] = {
    "grpo": Recipe(ppo_clip, "sequence"),
    "dr_grpo": Recipe(ppo_clip, "constant"),
    "dapo": Recipe(ppo_clip, "token"),
    "gspo": Recipe(sequence_clip, "sequence"),
    "cispo": Recipe(clipped_weight, "token"),
    "rloo": Recipe(ppo_clip, "constant"),  # its gradient sums over the tokens of a response
    "reinforce++": Recipe(ppo_clip, "token"),
}


def kl(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimates of KL(pi || ref) per token, for samples from pi (Schulman, "Approximating KL divergence").

    k1 = log pi - log ref (unbiased; as a loss its expected gradient is zero), k2 = k1^2 / 2 (biased,
    low variance, right gradient), k3 = exp(-k1) - 1 + k1 (unbiased, never negative).
    """
    k1 = logprobs - ref_logprobs
    match kind:
        case "k1":
            return k1
        case "k2":
            return k1.square() / 2
        case "k3":
            return torch.expm1(-k1) + k1
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}")


@dataclass(frozen=True)
class Losses:
    """Un-normalised sums over a micro-batch, 0-dimensional; `total` carries the gradient."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    num_clipped: Tensor  # tokens


def losses(
    algorithm: AlgorithmSection,
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
) -> Losses:
    """The loss of one micro-batch, to be divided by `denominator` when the step ends.

    With tis_cap > 0 tokens are weighted by min(pi_old / pi_rollout, cap), which corrects for an engine
    that samples from slightly other probabilities (truncated importance sampling, Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training").
    """
    recipe, norm = ALGORITHM[algorithm.name], loss_norm(algorithm)
    clip = Clip(algorithm.clip_low, algorithm.clip_high)
    loss, clipped = recipe.policy_loss(logprobs, old_logprobs, advantages, mask, clip)
    # pi_old is the whole softmax at the sampling temperature, pi_rollout what the engine drew from. With
    # top_p < 1 or top_k > 0 that is a renormalised part of it: even where trainer and engine agree the
    # weight of a token is not 1 but the mass that was kept at its position, and no weight makes up for
    # the tokens that can never be drawn. The weighted gradient is biased then.
    if algorithm.tis_cap > 0:
        loss = loss * (old_logprobs - rollout_logprobs).exp().clamp(max=algorithm.tis_cap).detach()
    policy = _sum(loss, mask, norm)
    divergence = policy.new_zeros(())
    total = policy
    if ref_logprobs is not None:
        divergence = _sum(kl(algorithm.kl_type, logprobs, ref_logprobs), mask, norm)
        total = policy + algorithm.kl_coef * divergence
    return Losses(total, policy.detach(), divergence.detach(), (clipped * mask).sum())


def loss_norm(algorithm: AlgorithmSection) -> LossNorm:
    return algorithm.loss_norm or ALGORITHM[algorithm.name].norm


def denominator(
    algorithm: AlgorithmSection, num_responses: int, num_tokens: int, max_response_length: int
) -> float:
    """What the sums of a whole step are divided by; totals over all trained responses of all ranks.

    token: every token weighs the same. sequence: every response, whatever its length. constant: the
    sum over tokens, over responses times a constant, so that no weight depends on any length.
    """
    match loss_norm(algorithm):
        case "token":
            return max(1, num_tokens)
        case "sequence":
            return max(1, num_responses)
        case "constant":
            return max(1, num_responses) * (algorithm.loss_constant or max_response_length)


def advantage_scale(algorithm: AlgorithmSection, sum_squares: float, num_responses: int) -> float:
    """What all advantages of a step are multiplied by when it ends; 1 except for REINFORCE++.

    There 1 / std over the batch (arXiv 2501.03262): advantages have mean zero in every group, so the
    variance is `sum_squares` (over all responses, those without signal add nothing) / num_responses.
    """
    if algorithm.name != "reinforce++" or sum_squares == 0.0:
        return 1.0
    return 1.0 / (math.sqrt(sum_squares / max(1, num_responses)) + 1e-8)


def needs_whole_step(algorithm: AlgorithmSection) -> bool:
    """Whether gradients must wait for the step's end: `advantage_scale` must not scale the KL term too."""
    return algorithm.name == "reinforce++" and algorithm.kl_coef > 0


def _sum(values: Tensor, mask: Tensor, norm: LossNorm) -> Tensor:
    per_row = (values * mask).sum(1)
    if norm == "sequence":
        per_row = per_row / mask.sum(1).clamp(min=1)
    return per_row.sum()
