"""A run that has been, as a scenario: its lengths, its speeds, its nodes and what they did.

Owns what is made of the sums in speeds.jsonl and of the figures in metrics.jsonl. Nothing is
guessed: without speeds.jsonl there is no such scenario. The first step counts in neither, where
there are others: in it all is started.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from lightrl.config.schema import Config
from lightrl.core.curve import Curve
from lightrl.core.speed import size_of
from lightrl.errors import SimError
from lightrl.history import lengths
from lightrl.metrics import sinks
from lightrl.metrics.speeds import RewardSpeed
from lightrl.sim.costs import Training, Transfer
from lightrl.sim.engine_profile import LEAST_S, EngineProfile
from lightrl.sim.machines import SPOT, NodeChange, NodeChanges, NodeSpec
from lightrl.sim.replayed import Responses, drawn_in, replayed
from lightrl.sim.scenario import Scenario
from lightrl.sim.workload import RewardClass, RewardTimes, Workload
from lightrl.system.append_file import read_rows

SKIPPED = 1  # steps at the begin
ENOUGH_STEPS = 3  # from which on they are
LEAST_TOKENS = 32  # of a size of batch that counts by itself


@dataclass(frozen=True, slots=True)
class Node:
    """Of a step: see `metrics.speeds.NodeSpeed`."""

    slots: int
    preemptible: bool = False
    decoded: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])
    starts: list[tuple[float, int, int, int]] = field(
        default_factory=list[tuple[float, int, int, int]]
    )
    load_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Step:
    """A line of speeds.jsonl."""

    step: int
    num_prompts: int
    nodes: dict[str, Node]
    changes: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    drawn: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    rewards: RewardSpeed = field(default_factory=RewardSpeed)
    shard_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class RecordedRun:
    """What a simulation of it needs. `steps` are those of which speeds are known."""

    name: str
    steps: Sequence[Step]
    # by their steps
    rounds: Mapping[int, Responses]
    # of each step, by its number: from metrics.jsonl
    records: Mapping[int, Mapping[str, float]]

    @property
    def counted(self) -> list[int]:
        """The numbers of the steps whose speeds count, and with which simulations are compared."""
        known = [s.step for s in self.steps if s.step in self.records]
        return known[SKIPPED:] if len(known) >= ENOUGH_STEPS else known


def recorded(run_dir: Path) -> RecordedRun | None:
    """None: the run is older than speeds.jsonl, or has closed no step. Raises SimError."""
    try:
        steps = list(read_rows(run_dir / lengths.SPEEDS, Step))
        rows = list(read_rows(run_dir / lengths.FILE_NAME, dict[str, Any]))
        records = {int(r["step"]) - 1: r for r in sinks.read(run_dir) if "timing_s/step" in r}
    except OSError as e:
        raise SimError(f"{e.filename}: cannot be read: {e.strerror}") from None
    steps = [s for s in steps if s.step in records]
    rounds = {
        int(r["step"]): cast("Responses", r.get("responses", []))
        for r in rows
        if "step" in r and r.get("kind") != "eval"
    }
    if not steps or not any(rounds.values()):
        return None
    return RecordedRun(str(run_dir), steps, rounds, records)


def scenario_of(run: RecordedRun, config: Config) -> Scenario:
    """`config` is the run's. Speeds are those of its steps together."""
    lengths = replayed(run.rounds.values(), config.run.seed)
    order = drawn_in({s.step: s.drawn for s in run.steps}, run.rounds)
    num_prompts = max(run.steps[-1].num_prompts, len({prompt for prompt, _ in order}))
    figures = [run.records[k] for k in run.counted]
    prompt_tokens = max(1, round(_mean(figures, "prompt_length/mean")))
    num = sum(map(len, run.rounds.values()))
    note = f"{num:,} lengths, speeds and times of {len(run.counted)} steps are those of {run.name}"
    signal = {k: _signal(record) for k, record in run.records.items()}
    finish_s = _mean(figures, "timing_s/finish") or _mean(figures, "timing_s/publish")
    optimizer_s = min(finish_s, _mean(figures, "timing_s/optimizer"))
    training = Training(
        token_s=_token_s(run, signal, prompt_tokens),
        step_s=optimizer_s,
        shard_s=_mean_of(s for step in _steps(run) for s in step.shard_s),
        wait_tokens=config.train.ranks // config.train.replicas * config.train.max_tokens_per_gpu,
    )
    workload = Workload(
        run.name,
        lengths,
        num_prompts,
        prompt_tokens,
        reward=_rewards(run, config),
        order=order,
        signal=signal,
        note=note,
    )
    transfer = Transfer(
        publish_s=finish_s - optimizer_s, load_s=0.0, lost_after_s=0.0, ready_s=_ready_s(run)
    )
    profile = _profile(_pooled(n for s in _steps(run) for n in s.nodes.values()))
    chunk_s = config.rollout.chunk_ms / 1000
    return Scenario(workload, {1: profile}, training, transfer, chunk_s=chunk_s)


