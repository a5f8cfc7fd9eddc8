"""Losses per token, one small function for each algorithm, and how a step's loss is normalised.

Owns formulas on tensors; knows no model and no process group. All sums are un-normalised: gradients
are accumulated while a round still runs, and only its end knows the denominator. Notation: logprobs
and masks are float32 [rows, width], one column per response token, advantages [rows, 1]; mask is 1
at response tokens and 0 at padding.

`old_logprobs` are those of the policy before the update. With one update per step they equal the
current ones: ratios are exactly 1 and nothing is clipped. The ratios stay in the formulas because
they carry the gradient. Tokens may have been sampled by an older policy, also by several in one
response: `rollout_logprobs` are theirs, and pi_old / pi_rollout is what `tis_cap` is about.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.config_sections import AlgorithmSection, LossNorm


@dataclass(frozen=True)
class Clip:
    """Ratios are held to [1 - low, 1 + high]."""

    low: float
    high: float

    def apply(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.low, 1 + self.high)

    def pessimistic(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """-min(ratio A, clip(ratio) A), and where it takes the clipped branch, so that no gradient
        flows."""
        loss = -torch.minimum(ratio * advantages, self.apply(ratio) * advantages)
        above = (ratio > 1 + self.high) & (advantages > 0)
        return loss, above | ((ratio < 1 - self.low) & (advantages < 0))


def token_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """pi / pi_other of each token."""
    return (logprobs - others).exp()


def sequence_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """(pi(y) / pi_other(y))^(1/|y|), the same for all tokens of a response: the mean of the tokens'
    ratios in logarithms (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7)."""
    length = mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = ((logprobs - others) * mask).sum(1, keepdim=True) / length
    return log_ratio.exp().expand_as(logprobs)


# (logprobs, old_logprobs, advantages, mask, clip) -> (loss per token, where clipped)
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor]]


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), r = pi / pi_old per token. PPO (Schulman et al. 2017, arXiv 1707.06347,
    eq. 7).

    GRPO, Dr. GRPO and RLOO use it as it is; DAPO with clip_high > clip_low ("clip-higher", 0.28 and
    0.2 in arXiv 2503.14476).
    """
    return clip.pessimistic(token_ratio(logprobs, old_logprobs, mask), advantages)


