"""Every name in metrics.jsonl: its meaning, unit and module, and what verl and TRL call it.

`lightrl config --metrics` prints the table, and a test compares it with what runs write. A name of
verl's is given where its `compute_data_metrics`, `calculate_debug_metrics`,
`compute_offpolicy_metrics`, timers or losses (0.8, `loss_agg_mode` token-mean) compute the same
quantity. Where the meaning names trained tokens, verl includes responses without an advantage,
which are not computed here.
"""

from typing import NamedTuple

from lightrl.metrics.display import aligned


class Metric(NamedTuple):
    """A name or, with parts in <>, a family of them."""

    name: str
    meaning: str
    unit: str = ""
    verl: str = ""
    trl: str = ""

    @property
    def module(self) -> str:
        """The module that computes it: of the longest beginning of the name in `_MODULES`."""
        return max((len(b), file) for b, file in _MODULES if self.name.startswith(b))[1]


# name | meaning | unit | verl | TRL
_TABLE = """
step | steps done, each of train.mini_batches updates | | training/global_step
epoch | prompts drawn, divided by those of the data | | | epoch
policy_version | of the weights after the step
num_tokens_total | prompts and responses trained so far | tokens | | num_tokens
# rewards
reward/mean | of trained responses, unpenalised | | critic/score/mean | reward
reward/scored | mean of all scored responses of the round, trained or not
data/<set>/reward | mean of the trained responses to prompts of a data set
data/<set>/reward_scored | mean of all scored ones, trained or not
reward/std | of the trained responses | | | reward_std
reward/min | of the trained responses | | critic/score/min
reward/max | of the trained responses | | critic/score/max
reward/frac_zero_std | groups without signal | share | | frac_reward_zero_std
reward/failures | responses without a score
reward/timeouts | of these, because the function took too long
reward/score_s | of one response, mean | s
reward/<name> | mean of one function of several, or of a figure that a function returned | | | \
  rewards/<name>/mean
advantage/mean | of responses, whatever their length
advantage/std | of responses
advantage/min | of responses | | critic/advantages/min
advantage/max | of responses | | critic/advantages/max
# lengths
prompt_length/mean | of the trained groups | tokens | prompt_length/mean
prompt_length/max | of the trained groups | tokens | prompt_length/max
response_length/mean | of the trained responses | tokens | response_length/mean | \
  completions/mean_length
response_length/min | of the trained responses | tokens | response_length/min | \
  completions/min_length
response_length/max | of the trained responses | tokens | response_length/max | \
  completions/max_length
response_length/std | of the trained responses | tokens
response_length/terminated_mean | of those that ended before the limit | tokens | | \
  completions/mean_terminated_length
response_length/clip_ratio | of the trained responses: cut at the limit (verl: also those that \
  end there) | share | response_length/clip_ratio | completions/clipped_ratio
# the update
loss/policy | as it is normalised, mean over updates
loss/kl | KL term as it is normalised, importance weights in it, without kl_coef
kl/ref | to the reference, mean over response tokens | nats | | kl
entropy | mean over response tokens | nats | actor/entropy | entropy
entropy/sampled | minus the logprob of sampled tokens, all responses | nats
ratio/mean | to the old policy, of trained tokens
ratio/min | to the old policy, of trained tokens
ratio/max | to the old policy, of trained tokens
clip_frac | response tokens clipped | share | actor/pg_clipfrac | clip_ratio/region_mean
clip_frac/low | from below | share | | clip_ratio/low_mean
clip_frac/high | from above | share | | clip_ratio/high_mean
clip_frac/dual | by algorithm.clip_dual | share | actor/pg_clipfrac_lower
grad_norm | before clipping, mean over updates | | actor/grad_norm | grad_norm
lr | learning rate | | actor/lr | learning_rate
num_tokens | response tokens of the step | tokens
num_trained_tokens | those with a gradient | tokens
train/updates | of the weights, in the step
train/tokens_per_response | running mean by which tokens are normalised, with tail batching | tokens
update/<k>/response_length | of the k-th update of a step of several: mean over its responses | \
  tokens
update/<k>/clip_frac | likewise: response tokens clipped | share
update/<k>/grad_norm | likewise: before clipping; none without a signal
train/skipped_nonfinite | updates left out, whose gradient was not finite
# episodes of several turns, of a round's that have ended; lengths above count sampled tokens
episodes/turns | sampled in an episode
episodes/tool_calls | in an episode
episodes/observation_tokens | inserted in an episode | tokens
episodes/environment_s | of an episode in its environment | s
episodes/waiting_s | of an episode for its environment, with the way there and back | s
episodes/ended_turns | by environment.max_turns
episodes/ended_context | by environment.max_length
episodes/ended_length | by rollout.max_response_length
episodes/ended_timeout | by environment.timeout_s
episodes/diverged | replayed with another observation: no score
episodes/unscored | without a score
episodes/open | when the round closed
# engine against trainer, over tokens of the newest version
train_rollout_logprob_abs_diff | engine against trainer, mean over tokens that the newest \
  version sampled | nats | | sampling/sampling_logp_difference/mean
train_rollout_logprob_abs_diff_max | the largest | nats | | sampling/sampling_logp_difference/max
train_rollout_prob_abs_diff | of probabilities, all trained tokens | | \
  training/rollout_probs_diff_mean
train_rollout_prob_abs_diff_max | the largest | | training/rollout_probs_diff_max
train_rollout_prob_abs_diff_std | standard deviation, n - 1 | | training/rollout_probs_diff_std
mismatch_kl/mean | engine to trainer, k3, over tokens of the newest version | nats
mismatch_kl/max | the largest of a token | nats
mismatch_kl/all | of all trained tokens, also older | nats | rollout_corr/k3_kl
tis/mean | importance weight, in algorithm.tis_bounds | | | sampling/importance_sampling_ratio/mean
tis/min | the smallest | | | sampling/importance_sampling_ratio/min
tis/max | the largest | | | sampling/importance_sampling_ratio/max
tis/truncated_share | tokens whose weight was outside algorithm.tis_bounds | share
tis/ess | effective sample size (sum w)^2 / (n sum w^2) of n tokens | share
off_policy/span | versions in a response
off_policy/span_max | versions in a response
off_policy/newest_gap | trained version minus the newest of a response
off_policy/newest_gap_max | trained version minus the newest of a response
off_policy/oldest_gap | staleness: trained version minus the oldest of a response
off_policy/oldest_gap_max | staleness
# rounds
round/groups_trained | in the step
round/groups_dropped | in its round
round/groups_no_signal | of those: all rewards equal
round/groups_unscored | of those: too few scores
round/is_<kind> | 1 if the round was short, long or flush
tail/deferred_staleness | trained version minus the oldest of a continued response
tail/deferred_staleness_max | the largest
tail/restart_same_share | restarts that repeat all tokens of what was put off | share
tail/restart_common_tokens | of both, until the first that differs, mean | tokens
tail/restart_shorter_share | restarts that ended before they came as far | share
tail_run/length_bias | length trained over that of first attempts, minus 1 | share
tail_run/length_bias_se | its standard error | share
tail_run/length_bias_up_to | longer responses count as so long | tokens
tail/<name> | racing, of the round: see lightrl/core/README.md
tail_run/<name> | racing, of the run so far
foresight/coverage | responses whose length was predicted | share
foresight/mean_abs_error_tokens | of predicted lengths | tokens
foresight/rank_correlation | of predicted and real lengths
migration/moves | responses that moved to another node
# speculation
speculation/drafted | tokens | tokens
speculation/acceptance | drafted tokens that were sampled | share
speculation/draft_share | sampled tokens that were drafted | share
speculation/forwards | forward passes of engines
speculation/tokens_per_forward | of a response
speculation/<name> | see lightrl/history/README.md
history/<name> | the store of earlier responses
# weights
weights/bytes | moved to nodes since the last step | bytes
weights/full_bytes | the same had each got all of it | bytes
weights/from_peers | of these from other rollout nodes | bytes
weights/publish_s | to write a version | s
weights/pull_s | of the slowest | s
weights/pause_s | an engine standing still, the slowest | s
weights/broadcast_nodes | that got it by broadcast
weights/broadcast_s | of the slowest, proof included | s
weights/delta_ratio | bytes of deltas against the whole | share
weights/canary | largest difference of a logprob to the trainer's | nats
weights/<name> | see lightrl/weights/README.md
# where time and devices go
timing_s/step | rollout + train_after_rollout + weights | s | timing_s/step
timing_s/rollout | until the round closed, scores included | s
timing_s/train_after_rollout | training not hidden behind it | s
timing_s/weights | until a node served the new version | s
timing_s/data | waiting for prompts that were not ready | s
timing_s/forward_backward | passes of the ranks | s
timing_s/reference | of these, the reference's | s | timing_s/ref
timing_s/optimizer | updates | s
timing_s/publish | writing the version | s
timing_s/accumulate | any rank at gradients, by the trainer's daemon | s
timing_s/finish | from the last gradient until the version is announced | s
timing_s/stage | standing still for a checkpoint | s | timing_s/save_checkpoint
timing_s/park | giving shared devices back | s
timing_s/fetch | taking shared devices | s
timing_s/<name> | see lightrl/trainer/README.md | s
perf/rollout_tokens_per_s | sampled in the round | tokens/s
perf/tokens_per_gpu_s | trained, prompts included, by the step's seconds and all devices | \
  tokens/s | perf/throughput
perf/mfu | of forward and backward passes, on known GPUs | share
perf/peak_memory_gib | allocated by torch in the step, on the fullest GPU | GiB
perf/host_memory_gib | resident, all ranks together | GiB
perf/padding_share | of the tokens that ranks computed | share
perf/micro_batches | of the rank with the most
offload/<name> | devices that sample and train: see lightrl/core/README.md
planner/<name> | of engines of several sizes: parallel, preemptions, switches, ...
device_s/<node>/<state> | what shared devices did; sums to the step | s
cost/usd | of the run so far, by prices | US$
cost/usd_per_step | of the run so far | US$
cost/usd_per_million_tokens | sampled and not given up | US$
# evaluations
eval/<set>/avg@<k> | mean reward of k responses to each prompt; one without a score counts as 0 \
  | | val-core/<source>/reward/mean@<k> | eval_reward
eval/<set>/pass@<k> | one of k responses is correct, its reward 1 or more; k: 1, 2, 4 ... \
  samples; unbiased | share
eval/<set>/length | of responses, mean | tokens | | eval_completions/mean_length
eval/<set>/clip_ratio | responses cut at the set's limit | share | | eval_completions/clipped_ratio
eval/<set>/failures | responses without a score
eval/seconds | of an evaluation, all sets | s | timing_s/testing | eval_runtime
eval/<set>/<source>/avg@<k> | the same where a set has several `data_source`s | | \
  val-core/<source>/reward/mean@<k>
eval/<set>/<source>/pass@<k> | likewise | share
eval/<set>/<source>/length | likewise | tokens
eval/<set>/<source>/clip_ratio | likewise | share
eval/<set>/<source>/failures | likewise
"""

