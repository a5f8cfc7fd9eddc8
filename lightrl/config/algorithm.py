"""The algorithm's section of a run's config, and the defaults of each algorithm.

The formulas are in trainer/algorithm/. Must stay importable without torch.
"""

from math import inf
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from lightrl.config.sections import Count, NotNegative, Positive, Section
from lightrl.config.values import weight_bounds

Algorithm = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "reinforce++-baseline"
]
Bounds = Annotated[Literal["off"] | tuple[float, float] | None, BeforeValidator(weight_bounds)]
LossNorm = Literal["token", "sequence", "constant"]

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
# Their advantages compare no group: one response for each prompt is enough.
UNGROUPED = frozenset({"reinforce++"})
# Their advantages are whitened over the tokens of a whole step.
WHITENED = frozenset({"reinforce++", "reinforce++-baseline"})
# How far ratios may leave 1, down and up, by default: as in the papers. The
# one of CISPO leaves the lower side open, and names no value for the upper one.
CLIP = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28), "cispo": (inf, 0.2)}
USUAL_CLIP = (0.2, 0.2)


class AlgorithmSection(Section):
    name: Algorithm = "grpo"
    """how advantages and losses are made"""
    clip_low: NotNegative | None = None
    """ratio is clipped below at 1 - clip_low; default: 0.2, gspo 0.0003, cispo open"""
    clip_high: NotNegative | None = None
    """ratio is clipped above at 1 + clip_high; default: 0.2, dapo 0.28, gspo 0.0004"""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """what ratios are to: the weights with which the step began (trainer), or what engines sampled
    from (rollout)"""
    kl_coef: NotNegative = 0.0
    """0 = no reference model is loaded"""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """estimator of the KL penalty"""
    loss_norm: LossNorm | Positive | None = None
    """what token losses are divided by: token, sequence, constant (rollout.max_response_length for
    each response) or a number of tokens for each response; default: what the algorithm prescribes
    """
    clip_dual: float | None = Field(default=None, gt=1)
    """where the advantage A is negative, the loss of a token is at most clip_dual * |A|, whatever
    its ratio (dual clip; 3 is usual); default: off"""
    tis_bounds: Bounds = None
    """[low, high] of the importance weights that correct for what engines sampled from, or "off"; a
    number is [0, number], 0 is off; default [0, 2], off if trainer and engines compute in float32,
    async.max_staleness = 0 and no deferred response is continued; also read as tis_cap"""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """a weight outside tis_bounds becomes the nearer bound (truncate), or 0 (mask)"""
    tis_level: Literal["token", "sequence"] = "token"
    """one weight for each token, or one for each response: the product of those of its tokens"""
    entropy_coef: NotNegative = 0.0
    """of a bonus for the entropy of each token's distribution"""
    mask_truncated: bool = False
    """responses cut at rollout.max_response_length are not trained; their rewards count in their
    group"""
    overlong_penalty: float = Field(default=1.0, ge=0, le=1e30)
    """what the whole overlong_buffer costs of the reward"""
    overlong_buffer: Count = 0
    """last tokens that cost reward (DAPO); 0 = off"""
    dynamic_sampling: bool = False
    """groups whose rewards are all equal are replaced by new prompts (DAPO)"""

    @property
    def clip(self) -> tuple[float, float]:
        """Return how far ratios may go below and above 1; inf below = no limit."""
        low, high = CLIP.get(self.name, USUAL_CLIP)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def is_whitened(self) -> bool:
        return self.name in WHITENED

    @property
    def trains_all(self) -> bool:
        """Return whether a response whose advantage is 0 has a gradient all the same."""
        return self.is_whitened or self.kl_coef > 0 or self.entropy_coef > 0