def nodes_of(run: RecordedRun) -> dict[str, NodeSpec]:
    """All that ever sampled, each as fast as it was; one that hardly did, as fast as the others."""
    names = list(dict.fromkeys(name for step in run.steps for name in step.nodes))
    usual = _profile(_pooled(n for s in _steps(run) for n in s.nodes.values()))
    specs: dict[str, NodeSpec] = {}
    for name in names:
        seen = [s.nodes[name] for s in run.steps if name in s.nodes]
        counted = [s.nodes[name] for s in _steps(run) if name in s.nodes]
        mine = _pooled(counted) if any(n.decoded for n in counted) else _pooled(seen)
        profile = _profile(mine) if mine.decoded else usual
        kind = SPOT if seen[-1].preemptible else "rollout"
        specs[name] = NodeSpec(name, seen[-1].slots, kind, profile=profile)
    return specs


def changes_of(run: RecordedRun, specs: Mapping[str, NodeSpec]) -> NodeChanges:
    """What nodes did in each step. What happened before the first round opened counts as then, and
    so does what they did in the first step of which speeds are known."""
    first = run.steps[0].step
    return {
        0 if step.step == first else step.step: tuple(
            NodeChange(max(0.0, at_s), specs[name], cast("Any", what))
            for at_s, name, what in step.changes
            if name in specs
        )
        for step in run.steps
    }


def _steps(run: RecordedRun) -> list[Step]:
    counted = set(run.counted)
    return [s for s in run.steps if s.step in counted]


def _pooled(nodes: Iterable[Node]) -> Node:
    """Everything that some nodes, or one node in several steps, did."""
    by_size: dict[int, tuple[float, float, int]] = {}
    starts: list[tuple[float, int, int, int]] = []
    slots = 1
    for node in nodes:
        slots = max(slots, node.slots)
        starts += node.starts
        for batch, response_s, tokens in node.decoded:
            size = size_of(max(1, round(batch)))
            b, s, t = by_size.get(size, (0.0, 0.0, 0))
            by_size[size] = (b + batch * response_s, s + response_s, t + tokens)
    rows = [(b / s, s, t) for _, (b, s, t) in sorted(by_size.items()) if s > 0 and t > 0]
    return Node(slots, False, _merged(rows), starts)