# module | beginnings of the names that it computes
_COMPUTED = """
metrics/round_figures.py | reward data/ prompt_length response_length round/ off_policy foresight
metrics/round_figures.py | episodes
metrics/round_figures.py | perf/rollout_tokens_per_s
metrics/rounds.py | step epoch policy_version num_tokens_total entropy/sampled round/is_ migration
metrics/rounds.py | timing_s/step timing_s/rollout timing_s/train_after_rollout timing_s/weights
metrics/rounds.py | perf/tokens_per_gpu_s eval/seconds
metrics/selection_bias.py | tail
metrics/totals.py | speculation weights
metrics/cost_and_nodes.py | offload planner device_s cost
metrics/evaluation.py | eval/
history/store.py | history
coordinator/daemon.py | timing_s/data
trainer/step.py | timing_s/accumulate timing_s/finish
trainer/learner/figures.py | advantage loss kl entropy ratio clip_frac grad_norm lr train update
trainer/learner/figures.py | num_tokens num_trained_tokens mismatch_kl tis perf/padding_share
trainer/learner/learner.py | train/tokens_per_response timing_s/ perf/
trainer/rank/main.py | timing_s/publish timing_s/park weights/publish_s
trainer/rank/rank.py | timing_s/stage
"""

_MODULES = [
    (begin, module)
    for module, begins in (line.split(" | ") for line in _COMPUTED.strip().splitlines())
    for begin in begins.split()
]

METRICS = tuple(
    Metric(*(" ".join(cell.split()) for cell in line.split("|")))
    for line in _TABLE.strip().splitlines()
    if not line.startswith("#")
)


def table() -> list[str]:
    """Return lines for people, the first one a heading."""
    rows = [("name", "unit", "module", "verl", "TRL", "meaning")]
    rows += [(m.name, m.unit, m.module, m.verl or "-", m.trl or "-", m.meaning) for m in METRICS]
    return aligned(rows, lambda _: False)
