"""Losses per token, one small function for each algorithm, and how a step's loss is normalised.

Owns formulas on tensors; knows no model and no process group. All sums are un-normalised: gradients
are accumulated while a round still runs, and only its end knows the denominator. Notation: logprobs
and masks are float32 [rows, width], one column per response token, advantages [rows, 1]; mask is 1
at tokens that are trained, 0 at all others and at padding. What lies where it is 0 never counts,
whatever it is.

`old_logprobs` are those of the policy before the step, or of the engines. At the first update of
a step the former equal the current ones: ratios are exactly 1 and nothing is clipped. The ratios
stay in the formulas because they carry the gradient. Tokens may have been sampled by an older
policy, also by several in one response: `rollout_logprobs` are theirs, and pi_old / pi_rollout is
what `tis_bounds` is about.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.config.algorithm import AlgorithmSection, LossNorm


@dataclass(frozen=True)
class Clip:
    """Ratios are held to [1 - low, 1 + high]; low inf = open below. `dual`: of a negative
    advantage A the loss is at most dual * |A|; None = no such limit."""

    low: float
    high: float
    dual: float | None = None

    def apply(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.low, 1 + self.high)


def log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """log (pi / pi_other) of each token, and 0 where nothing is trained: an exponential of what is
    there may overflow, and infinity times 0 is no number."""
    return torch.where(mask > 0, logprobs - others, 0.0)


LARGEST_LOG_RATIO = 20.0  # far beyond what any clip or bound lets through


def _held(log: Tensor) -> Tensor:
    """Within +-20, so that its exponential is finite; beyond that it has no gradient."""
    return log.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def token_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """pi / pi_other of each token."""
    return _held(log_ratio(logprobs, others, mask)).exp()


def mean_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """(pi(y) / pi_other(y))^(1/|y|), the same for all tokens of a response: the mean of the tokens'
    ratios in logarithms (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7)."""
    length = mask.sum(1, keepdim=True).clamp(min=1)
    total = log_ratio(logprobs, others, mask).sum(1, keepdim=True)
    return _held(total / length).exp().expand_as(logprobs)


def response_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """pi(y) / pi_other(y), the same for all tokens of a response: the product of their ratios."""
    total = log_ratio(logprobs, others, mask).sum(1, keepdim=True)
    return _held(total).exp().expand_as(logprobs)


# (logprobs, their ratios to the old ones, advantages, clip) -> (loss per token, where the ratio is
# clipped from below, where from above, where the loss by `Clip.dual`)
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor, Tensor, Tensor]]


def clipped_ratio(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-min(r A, clip(r) A). No gradient flows where that takes the clipped branch. PPO (Schulman et
    al. 2017, arXiv 1707.06347, eq. 7).

    DAPO with clip_high > clip_low ("clip-higher", 0.28 and 0.2 in arXiv 2503.14476), GSPO and RLOO
    with ratios of whole responses.

    With `clip.dual` = c, for A < 0: -max(min(r A, clip(r) A), c A), again without a gradient where
    the limit is taken. Dual-clip PPO (Ye et al. 2020, arXiv 1912.09729, eq. 5; c = 3 there, and in
    verl's `clip_ratio_c`).
    """
    loss = -torch.minimum(ratio * advantages, clip.apply(ratio) * advantages)
    below = (ratio < 1 - clip.low) & (advantages < 0)
    limit = -(clip.dual or math.inf) * advantages  # NaN where A is 0, which nothing is above
    beyond = (advantages < 0) & (loss > limit)
    loss = torch.where(beyond, limit, loss)
    return loss, below, (ratio > 1 + clip.high) & (advantages > 0), beyond


