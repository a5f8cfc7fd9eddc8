"""The figures of a step, from the sums of its updates.

Owns what a step of several mini-batches reports: means over all trained tokens of the step, and
means over its updates of what each of them divides by its own counts. Knows no tensors.
"""

from collections.abc import Mapping

# Sums over the micro-batches of an update, on all ranks.
SUMS: tuple[str, ...] = (
    "policy",
    "kl",
    "entropy",
    "clipped",
    "weights",
    "truncated",
    "gap",
    "compared",
    "mismatch_kl",
    "tokens",
    "responses",
)


class StepFigures:
    def __init__(self) -> None:
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._losses = {"loss/policy": 0.0, "loss/kl": 0.0}  # of all updates, normalised
        self._max_gap = self._max_weight = 0.0
        self._num_tokens = 0
        self._num_counted = 0  # mini-batches that had groups
        self._norms: list[float] = []  # of gradients, one for each update
        self._num_skipped = 0

    def add(
        self,
        totals: Mapping[str, float],
        maxima: tuple[float, float],
        scale: float,
        num_responses: int,
        num_tokens: int,
    ) -> None:
        """A mini-batch has ended. `maxima`: logprob difference, importance weight. `scale`: what
        its sums are multiplied by; responses and tokens are those it has, with a signal or
        without."""
        for name in SUMS:
            self._sums[name] += totals[name]
        self._max_gap = max(self._max_gap, maxima[0])
        self._max_weight = max(self._max_weight, maxima[1])
        self._losses["loss/policy"] += totals["policy"] * scale
        self._losses["loss/kl"] += totals["kl"] * scale
        self._num_tokens += num_tokens
        self._num_counted += num_responses > 0

    def add_update(self, grad_norm: float, is_skipped: bool) -> None:
        """It had something to learn from. `grad_norm`: before clipping."""
        self._norms.append(grad_norm)
        self._num_skipped += is_skipped

    def metrics(self, lr: float, has_weights: bool) -> dict[str, float]:
        """`has_weights`: importance weights are on."""
        sums, tokens = self._sums, max(1.0, self._sums["tokens"])
        compared, every = max(1.0, sums["compared"]), max(1, self._num_counted)
        metrics = {name: value / every for name, value in self._losses.items()}
        metrics |= {
            "entropy": sums["entropy"] / tokens,
            "clip_frac": sums["clipped"] / tokens,
            "grad_norm": sum(self._norms) / max(1, len(self._norms)),
            "lr": lr,
            "train_rollout_logprob_abs_diff": sums["gap"] / compared,
            "train_rollout_logprob_abs_diff_max": self._max_gap,
            "mismatch_kl/mean": sums["mismatch_kl"] / compared,
            "train/skipped_nonfinite": float(self._num_skipped),
            "train/updates": float(len(self._norms) - self._num_skipped),
            "num_tokens": float(self._num_tokens),
            "num_trained_tokens": sums["tokens"],
        }
        if has_weights:
            metrics["tis/mean"] = sums["weights"] / tokens
            metrics["tis/max"] = self._max_weight
            metrics["tis/truncated_share"] = sums["truncated"] / tokens
        return metrics