def sequence_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-min(s A, clip(s) A), s the `sequence_ratio`.

    GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5); its ranges are far narrower (3e-4, 4e-4).
    """
    return clip.pessimistic(sequence_ratio(logprobs, old_logprobs, mask), advantages)


def clipped_weight(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """-sg(clip(r)) A log pi: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the paper leaves the lower side open).
    """
    ratio = token_ratio(logprobs, old_logprobs, mask).detach()
    weight = clip.apply(ratio)
    return -weight * advantages * logprobs, weight != ratio


@dataclass(frozen=True)
class Recipe:
    """The loss of an algorithm, the normalisation its paper prescribes, and the unit of its
    ratios."""

    policy_loss: PolicyLoss
    norm: LossNorm
    ratio: Callable[[Tensor, Tensor, Tensor], Tensor] = token_ratio


ALGORITHM: dict[str, Recipe] = {
    "grpo": Recipe(ppo_clip, "sequence"),
    "dr_grpo": Recipe(ppo_clip, "constant"),
    "dapo": Recipe(ppo_clip, "token"),
    "gspo": Recipe(sequence_clip, "sequence", sequence_ratio),
    "cispo": Recipe(clipped_weight, "token"),
    "rloo": Recipe(ppo_clip, "constant"),  # its gradient sums over the tokens of a response
    "reinforce++": Recipe(ppo_clip, "token"),
}


def kl(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimates of KL(pi || ref) per token, for samples from pi (Schulman, "Approximating KL
    divergence").

    k1 = log pi - log ref (unbiased; as a loss its expected gradient is zero), k2 = k1^2 / 2
    (biased, low variance, right gradient), k3 = exp(-k1) - 1 + k1 (unbiased, never negative).
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
class Weights:
    """Importance weights of a micro-batch, [rows, width], constants for the gradient."""

    # float32; 1 where importance sampling is off
    values: Tensor
    # bool: the cap holds them
    truncated: Tensor


def importance_weights(
    algorithm: AlgorithmSection, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> Weights:
    """min(pi_old / pi_rollout, tis_cap): truncated importance sampling, off with tis_cap 0.

    It corrects for tokens that were drawn from other probabilities than the policy's: those of an
    engine that computes slightly differently (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training") and those of older policy versions (AReaL, Fu et
    al. 2025, arXiv 2505.24298, where the weight has no cap). Per token, or per response where the
    algorithm's ratios are: for GSPO, weights per token would be their mean on all tokens at once.
    What came before a token is taken as it came, since ratios of whole prefixes would vary too much
    to be of use: the gradient is exact for responses of one token, and an approximation beyond.
    """
    if algorithm.tis_cap == 0:
        return Weights(torch.ones_like(mask), torch.zeros_like(mask, dtype=torch.bool))
    ratio = ALGORITHM[algorithm.name].ratio(old_logprobs, rollout_logprobs, mask).detach()
    # pi_old is the whole softmax at the sampling temperature, pi_rollout what the engine drew from.
    # With top_p < 1 or top_k > 0 that is a renormalised part of it: even where trainer and engine
    # agree the weight of a token is not 1 but the mass that was kept at its position, and no weight
    # makes up for the tokens that can never be drawn. The weighted gradient is biased then.
    return Weights(ratio.clamp(max=algorithm.tis_cap), ratio > algorithm.tis_cap)


@dataclass(frozen=True)
class Losses:
    """Un-normalised sums over a micro-batch, 0-dimensional; `total` carries the gradient."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    # tokens
    num_clipped: Tensor
    # sum of the tokens' importance weights
    weights: Tensor
    max_weight: Tensor
    # tokens
    num_truncated: Tensor


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

    The `importance_weights` multiply the KL term too: its estimates are for samples from the
    policy.
    """
    recipe, norm = ALGORITHM[algorithm.name], loss_norm(algorithm)
    clip = Clip(algorithm.clip_low, algorithm.clip_high)
    weights = importance_weights(algorithm, old_logprobs, rollout_logprobs, mask)
    loss, clipped = recipe.policy_loss(logprobs, old_logprobs, advantages, mask, clip)
    policy = _sum(loss * weights.values, mask, norm)
    divergence = policy.new_zeros(())
    total = policy
    if ref_logprobs is not None:
        estimate = kl(algorithm.kl_type, logprobs, ref_logprobs)
        divergence = _sum(estimate * weights.values, mask, norm)
        total = policy + algorithm.kl_coef * divergence
    held = weights.values * mask
    return Losses(
        total,
        policy.detach(),
        divergence.detach(),
        (clipped * mask).sum(),
        held.sum(),
        held.max(),
        (weights.truncated * mask).sum(),
    )


def loss_norm(algorithm: AlgorithmSection) -> LossNorm:
    chosen = algorithm.loss_norm or ALGORITHM[algorithm.name].norm
    return "constant" if isinstance(chosen, int) else chosen


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
            chosen = algorithm.loss_norm
            return max(1, num_responses) * (
                chosen if isinstance(chosen, int) else max_response_length
            )


def advantage_scale(algorithm: AlgorithmSection, sum_squares: float, num_responses: int) -> float:
    """What all advantages of a step are multiplied by when it ends; 1 except for REINFORCE++.

    There 1 / std over the batch (arXiv 2501.03262): advantages have mean zero in every group, so
    the variance is `sum_squares` (over all responses, those without signal add nothing) /
    num_responses.
    """
    if algorithm.name != "reinforce++" or sum_squares == 0.0:
        return 1.0
    return 1.0 / (math.sqrt(sum_squares / max(1, num_responses)) + 1e-8)


def needs_whole_step(algorithm: AlgorithmSection) -> bool:
    """Whether gradients must wait for the step's end: `advantage_scale` must not scale the KL term
    too."""
    return algorithm.name == "reinforce++" and algorithm.kl_coef > 0


def _sum(values: Tensor, mask: Tensor, norm: LossNorm) -> Tensor:
    per_row = (values * mask).sum(1)
    if norm == "sequence":
        per_row = per_row / mask.sum(1).clamp(min=1)
    return per_row.sum()
