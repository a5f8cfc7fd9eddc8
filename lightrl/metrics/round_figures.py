"""Figures of a closed training round, and texts about it. Pure functions.

Histories: `rounds.py`; what racing does to lengths and rewards: `selection_bias.py`.
"""

import hashlib
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from lightrl.core.coordinator import Coordinator
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.rounds.race import MIN_COMPARED, has_zero_std
from lightrl.core.rounds.rounds import staleness
from lightrl.core.state import GroupState, NodeState, Response, ResponseState, Round
from lightrl.messages.snapshot import SampleText
from lightrl.metrics.evaluation import Scores, scores_line

HISTOGRAM_BINS = 12
MAX_SAMPLE_TEXT = 2000  # characters of a prompt in the sample browser
SUMMED_AT_ONCE = 64  # responses; each call takes the lock of the interpreter
SUSPICIOUS_GAP = 0.1  # mean difference of logprobs that rounding to bfloat16 does not explain
# names of reward/... that no function may take
OF_ALL_FUNCTIONS = frozenset(
    {"mean", "scored", "std", "min", "max", "frac_zero_std", "failures", "timeouts", "score_s"}
)


def figure_name(name: str) -> str:
    """Return the name for a reward function, or for a figure that it returned."""
    return f"reward/function/{name}" if name in OF_ALL_FUNCTIONS else f"reward/{name}"


class ScoringTime(NamedTuple):
    """The duration of scoring one response. `failure` "" = the response has a score."""

    failure: str
    # of the call, divided among its responses
    seconds: float


def scoring_figures(scorings: Sequence[ScoringTime]) -> dict[str, float]:
    """Return figures of all scored responses of a round, trained or not."""
    return {
        "reward/failures": float(sum(bool(s.failure) for s in scorings)),
        "reward/timeouts": float(sum(s.failure == "timeout" for s in scorings)),
        "reward/score_s": mean([s.seconds for s in scorings]),
    }


