"""Every name in metrics.jsonl: what it means, in which unit, and what verl and TRL call it.

Owns the words, none of the values. `lightrl config --metrics` prints it, and a test compares it
with what runs write. A name of verl's is given where its `compute_data_metrics`,
`calculate_debug_metrics`, `compute_offpolicy_metrics`, timers or losses (0.8, `loss_agg_mode`
token-mean) compute the same quantity. Where the meaning speaks of trained tokens, verl takes
responses without an advantage in, too, which are not computed here.
"""

from dataclasses import dataclass

from lightrl.metrics.display import aligned


@dataclass(frozen=True, slots=True)
class Metric:
    """A name or, with parts in <>, a family of them. Example: Metric("lr", "learning rate", "",
    "actor/lr", "learning_rate")"""

    name: str
    meaning: str
    unit: str = ""
    verl: str = ""
    trl: str = ""


_PROBS, _CLIP = "training/rollout_probs_diff_", "clip_ratio/"
_LOGP, _RATIO = "sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/"
_TOKENS, _S, _SHARE, _NATS = "tokens", "s", "share", "nats"

METRICS: tuple[Metric, ...] = (
    Metric("step", "steps done, each of train.mini_batches updates", "", "training/global_step"),
    Metric("epoch", "prompts drawn, divided by those of the data", "", "", "epoch"),
    Metric("policy_version", "of the weights after the step"),
    Metric("num_tokens_total", "prompts and responses trained so far", _TOKENS, "", "num_tokens"),
    # rewards
    Metric("reward/mean", "of trained responses, unpenalised", "", "critic/score/mean", "reward"),
    Metric("reward/scored", "mean of all scored responses of the round, trained or not"),
    Metric("data/<set>/reward", "mean of the trained responses to prompts of a data set"),
    Metric("data/<set>/reward_scored", "mean of all scored ones, trained or not"),
    Metric("reward/std", "of the trained responses", "", "", "reward_std"),
    Metric("reward/min", "of the trained responses", "", "critic/score/min"),
    Metric("reward/max", "of the trained responses", "", "critic/score/max"),
    Metric("reward/frac_zero_std", "groups without signal", _SHARE, "", "frac_reward_zero_std"),
    Metric("reward/failures", "responses without a score"),
    Metric("reward/timeouts", "of these, because the function took too long"),
    Metric("reward/score_s", "of one response, mean", _S),
    Metric(
        "reward/<name>",
        "mean of one function of several, or of a figure that a function returned",
        "",
        "",
        "rewards/<name>/mean",
    ),
    Metric("advantage/mean", "of responses, whatever their length"),
    Metric("advantage/std", "of responses"),
    Metric("advantage/min", "of responses", "", "critic/advantages/min"),
    Metric("advantage/max", "of responses", "", "critic/advantages/max"),
    # lengths
    Metric("prompt_length/mean", "of the trained groups", _TOKENS, "prompt_length/mean"),
    Metric("prompt_length/max", "of the trained groups", _TOKENS, "prompt_length/max"),
    Metric(
        "response_length/mean",
        "of the trained responses",
        _TOKENS,
        "response_length/mean",
        "completions/mean_length",
    ),
    Metric(
        "response_length/min",
        "of the trained responses",
        _TOKENS,
        "response_length/min",
        "completions/min_length",
    ),
    Metric(
        "response_length/max",
        "of the trained responses",
        _TOKENS,
        "response_length/max",
        "completions/max_length",
    ),
    Metric("response_length/std", "of the trained responses", _TOKENS),
    Metric(
        "response_length/terminated_mean",
        "of those that ended before the limit",
        _TOKENS,
        "",
        "completions/mean_terminated_length",
    ),
    Metric(
        "response_length/clip_ratio",
        "of the trained responses: cut at the limit (verl: also those that end there)",
        _SHARE,
        "response_length/clip_ratio",
        "completions/clipped_ratio",
    ),
    # the update
    Metric("loss/policy", "as it is normalised, mean over updates"),
    Metric("loss/kl", "KL term as it is normalised, importance weights in it, without kl_coef"),
    Metric("kl/ref", "to the reference, mean over response tokens", _NATS, "", "kl"),
    Metric("entropy", "mean over response tokens", _NATS, "actor/entropy", "entropy"),
    Metric("entropy/sampled", "minus the logprob of sampled tokens, all responses", _NATS),
    Metric("ratio/mean", "to the old policy, of trained tokens"),
    Metric("ratio/min", "to the old policy, of trained tokens"),
    Metric("ratio/max", "to the old policy, of trained tokens"),
    Metric(
        "clip_frac", "response tokens clipped", _SHARE, "actor/pg_clipfrac", f"{_CLIP}region_mean"
    ),
    Metric("clip_frac/low", "from below", _SHARE, "", f"{_CLIP}low_mean"),
    Metric("clip_frac/high", "from above", _SHARE, "", f"{_CLIP}high_mean"),
    Metric("clip_frac/dual", "by algorithm.clip_dual", _SHARE, "actor/pg_clipfrac_lower"),
    Metric("grad_norm", "before clipping, mean over updates", "", "actor/grad_norm", "grad_norm"),
    Metric("lr", "learning rate", "", "actor/lr", "learning_rate"),
    Metric("num_tokens", "response tokens of the step", _TOKENS),
    Metric("num_trained_tokens", "those with a gradient", _TOKENS),
    Metric("train/updates", "of the weights, in the step"),
    Metric(
        "train/tokens_per_response",
        "running mean by which tokens are normalised, with tail batching",
        _TOKENS,
    ),
    Metric(
        "update/<k>/response_length",
        "of the k-th update of a step of several: mean over its responses",
        _TOKENS,
    ),
    Metric("update/<k>/clip_frac", "likewise: response tokens clipped", _SHARE),
    Metric("update/<k>/grad_norm", "likewise: before clipping; none without a signal"),
    Metric("train/skipped_nonfinite", "updates left out, whose gradient was not finite"),
    # engine against trainer, over tokens of the newest version
    Metric(
        "train_rollout_logprob_abs_diff",
        "engine against trainer, mean over tokens that the newest version sampled",
        _NATS,
        trl=f"{_LOGP}mean",
    ),
    Metric("train_rollout_logprob_abs_diff_max", "the largest", _NATS, "", f"{_LOGP}max"),
    Metric(
        "train_rollout_prob_abs_diff", "of probabilities, all trained tokens", "", f"{_PROBS}mean"
    ),
    Metric("train_rollout_prob_abs_diff_max", "the largest", "", f"{_PROBS}max"),
    Metric("train_rollout_prob_abs_diff_std", "standard deviation, n - 1", "", f"{_PROBS}std"),
    Metric("mismatch_kl/mean", "engine to trainer, k3, over tokens of the newest version", _NATS),
    Metric("mismatch_kl/max", "the largest of a token", _NATS),
    Metric("mismatch_kl/all", "of all trained tokens, also older", _NATS, "rollout_corr/k3_kl"),
    Metric("tis/mean", "importance weight, in algorithm.tis_bounds", "", "", f"{_RATIO}mean"),
    Metric("tis/min", "the smallest", "", "", f"{_RATIO}min"),
    Metric("tis/max", "the largest", "", "", f"{_RATIO}max"),
    Metric("tis/truncated_share", "tokens whose weight was outside algorithm.tis_bounds", _SHARE),
    Metric("tis/ess", "effective sample size (sum w)^2 / (n sum w^2) of n tokens", _SHARE),
    Metric("off_policy/span", "versions in a response"),
    Metric("off_policy/span_max", "versions in a response"),
    Metric("off_policy/newest_gap", "trained version minus the newest of a response"),
    Metric("off_policy/newest_gap_max", "trained version minus the newest of a response"),
    Metric("off_policy/oldest_gap", "staleness: trained version minus the oldest of a response"),
    Metric("off_policy/oldest_gap_max", "staleness"),
    # rounds
    Metric("round/groups_trained", "in the step"),
    Metric("round/groups_dropped", "in its round"),
    Metric("round/groups_no_signal", "of those: all rewards equal"),
    Metric("round/groups_unscored", "of those: too few scores"),
    Metric("round/is_<kind>", "1 if the round was short, long or flush"),
    Metric("tail/deferred_staleness", "trained version minus the oldest of a continued response"),
    Metric("tail/deferred_staleness_max", "the largest"),
    Metric(
        "tail/restart_same_share", "restarts that repeat all tokens of what was put off", _SHARE
    ),
    Metric("tail/restart_common_tokens", "of both, until the first that differs, mean", _TOKENS),
    Metric("tail/restart_shorter_share", "restarts that ended before they came as far", _SHARE),
    Metric("tail_run/length_bias", "length trained over that of first attempts, minus 1", _SHARE),
    Metric("tail_run/length_bias_se", "its standard error", _SHARE),
    Metric("tail_run/length_bias_up_to", "longer responses count as so long", _TOKENS),
    Metric("tail/<name>", "racing, of the round: see lightrl/core/README.md"),
    Metric("tail_run/<name>", "racing, of the run so far"),
    Metric("foresight/coverage", "responses whose length was predicted", _SHARE),
    Metric("foresight/mean_abs_error_tokens", "of predicted lengths", _TOKENS),
    Metric("foresight/rank_correlation", "of predicted and real lengths"),
    Metric("migration/moves", "responses that moved to another node"),
    # speculation
    Metric("speculation/drafted", "tokens", _TOKENS),
    Metric("speculation/acceptance", "drafted tokens that were sampled", _SHARE),
    Metric("speculation/draft_share", "sampled tokens that were drafted", _SHARE),
    Metric("speculation/forwards", "forward passes of engines"),
    Metric("speculation/tokens_per_forward", "of a response"),
    Metric("speculation/<name>", "see lightrl/history/README.md"),
    Metric("history/<name>", "the store of earlier responses"),
    # weights
    Metric("weights/bytes", "moved to nodes since the last step", "bytes"),
    Metric("weights/full_bytes", "the same had each got all of it", "bytes"),
    Metric("weights/from_peers", "of these from other rollout nodes", "bytes"),
    Metric("weights/publish_s", "to write a version", _S),
    Metric("weights/pull_s", "of the slowest", _S),
    Metric("weights/pause_s", "an engine standing still, the slowest", _S),
    Metric("weights/broadcast_nodes", "that got it by broadcast"),
    Metric("weights/broadcast_s", "of the slowest, proof included", _S),
    Metric("weights/delta_ratio", "bytes of deltas against the whole", _SHARE),
    Metric("weights/canary", "largest difference of a logprob to the trainer's", _NATS),
    Metric("weights/<name>", "see lightrl/weights/README.md"),
    # where time and devices go
    Metric("timing_s/step", "rollout + train_after_rollout + weights", _S, "timing_s/step"),
    Metric("timing_s/rollout", "until the round closed, scores included", _S),
    Metric("timing_s/train_after_rollout", "training not hidden behind it", _S),
    Metric("timing_s/weights", "until a node served the new version", _S),
    Metric("timing_s/data", "waiting for prompts that were not ready", _S),
    Metric("timing_s/forward_backward", "passes of the ranks", _S),
    Metric("timing_s/reference", "of these, the reference's", _S, "timing_s/ref"),
    Metric("timing_s/optimizer", "updates", _S),
    Metric("timing_s/publish", "writing the version", _S),
    Metric("timing_s/accumulate", "any rank at gradients, by the trainer's daemon", _S),
    Metric("timing_s/finish", "from the last gradient until the version is announced", _S),
    Metric("timing_s/stage", "standing still for a checkpoint", _S, "timing_s/save_checkpoint"),
    Metric("timing_s/park", "giving shared devices back", _S),
    Metric("timing_s/fetch", "taking shared devices", _S),
    Metric("timing_s/<name>", "see lightrl/trainer/README.md", _S),
    Metric("perf/rollout_tokens_per_s", "sampled in the round", "tokens/s"),
    Metric(
        "perf/tokens_per_gpu_s",
        "trained, prompts included, by the step's seconds and all devices",
        "tokens/s",
        "perf/throughput",
    ),
    Metric("perf/mfu", "of forward and backward passes, on known GPUs", _SHARE),
    Metric("perf/peak_memory_gib", "allocated by torch in the step, on the fullest GPU", "GiB"),
    Metric("perf/host_memory_gib", "resident, all ranks together", "GiB"),
    Metric("perf/padding_share", "of the tokens that ranks computed", _SHARE),
    Metric("perf/micro_batches", "of the rank with the most"),
    Metric("offload/<name>", "devices that sample and train: see lightrl/core/README.md"),
    Metric("planner/<name>", "of engines of several sizes: parallel, preemptions, switches, ..."),
    Metric("device_s/<node>/<state>", "what shared devices did; sums to the step", _S),
    Metric("cost/usd", "of the run so far, by prices", "US$"),
    Metric("cost/usd_per_step", "of the run so far", "US$"),
    Metric("cost/usd_per_million_tokens", "sampled and not given up", "US$"),
    # evaluations
    Metric(
        "eval/<set>/avg@<k>",
        "mean reward of k responses to each prompt; one without a score counts as 0",
        "",
        "val-core/<source>/reward/mean@<k>",
        "eval_reward",
    ),
    Metric(
        "eval/<set>/pass@<k>",
        "one of k responses is correct, its reward 1 or more; k: 1, 2, 4 ... samples; unbiased",
        _SHARE,
    ),
    Metric("eval/<set>/length", "of responses, mean", _TOKENS, "", "eval_completions/mean_length"),
    Metric(
        "eval/<set>/clip_ratio",
        "responses cut at the set's limit",
        _SHARE,
        "",
        "eval_completions/clipped_ratio",
    ),
    Metric("eval/<set>/failures", "responses without a score"),
    Metric("eval/seconds", "of an evaluation, all sets", _S, "timing_s/testing", "eval_runtime"),
    Metric(
        "eval/<set>/<source>/avg@<k>",
        "the same where a set has several `data_source`s",
        "",
        "val-core/<source>/reward/mean@<k>",
    ),
    Metric("eval/<set>/<source>/pass@<k>", "likewise", _SHARE),
    Metric("eval/<set>/<source>/length", "likewise", _TOKENS),
    Metric("eval/<set>/<source>/clip_ratio", "likewise", _SHARE),
    Metric("eval/<set>/<source>/failures", "likewise"),
)


def table() -> list[str]:
    """For people, one line each, with a heading."""
    rows = [("name", "unit", "verl", "TRL", "meaning")]
    rows += [(m.name, m.unit, m.verl or "-", m.trl or "-", m.meaning) for m in METRICS]
    return aligned(rows, lambda _: False)