def _merged(rows: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Sizes that were hardly seen go with the one before, so that no time is left out."""
    merged: list[tuple[float, float, int]] = []
    for batch, response_s, tokens in rows:
        if merged and min(merged[-1][2], tokens) < LEAST_TOKENS:
            b, s, t = merged.pop()
            total = s + response_s
            merged.append(((b * s + batch * response_s) / total, total, t + tokens))
        else:
            merged.append((batch, response_s, tokens))
    return merged


def _profile(node: Node) -> EngineProfile:
    """A token of each of B responses takes B x seconds / tokens, as measured with about as many."""
    if not node.decoded:
        raise SimError("the run has sampled nothing that says how fast it is")
    knots: dict[int, float] = {}
    for batch, response_s, tokens in node.decoded:
        knots[max(1, round(batch))] = max(LEAST_S, response_s / tokens)
    batches = tuple(sorted(knots))
    seconds = tuple(knots[b] for b in batches)
    slopes = [
        (seconds[i + 1] - seconds[i]) / (batches[i + 1] - batches[i])
        for i in range(len(batches) - 1)
    ]
    last = max(0.0, (seconds[-1] - seconds[0]) / max(1, batches[-1] - batches[0]))
    if batches[0] > 1:  # nobody knows: as with the fewest
        batches, seconds, slopes = (1, *batches), (seconds[0], *seconds), [0.0, *slopes]
    curve = Curve(batches, seconds, (*slopes, last))
    start_s, prefill_s = _begin(node.starts, curve)
    return EngineProfile(
        step_s=curve.at(1), context_s=0.0, prefill_s=prefill_s, start_s=start_s, curve=curve
    )


def _begin(starts: Sequence[tuple[float, int, int, int]], curve: Curve) -> tuple[float, float]:
    """(seconds, and for each token that is computed first) until an idle engine decodes: a line by
    least squares, neither of them negative."""
    if not starts:
        return 0.0, 0.0
    seconds = [max(0.0, s - steps * curve.at(batch)) for s, _, steps, batch in starts]
    tokens = [float(t) for _, t, _, _ in starts]
    mean_s, mean_t = fmean(seconds), fmean(tokens)
    spread = sum((t - mean_t) ** 2 for t in tokens)
    if not spread:
        return mean_s, 0.0
    both = sum((t - mean_t) * (s - mean_s) for t, s in zip(tokens, seconds, strict=True))
    each = min(max(0.0, both / spread), mean_s / mean_t if mean_t else 0.0)
    return max(0.0, mean_s - each * mean_t), each  # all of it may be the tokens


def _ready_s(run: RecordedRun) -> tuple[float, ...]:
    """Of the node that serves a version first, of the second ...: means over the steps with as many
    nodes as most have."""
    by_step = [sorted(s for n in step.nodes.values() for s in n.load_s) for step in _steps(run)]
    by_step = [times for times in by_step if times]
    if not by_step:
        return ()
    counts = [len(times) for times in by_step]
    usual = max(set(counts), key=lambda n: (counts.count(n), n))
    alike = [times for times in by_step if len(times) == usual]
    return tuple(fmean(column) for column in zip(*alike, strict=True))


def _rewards(run: RecordedRun, config: Config) -> RewardTimes:
    """A lognormal time with the mean and the spread of the calls, at as many workers."""
    all_of = [s.rewards for s in _steps(run)]
    num, alone = sum(r.num for r in all_of), sum(r.num_alone for r in all_of)
    if not num:
        return RewardTimes()
    mean = sum(r.seconds for r in all_of) / num
    square = sum(r.squares for r in all_of) / num
    told_s = sum(r.told_s for r in all_of) / alone if alone else 0.0
    longest = max(r.longest_s for r in all_of)
    chosen = RewardClass(constant_s=mean, workers=config.reward.workers)
    if mean > 0 and square > mean * mean:
        sigma = math.sqrt(math.log(square / (mean * mean)))
        median = mean / math.exp(sigma * sigma / 2)
        chosen = replace(
            chosen, constant_s=0.0, median_s=median, sigma=sigma, limit_s=max(longest, LEAST_S)
        )
    return RewardTimes((chosen,), told_s=told_s)


def _signal(record: Mapping[str, float]) -> float:
    """Which share of the tokens of a step had a gradient; others are not computed."""
    tokens = record.get("num_tokens", 0.0)
    return min(1.0, record.get("num_trained_tokens", tokens) / tokens) if tokens > 0 else 1.0


def _token_s(run: RecordedRun, signal: Mapping[int, float], prompt_tokens: int) -> float:
    """Seconds of a token that has a gradient, or whose prompt leads to one."""
    seconds = tokens = 0.0
    for k in run.counted:
        record = run.records[k]
        busy_s = record.get("timing_s/accumulate", record.get("timing_s/forward_backward", 0.0))
        mean = record.get("response_length/mean", 0.0)
        num = record.get("num_tokens", 0.0) / mean if mean else 0.0
        seconds += busy_s
        tokens += signal[k] * (record.get("num_tokens", 0.0) + prompt_tokens * num)
    return seconds / tokens if tokens else 0.0


def _mean(figures: Sequence[Mapping[str, float]], name: str) -> float:
    return _mean_of(f[name] for f in figures if name in f)


def _mean_of(values: Iterable[float]) -> float:
    found = [v for v in values if math.isfinite(v)]
    return fmean(found) if found else 0.0