def step_figures(round: Round) -> dict[str, float]:
    """Return rewards and lengths of what is trained, and counts of groups."""
    responses = [r for g in round.accepted for r in g.kept]
    rewards = [r.reward or 0.0 for r in responses]
    lengths = [r.num_sampled for r in responses]
    ended = [r.num_sampled for r in responses if r.finish_reason != "length"]
    prompts = [len(g.prompt.tokens) // 4 for g in round.accepted]
    rollout_s = round.closed_at - round.opened_at
    sampled = sum(r.num_new for g in round.groups.values() for r in g.responses)
    dropped = [g for g in round.groups.values() if g.state is GroupState.DROPPED]
    no_signal = sum(len(g.kept) >= min(MIN_COMPARED, g.size) for g in dropped)
    return {
        "reward/mean": mean(rewards),
        **_scored_figures(round, responses),
        "reward/std": deviation(rewards),
        "reward/min": min(rewards, default=0.0),
        "reward/max": max(rewards, default=0.0),
        "reward/frac_zero_std": mean([float(has_zero_std(g)) for g in round.accepted]),
        "response_length/mean": mean(lengths),
        "response_length/max": float(max(lengths, default=0)),
        "response_length/min": float(min(lengths, default=0)),
        "response_length/std": deviation(lengths),
        "response_length/terminated_mean": mean(ended),
        "prompt_length/mean": mean(prompts),
        "prompt_length/max": float(max(prompts, default=0)),
        "response_length/clip_ratio": mean([float(r.finish_reason == "length") for r in responses]),
        "round/groups_trained": float(len(round.accepted)),
        "round/groups_dropped": float(len(dropped)),
        "round/groups_no_signal": float(no_signal),
        "round/groups_unscored": float(len(dropped) - no_signal),
        "perf/rollout_tokens_per_s": sampled / rollout_s if rollout_s > 0 else 0.0,
        **off_policy_figures(round),
        **foresight_figures(round),
    }


def _scored_figures(round: Round, trained: Sequence[Response]) -> dict[str, float]:
    """Return mean rewards of all scored responses, also of dropped and deferred groups; and by data
    set, of these and of the trained ones."""
    every = [r for g in round.groups.values() for r in g.responses if r.reward is not None]
    rewards: dict[str, list[float]] = {"reward/scored": [r.reward or 0.0 for r in every]}
    for key, responses in (("reward", trained), ("reward_scored", every)):
        for r in responses:
            rewards.setdefault(f"data/{r.group.set}/{key}", []).append(r.reward or 0.0)
    return {name: mean(values) for name, values in rewards.items()}


def off_policy_figures(round: Round) -> dict[str, float]:
    """Return the staleness of the trained responses; 1, 0, 0 if training is synchronous."""
    values = [staleness(r.spans, round.step) for g in round.accepted for r in g.kept]
    figures: dict[str, float] = {}
    for name in ("span", "newest_gap", "oldest_gap"):
        each = [getattr(value, name) for value in values]
        figures[f"off_policy/{name}"] = mean(each)
        figures[f"off_policy/{name}_max"] = float(max(each, default=0))
    return figures


def episode_figures(round: Round, table: ResponseTable) -> dict[str, float]:
    """Return figures of all episodes of a closed round that have ended, trained or not; nothing, if
    it had none."""
    every = [r for group in round.groups.values() for r in group.responses]
    ended = [r for r in every if r.outcome is not None]
    if not any(r.turns for r in every):
        return {}
    stops = Counter(r.outcome.stop for r in ended if r.outcome is not None)
    return {
        "episodes/turns": mean([len(r.finishes) for r in ended]),
        "episodes/tool_calls": mean([num_tool_calls(r) for r in ended]),
        "episodes/observation_tokens": mean([r.num_inserted for r in ended]),
        "episodes/environment_s": mean([environment_s(r) for r in ended]),
        "episodes/waiting_s": mean([r.waited_s for r in ended]),
        "episodes/ended_turns": float(stops["turns"]),
        "episodes/ended_context": float(stops["context"]),
        "episodes/ended_length": float(stops["length"]),
        "episodes/ended_timeout": float(stops["timeout"]),
        "episodes/diverged": float(stops["diverged"]),
        "episodes/unscored": float(sum(r.scored and r.reward is None for r in ended)),
        "episodes/open": float(len(table.open_episodes)),
    }


def environment_s(response: Response) -> float:
    """Return the seconds in the environment of an episode."""
    last = response.outcome.seconds if response.outcome is not None else 0.0
    return last + sum(turn.seconds for turn in response.turns)


def num_tool_calls(response: Response) -> int:
    last = response.outcome.num_tool_calls if response.outcome is not None else 0
    return last + sum(turn.num_tool_calls for turn in response.turns)


def foresight_figures(round: Round) -> dict[str, float]:
    """Return how well the lengths of this round were predicted from earlier epochs.

    A group with aborted responses would have run longer: where it is shorter than predicted, that
    is no error.
    """
    num = num_foreseen = 0
    predicted, lengths, errors = [], [], []
    for group in round.groups.values():
        if not any(r.num_sampled for r in group.responses):
            continue
        num += len(group.responses)
        if (expected := group.foreseen_tokens) is not None:
            num_foreseen += len(group.responses)
            length = mean([r.num_sampled for r in group.responses])
            is_whole = all(r.finish_reason is not None for r in group.responses)
            errors.append(abs(length - expected) if is_whole else max(0.0, length - expected))
            predicted.append(expected)
            lengths.append(length)
    figures = {"foresight/coverage": num_foreseen / num if num else 0.0}
    if errors:
        figures["foresight/mean_abs_error_tokens"] = mean(errors)
    if (correlation := rank_correlation(predicted, lengths)) is not None:
        figures["foresight/rank_correlation"] = correlation
    return figures


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Spearman's correlation of ranks, equal values sharing their mean rank; None if all are
    equal.

    Example: rank_correlation([1, 5, 9], [10, 70, 30]) == 0.5
    """
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return statistics.correlation(_ranks(xs), _ranks(ys))


def _ranks(values: Sequence[float]) -> list[float]:
    _, order, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[order].tolist()


def digest_responses(step: int, responses: Iterable[Response]) -> bytes:
    """Return a digest of all trained responses of a step, independent of their order."""
    digest = hashlib.blake2b(str(step).encode(), digest_size=16)
    for r in sorted(responses, key=lambda r: r.id):
        digest.update(r.id.encode() + b"\0")
        digest.update(r.tokens)  # without a copy, and without the lock of the interpreter
    return digest.digest()


def total_tokens(round: Round) -> int:
    """Return the trained tokens, a prompt once for each of its responses."""
    return sum(len(g.prompt.tokens) // 4 + len(r.tokens) for g in round.accepted for r in g.kept)


def sampled_entropy(logprobs: Iterable["array[float]"]) -> float:
    """Return minus the mean logprob of sampled tokens: an estimate of the policy's entropy over all
    responses, trained or not. A gigabyte takes a second, without the lock of the interpreter."""
    total, number, rest = 0.0, 0, iter(logprobs)
    while some := list(islice(rest, SUMMED_AT_ONCE)):
        together = np.frombuffer(b"".join(some), "<f4")
        total += float(together.sum(dtype=np.float64))
        number += len(together)
    return -total / number if number else 0.0


def num_devices(core: Coordinator) -> int:
    """Return the devices of ranks and engines; shared ones count once."""
    own = [n for n in core.fleet.nodes.values() if "rollout" in n.roles and not n.shares]
    return core.settings.num_ranks + sum(max(1, n.num_workers, n.parallel) for n in own)


def live_figures(core: Coordinator) -> dict[str, float]:
    """Return the current figures, for Prometheus."""
    states = Counter(r.state for r in core.table.responses.values())
    nodes = Counter(node.state for node in core.fleet.nodes.values() if "rollout" in node.roles)
    return {
        "responses/running": float(states[ResponseState.RUNNING]),
        "responses/queued": float(states[ResponseState.QUEUED]),
        "responses/waiting": float(states[ResponseState.WAITING]),
        "responses/done": float(states[ResponseState.DONE]),
        "nodes/ready": float(nodes[NodeState.READY]),
        "nodes/all": float(nodes.total()),
        "rollout_tokens": float(core.table.counters.rollout_tokens),
        "migrations": float(core.table.counters.migrations),
    }


def histogram(lengths: list[int], longest: int) -> tuple[tuple[int, int], ...]:
    """Return (upper bound in tokens, responses) of equal bins up to `longest`."""
    width = max(1, math.ceil(longest / HISTOGRAM_BINS))
    counts = [0] * math.ceil(longest / width)
    for n in lengths:
        counts[max(0, n - 1) // width] += 1
    return tuple((min((i + 1) * width, longest), count) for i, count in enumerate(counts))


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Return the population's; `statistics.pstdev` uses fractions and takes ten times as long."""
    return float(np.std(values)) if values else 0.0


def sample_of(response: Response, prompt: str, text: str, reward: float | None) -> SampleText:
    """Return a row of the sample browser."""
    return SampleText(
        response=response.id,
        prompt=prompt[:MAX_SAMPLE_TEXT],
        text=text[:MAX_SAMPLE_TEXT],
        reward=reward,
        num_tokens=response.num_sampled,
        step=response.group.round.step,
    )


def step_line(step: int, record: dict[str, float]) -> str:
    return (
        f"step {step}: reward {record['reward/mean']:.3f}, length "
        f"{record['response_length/mean']:.1f}, {record['timing_s/step']:.2f} s"
    )


def eval_lines(step: int, scores: Scores, record: dict[str, float]) -> Iterator[str]:
    yield f"evaluation at step {step}: {scores_line(scores)}"
    for name in scores:
        if failures := record[f"eval/{name}/failures"]:
            yield (
                f"WARNING: evaluation at step {step}: {failures:.0f} responses of {name} have no "
                "score and count as 0"
            )


def warnings(record: dict[str, float]) -> Iterator[str]:
    """Yield warnings about a step."""
    gap = record.get("train_rollout_logprob_abs_diff", 0.0)
    if not gap <= SUSPICIOUS_GAP:  # NaN, too
        yield f"WARNING: engine and trainer differ by {gap:.3f} in logprobs: stale weights?"
    skipped, made = record.get("train/skipped_nonfinite", 0), record.get("train/updates", 0)
    if skipped and not made:
        yield "WARNING: nothing was learned in this step: its gradient is not finite"
    elif skipped:
        yield (
            f"WARNING: {skipped:.0f} of {skipped + made:.0f} updates of this step were left out: "
            "their gradients are not finite"
        )
    if record["round/groups_trained"] == 0:
        unscored, equal = record["round/groups_unscored"], record["round/groups_no_signal"]
        why = f"{unscored:.0f} groups have no rewards; in {equal:.0f} all rewards are equal"
        yield f"WARNING: nothing was trained in this step: {why}"
    elif record.get("num_trained_tokens") == 0:
        yield (
            "WARNING: nothing was learned in this step: in every group all rewards are equal, or "
            "algorithm.mask_truncated leaves all out"
        )