def clipped_weight(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-sg(clip(r)) A log pi: the weight is clipped, no token loses its gradient, and `clip.dual`
    has nothing to limit.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the paper leaves the lower side open).
    """
    ratio = ratio.detach()
    weight = clip.apply(ratio)
    below, above = ratio < weight, ratio > weight
    return -weight * advantages * logprobs, below, above, torch.zeros_like(below)


@dataclass(frozen=True)
class Recipe:
    """The loss of an algorithm, the normalisation its paper prescribes, and the unit of its
    ratios."""

    policy_loss: PolicyLoss
    norm: LossNorm
    ratio: Callable[[Tensor, Tensor, Tensor], Tensor] = token_ratio


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(clipped_ratio, "sequence"),
    "dr_grpo": Recipe(clipped_ratio, "constant"),
    "dapo": Recipe(clipped_ratio, "token"),
    # Its ranges are far narrower (eq. 5).
    "gspo": Recipe(clipped_ratio, "sequence", mean_ratio),
    "cispo": Recipe(clipped_weight, "token"),
    # The response is one action (arXiv 2402.14740, section 3): the mean over its tokens, which all
    # carry its ratio, is its loss.
    "rloo": Recipe(clipped_ratio, "sequence", response_ratio),
    "reinforce++": Recipe(clipped_ratio, "token"),
    "reinforce++-baseline": Recipe(clipped_ratio, "token"),
}
UNIT = {"token": token_ratio, "sequence": response_ratio}  # of `tis_level`


def kl(kind: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimates of KL(pi || ref) per token, for samples from pi (Schulman, "Approximating KL
    divergence").

    k1 = log pi - log ref (unbiased), k2 = k1^2 / 2 (biased, low variance, right gradient), k3 =
    exp(-k1) - 1 + k1 (unbiased, never negative; of k1 within +-20, as in verl's `low_var_kl`). The
    gradient of k1 itself is zero on average: it has that of k2.
    """
    k1 = log_ratio(logprobs, ref_logprobs, mask)
    k2 = k1.square() / 2
    match kind:
        case "k1":
            return k2 + (k1 - k2).detach()
        case "k2":
            return k2
        case "k3":
            k1 = _held(k1)
            return torch.expm1(-k1) + k1
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}")


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights of a micro-batch, [rows, width], constants for the gradient."""

    # float32; 1 where importance sampling is off
    values: Tensor
    # bool: outside the bounds
    truncated: Tensor


def importance_weights(
    algorithm: AlgorithmSection, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> ImportanceWeights:
    """pi_old / pi_rollout, held to `tis_bounds`: truncated importance sampling; 1 where that is
    off. With `tis_mode` mask the weight is 0 outside the bounds.

    It corrects for tokens that were drawn from other probabilities than the policy's: those of an
    engine that computes slightly differently (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training") and those of older policy versions (AReaL, Fu et
    al. 2025, arXiv 2505.24298, where the weight has no bounds). `tis_level` token takes what came
    before a token as it came: the gradient is exact for responses of one token, and an
    approximation beyond. `tis_level` sequence is exact for every length, but its variance grows
    with the length: log ratios of standard deviation 0.0144 a token leave an effective sample size
    of 19 % over 8,000 tokens.
    """
    bounds = algorithm.tis_bounds
    if not isinstance(bounds, tuple):
        return ImportanceWeights(torch.ones_like(mask), torch.zeros_like(mask, dtype=torch.bool))
    ratio = UNIT[algorithm.tis_level](old_logprobs, rollout_logprobs, mask).detach()
    # Both are of the whole softmax at the sampling temperature, also with top_p < 1 or top_k > 0.
    # Divided by the mass that the engine kept, which counts as a constant, both would be of the
    # part that was drawn from: the ratio is the same.
    held = ratio.clamp(*bounds)
    beyond = held != ratio
    return ImportanceWeights(held * ~beyond if algorithm.tis_mode == "mask" else held, beyond)


@dataclass(frozen=True)
class Losses:
    """Un-normalised sums over a micro-batch, 0-dimensional; `total` carries the gradient."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    # the estimates of tokens, neither weighted nor divided by lengths
    kl_of_tokens: Tensor
    # of tokens, and of those the smallest and the largest; 1 where nothing is trained
    ratios: Tensor
    min_ratio: Tensor
    max_ratio: Tensor
    # tokens
    num_clipped_low: Tensor
    num_clipped_high: Tensor
    num_clipped_dual: Tensor
    # sums of the tokens' importance weights and of their squares; of those weights the smallest and
    # the largest, inf and 0 where nothing is trained
    weights: Tensor
    squared_weights: Tensor
    min_weight: Tensor
    max_weight: Tensor
    # tokens
    num_truncated: Tensor

    @property
    def num_clipped(self) -> Tensor:
        return self.num_clipped_low + self.num_clipped_high


def losses(
    algorithm: AlgorithmSection,
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor | None = None,
) -> Losses:
    """The loss of one micro-batch, to be divided by `denominator` when the step ends.

    The `importance_weights` multiply the KL term too: its estimates are for samples from the
    policy. The `entropy` of a position is exact, whatever was sampled there; it is needed where
    there is a bonus for it, and normalised like the loss.
    """
    recipe, norm = RECIPES[algorithm.name], loss_norm(algorithm)
    weights = importance_weights(algorithm, old_logprobs, rollout_logprobs, mask)
    ratio = recipe.ratio(logprobs, old_logprobs, mask)
    clip = Clip(*algorithm.clip, algorithm.clip_dual)
    loss, low, high, dual = recipe.policy_loss(logprobs, ratio, advantages, clip)
    policy = _sum(loss * weights.values, mask, norm)
    divergence = kl_of_tokens = policy.new_zeros(())
    total = policy
    if ref_logprobs is not None:
        estimate = kl(algorithm.kl_type, logprobs, ref_logprobs, mask)
        kl_of_tokens = (estimate.detach() * mask).sum()
        divergence = _sum(estimate * weights.values, mask, norm)
        total = policy + algorithm.kl_coef * divergence
    if entropy is not None:
        total = total - algorithm.entropy_coef * _sum(entropy, mask, norm)
    weight = weights.values * mask
    trained = torch.where(mask > 0, ratio.detach(), 1.0)
    return Losses(
        total,
        policy.detach(),
        divergence.detach(),
        kl_of_tokens,
        (trained * mask).sum(),
        trained.min(),
        trained.max(),
        (low * mask).sum(),
        (high * mask).sum(),
        (dual * mask).sum(),
        weight.sum(),
        weight.square().sum(),
        torch.where(mask > 0, weight, torch.inf).min(),
        weight.max(),
        (weights.truncated * mask).sum(),
    )


def loss_norm(algorithm: AlgorithmSection) -> LossNorm:
    chosen = algorithm.loss_norm or RECIPES[algorithm.name].norm
    return "constant" if isinstance(chosen, int) else chosen


def denominator(
    algorithm: AlgorithmSection, num_responses: int, num_tokens: float, max_response_length: int
) -> float:
    """What the sums of a whole step are divided by; totals over all trained responses of all ranks.

    token: every token weighs the same. With tail batching `num_tokens` is what these responses have
    by a running mean, see learner/token_mean.py. sequence: every response, whatever its length.
    constant: the sum over tokens, over responses times a constant, so that no weight depends on any
    length.
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


def _sum(values: Tensor, mask: Tensor, norm: LossNorm) -> Tensor:
    per_row = torch.where(mask > 0, values, 0.0).sum(1)
    if norm == "sequence":
        per_row = per_row / mask.sum(1).clamp(min=1)
    return per_row.sum()
