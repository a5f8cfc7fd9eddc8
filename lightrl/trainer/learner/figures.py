"""The figures of a step, from the sums of its updates: means over all trained tokens of the step,
and means over its updates of values that are normalised by update.
"""

import math
from collections.abc import Mapping

# Sums over the micro-batches of an update, on all ranks.
SUMS: tuple[str, ...] = (
    "policy",
    "kl",
    "kl_of_tokens",
    "entropy",
    "ratios",
    "clipped_low",
    "clipped_high",
    "clipped_dual",
    "weights",
    "squared_weights",
    "truncated",
    "gap",
    "compared",
    "mismatch_kl",
    # of all trained tokens, whatever version sampled them
    "prob_gap",
    "squared_prob_gap",
    "mismatch_kl_of_all",
    "compared_of_all",
    "tokens",
    "responses",
    "advantages",
    "squared_advantages",
    "read",
    "padded",
)

# Maxima over the micro-batches of an update, on all ranks; a minimum is that of negative values.
MAXIMA: tuple[str, ...] = (
    "gap",
    "mismatch_kl",
    "prob_gap",
    "weight",
    "negative_weight",
    "ratio",
    "negative_ratio",
    "advantage",
    "negative_advantage",
)


class StepFigures:
    def __init__(self) -> None:
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._losses = {"loss/policy": 0.0, "loss/kl": 0.0}  # of all updates, normalised
        self._maxima = dict.fromkeys(MAXIMA, -math.inf)
        self._num_responses = 0
        self._num_tokens = 0
        self._num_counted = 0  # mini-batches that had groups
        self._norms: list[float] = []  # of gradients, one for each update
        self._updates: list[dict[str, float]] = []  # figures of each mini-batch that had groups
        self._num_skipped = 0

    def add(
        self,
        totals: Mapping[str, float],
        maxima: Mapping[str, float],
        scale: float,
        num_responses: int,
        num_tokens: int,
    ) -> None:
        """Add a mini-batch. `scale`: by which its sums are multiplied; responses and tokens include
        those without a signal."""
        for name in SUMS:
            self._sums[name] += totals[name]
        for name in MAXIMA:
            self._maxima[name] = max(self._maxima[name], maxima[name])
        self._num_responses += num_responses
        self._losses["loss/policy"] += totals["policy"] * scale
        self._losses["loss/kl"] += totals["kl"] * scale
        self._num_tokens += num_tokens
        self._num_counted += num_responses > 0
        if num_responses or totals["responses"]:
            clipped = totals["clipped_low"] + totals["clipped_high"]
            length, share = num_tokens / max(1, num_responses), clipped / max(1, num_tokens)
            self._updates.append({"response_length": length, "clip_frac": share})

    def add_update(self, grad_norm: float, is_skipped: bool) -> None:
        """Add its optimizer step. `grad_norm`: before clipping."""
        self._norms.append(grad_norm)
        self._updates[-1]["grad_norm"] = grad_norm
        self._num_skipped += is_skipped

    def metrics(self, lr: float, has_weights: bool, has_reference: bool) -> dict[str, float]:
        """`has_weights`: importance weights are on; `has_reference`: there is a KL term."""
        sums, tokens = self._sums, max(1.0, self._sums["tokens"])
        compared, every = max(1.0, sums["compared"]), max(1, self._num_counted)
        every_compared = max(1.0, sums["compared_of_all"])
        in_step = max(1, self._num_tokens)  # those without a signal are not clipped
        metrics = {name: value / every for name, value in self._losses.items()}
        metrics |= {
            "kl/ref": sums["kl_of_tokens"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "ratio/mean": sums["ratios"] / tokens if sums["tokens"] else 1.0,
            "ratio/min": -self._largest("negative_ratio", -1.0),
            "ratio/max": self._largest("ratio", 1.0),
            "clip_frac": (sums["clipped_low"] + sums["clipped_high"]) / in_step,
            "clip_frac/low": sums["clipped_low"] / in_step,
            "clip_frac/high": sums["clipped_high"] / in_step,
            "clip_frac/dual": sums["clipped_dual"] / in_step,
            **self._advantages(),
            "grad_norm": sum(self._norms) / max(1, len(self._norms)),
            "lr": lr,
            "train_rollout_logprob_abs_diff": sums["gap"] / compared,
            "train_rollout_logprob_abs_diff_max": self._largest("gap", 0.0),
            "mismatch_kl/mean": sums["mismatch_kl"] / compared,
            "mismatch_kl/max": self._largest("mismatch_kl", 0.0),
            "mismatch_kl/all": sums["mismatch_kl_of_all"] / every_compared,
            # |pi_old - pi_rollout| of sampled tokens, as verl's `calculate_debug_metrics`
            "train_rollout_prob_abs_diff": (gap := sums["prob_gap"] / every_compared),
            "train_rollout_prob_abs_diff_max": self._largest("prob_gap", 0.0),
            "train_rollout_prob_abs_diff_std": math.sqrt(
                max(0.0, sums["squared_prob_gap"] - every_compared * gap**2)
                / max(1.0, every_compared - 1)
            ),
            "train/skipped_nonfinite": float(self._num_skipped),
            "train/updates": float(len(self._norms) - self._num_skipped),
            "num_tokens": float(self._num_tokens),
            "num_trained_tokens": sums["tokens"],
            "perf/padding_share": sums["padded"] / max(1.0, sums["padded"] + sums["read"]),
        }
        if len(self._updates) > 1:
            metrics |= {
                f"update/{k}/{name}": value
                for k, figures in enumerate(self._updates, 1)
                for name, value in figures.items()
            }
        if not has_reference:
            del metrics["kl/ref"]
        if has_weights:
            metrics["tis/mean"] = sums["weights"] / tokens
            metrics["tis/min"] = -self._largest("negative_weight", 0.0)
            metrics["tis/max"] = self._largest("weight", 0.0)
            metrics["tis/truncated_share"] = sums["truncated"] / tokens
            squares = sums["squared_weights"] * tokens  # Kish's effective sample size, as a share
            metrics["tis/ess"] = sums["weights"] ** 2 / squares if squares else 0.0
        return metrics

    def _largest(self, name: str, without: float) -> float:
        """`without`: if nothing was trained."""
        return self._maxima[name] if math.isfinite(self._maxima[name]) else without

    def _advantages(self) -> dict[str, float]:
        """Over all responses; those that were not computed have 0."""
        sums, number = self._sums, max(1, self._num_responses)
        mean = sums["advantages"] / number
        lowest, highest = -self._largest("negative_advantage", 0.0), self._largest("advantage", 0.0)
        if sums["responses"] < self._num_responses:
            lowest, highest = min(lowest, 0.0), max(highest, 0.0)
        return {
            "advantage/mean": mean,
            "advantage/std": math.sqrt(max(0.0, sums["squared_advantages"] / number - mean**2)),
            "advantage/min": lowest,
            "advantage/max": highest,
        }
