"""A finished run as a scenario: its lengths, its speeds, its nodes and when they joined and left.

Reads config.toml, lengths.jsonl, speeds.jsonl and metrics.jsonl. The first step is left out of the
speeds, if there are enough others, because everything starts in it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, TypeAlias, cast

from lightrl.config.run_file import CONFIG_FILE, load_config
from lightrl.config.schema import Config
from lightrl.errors import SimError
from lightrl.history import lengths
from lightrl.metrics import sinks
from lightrl.metrics.speeds import Decoded, NodeSpeeds, Start, StepSpeeds
from lightrl.sim.inputs.hardware import MIN_STEP_S, Curve, EngineProfile, SimTraining, SimTransfer
from lightrl.sim.inputs.nodes import SPOT, NodeChanges, NodeSpec
from lightrl.sim.inputs.scenario import Scenario
from lightrl.sim.inputs.workload import (
    Drawn,
    EmpiricalLengths,
    RewardClass,
    RewardTimes,
    SimEnvironment,
    Workload,
    complete_censored,
)
from lightrl.system.append_file import read_rows

MAX_STEPS = 200  # simulated by default
SKIPPED_STEPS = 1
MIN_STEPS = 3  # in a run whose first step is skipped
MIN_TOKENS = 32  # decoded at a size of batch that is measured by itself

# [prompt, epoch, index, tokens, finished] of each, as in lengths.jsonl
Responses: TypeAlias = Sequence[tuple[str, int, int, int, bool]]
Record: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class RecordedRun:
    name: str
    config: Config
    # those with a record
    steps: Sequence[StepSpeeds]
    # training rounds, by step
    rounds: Mapping[int, Responses]
    # of metrics.jsonl, by step
    records: Mapping[int, Record]

    @property
    def counted(self) -> list[StepSpeeds]:
        """The steps that are measured, and with which simulations are compared."""
        return list(self.steps[SKIPPED_STEPS:] if len(self.steps) >= MIN_STEPS else self.steps)

    @property
    def num_steps(self) -> int:
        return min(MAX_STEPS, self.steps[-1].step + 1)

    @cached_property
    def scenario(self) -> Scenario:
        """A scenario with the mean speeds of the counted steps."""
        order = drawn_order({s.step: s.drawn for s in self.steps}, self.rounds)
        num_prompts = max(self.steps[-1].num_prompts, len({prompt for prompt, _ in order}))
        records = [self.records[s.step] for s in self.counted]
        prompt_tokens = max(1, round(_mean(records, "prompt_length/mean")))
        num = sum(map(len, self.rounds.values()))
        note = f"{num:,} lengths, speeds and times of {len(records)} steps are those of {self.name}"
        signal = {step: _signal(record) for step, record in self.records.items()}
        finish_s = _mean(records, "timing_s/finish") or _mean(records, "timing_s/publish")
        optimizer_s = min(finish_s, _mean(records, "timing_s/optimizer"))
        train = self.config.train
        training = SimTraining(
            token_s=_token_s(records, prompt_tokens),
            step_s=optimizer_s,
            shard_s=_fmean(seconds for step in self.counted for seconds in step.shard_s),
            wait_tokens=train.ranks // train.replicas * train.max_tokens_per_gpu,
        )
        workload = Workload(
            self.name,
            measured_lengths(self.rounds.values(), self.config.run.seed),
            num_prompts,
            prompt_tokens,
            reward=self._rewards(),
            environment=_environment(records),
            order=order,
            signal=signal,
            note=note,
        )
        transfer = SimTransfer(
            publish_s=finish_s - optimizer_s, load_s=0.0, lost_after_s=0.0, ready_s=self._ready_s()
        )
        chunk_s = self.config.rollout.chunk_ms / 1000
        return Scenario(workload, {1: self._profile()}, training, transfer, chunk_s=chunk_s)

    @cached_property
    def nodes(self) -> dict[str, NodeSpec]:
        """All nodes that sampled, each with its own speed; one that hardly did has the mean speed
        of all."""
        specs: dict[str, NodeSpec] = {}
        for name in dict.fromkeys(name for step in self.steps for name in step.nodes):
            seen = [s.nodes[name] for s in self.steps if name in s.nodes]
            counted = [s.nodes[name] for s in self.counted if name in s.nodes]
            profile = _profile(counted) or _profile(seen) or self._profile()
            kind = SPOT if seen[-1].preemptible else "rollout"
            specs[name] = NodeSpec(name, seen[-1].slots, kind, profile=profile)
        return specs

    @property
    def changes(self) -> NodeChanges:
        """When nodes joined and left, by step; the first recorded step counts as step 0."""
        first = self.steps[0].step
        return {0 if s.step == first else s.step: s.changes for s in self.steps}

    def own_nodes(self, slots: int) -> list[NodeSpec]:
        """Return the nodes; those with the number of slots of the run's config get `slots`."""
        usual = self.config.rollout.slots
        return [
            replace(spec, slots=slots) if spec.slots == usual else spec
            for spec in self.nodes.values()
        ]

    def alike(self, nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
        """Return these nodes with the speeds of the run's nodes in turn."""
        known = [s for s in self.nodes.values() if s.kind != SPOT] or list(self.nodes.values())
        return [
            replace(node, profile=known[k % len(known)].profile) for k, node in enumerate(nodes)
        ]

    def notes(self, config: Config) -> list[str]:
        """Return what a simulation of this config leaves out, as the run did not measure it."""
        notes: list[str] = []
        own = self.config
        if config.speculates != own.speculates:
            has = "drafts are in" if own.speculates else "there are no drafts in"
            notes.append(f"{has} the measured speeds: speculation.enabled cannot act")
        if own.rollout.placement == "shared":
            notes.append("the run's engines shared the trainer's devices; devices are apart here")
        return notes

    def _profile(self) -> EngineProfile:
        profile = _profile(n for s in self.counted for n in s.nodes.values())
        if profile is None:
            raise SimError("the run has too few samples to measure its speed")
        return profile

    def _ready_s(self) -> tuple[float, ...]:
        """Return the load seconds of the first node to be ready, of the second ...: means over the
        steps with the most frequent number of nodes."""
        by_step = [
            sorted(s for n in step.nodes.values() for s in n.load_s) for step in self.counted
        ]
        counts = [len(times) for times in by_step if times]
        if not counts:
            return ()
        usual = max(set(counts), key=lambda n: (counts.count(n), n))
        columns = zip(*(times for times in by_step if len(times) == usual), strict=True)
        return tuple(fmean(column) for column in columns)

    def _rewards(self) -> RewardTimes:
        """Return a lognormal time with the mean and spread of the calls, and as many workers."""
        seen = [s.rewards for s in self.counted]
        num, alone = sum(r.num for r in seen), sum(r.num_alone for r in seen)
        if not num:
            return RewardTimes()
        mean = sum(r.seconds for r in seen) / num
        square = sum(r.squares for r in seen) / num
        chosen = RewardClass(constant_s=mean, workers=self.config.reward.workers)
        if mean > 0 and square > mean * mean:
            sigma = math.sqrt(math.log(square / (mean * mean)))
            median, limit = mean / math.exp(sigma * sigma / 2), max(r.longest_s for r in seen)
            chosen = replace(
                chosen, constant_s=0.0, median_s=median, sigma=sigma, limit_s=max(limit, MIN_STEP_S)
            )
        return RewardTimes((chosen,), overhead_s=sum(r.overhead_s for r in seen) / max(1, alone))


def read_run(folder: Path) -> RecordedRun:
    """Raise SimError for a folder without the files of a run that has trained a step."""
    if not (folder / CONFIG_FILE).is_file():
        raise SimError(f"--workload {folder}: is no run directory: it has no {CONFIG_FILE}")
    try:
        speeds = folder / lengths.SPEEDS
        steps = list(read_rows(speeds, StepSpeeds))
        if not steps and speeds.is_file() and speeds.stat().st_size:
            raise SimError(f"--workload {folder}: {speeds.name} is of another version of LightRL")
        rows = list(read_rows(folder / lengths.FILE_NAME, dict[str, Any]))
        records = {int(r["step"]) - 1: r for r in sinks.read(folder) if "timing_s/step" in r}
    except OSError as e:
        raise SimError(f"{e.filename}: cannot be read: {e.strerror}") from None
    steps = [s for s in steps if s.step in records]
    rounds = {
        int(r["step"]): cast("Responses", r.get("responses", []))
        for r in rows
        if "step" in r and r.get("kind") != "eval"
    }
    if not steps or not any(rounds.values()):
        raise SimError(f"--workload {folder}: the run has trained no step yet")
    return RecordedRun(str(folder), load_config(folder / CONFIG_FILE), steps, rounds, records)


def measured_lengths(rounds: Iterable[Responses], seed: int) -> EmpiricalLengths:
    """Return the length of each response. A response that the run did not launch has a length that
    its prompt had, or another one."""
    seen: dict[tuple[str, int, int], tuple[int, bool]] = {}
    for responses in rounds:
        for prompt, epoch, index, tokens, finished in responses:
            key = (prompt, epoch, index)
            before = seen.get(key, (0, False))
            # a deferred response is listed again: count how it finished, else how far it came
            if finished or (not before[1] and tokens >= before[0]):
                seen[key] = (tokens, finished)
    by_prompt: dict[str, list[tuple[int, bool]]] = {}
    for (prompt, _, _), response in seen.items():
        by_prompt.setdefault(prompt, []).append(response)
    whole = complete_censored(by_prompt, seed)
    left = {prompt: iter(lengths) for prompt, lengths in whole.items()}
    return EmpiricalLengths(whole, seed, {key: next(left[key[0]]) for key in seen})


def drawn_order(
    drawn: Mapping[int, Sequence[Drawn]], rounds: Mapping[int, Responses]
) -> tuple[Drawn, ...]:
    """Return the prompts in the order in which they were drawn. `drawn`: of each step, as in
    speeds.jsonl. It lacks what a coordinator drew before it crashed; `rounds` have that."""
    order: dict[Drawn, None] = {}
    for step in sorted(drawn.keys() | rounds.keys()):
        launched = ((prompt, epoch) for prompt, epoch, *_ in rounds.get(step, ()))
        order |= dict.fromkeys((*drawn.get(step, ()), *launched))
    return tuple(order)


def _profile(nodes: Iterable[NodeSpeeds]) -> EngineProfile | None:
    """Return the speed of these nodes together, None if they have decoded nothing. A step of B
    responses takes B x seconds / tokens, as measured with about as many."""
    by_size: dict[int, Decoded] = {}
    starts: list[Start] = []
    for node in nodes:
        starts += node.starts
        for size, decoded in node.decoded.items():
            by_size[size] = by_size.get(size, Decoded()).plus(decoded)
    rows = [d for _, d in sorted(by_size.items()) if d.response_s > 0 and d.tokens > 0]
    if not rows:
        return None
    knots = {max(1, round(d.batch)): d.response_s / d.tokens for d in _merged(rows)}
    curve = Curve(tuple(sorted(knots)), tuple(s for _, s in sorted(knots.items())))
    start_s, prefill_s = _start(starts, curve)
    return EngineProfile(
        step_s=curve.at(1), context_s=0.0, prefill_s=prefill_s, start_s=start_s, curve=curve
    )


def _merged(rows: Sequence[Decoded]) -> list[Decoded]:
    """Merge sizes with few tokens into the one before, so that no time is left out."""
    merged: list[Decoded] = []
    for row in rows:
        if merged and min(merged[-1].tokens, row.tokens) < MIN_TOKENS:
            merged[-1] = merged[-1].plus(row)
        else:
            merged.append(row)
    return merged


def _start(starts: Sequence[Start], curve: Curve) -> tuple[float, float]:
    """Return (seconds, seconds per prefilled token) until an idle engine decodes: a least-squares
    line, with both coefficients at least 0."""
    if not starts:
        return 0.0, 0.0
    seconds = [max(0.0, s.seconds - s.steps * curve.at(s.batch)) for s in starts]
    tokens = [float(s.prefill_tokens) for s in starts]
    mean_s, mean_tokens = fmean(seconds), fmean(tokens)
    if len(set(tokens)) < 2:
        return mean_s, 0.0
    slope = max(0.0, linear_regression(tokens, seconds).slope)
    each = min(slope, mean_s / mean_tokens)
    return max(0.0, mean_s - each * mean_tokens), each


def _environment(records: Sequence[Record]) -> SimEnvironment:
    """Return environments with the mean times and lengths of those of the run, if it had some; the
    spread of the times is not measured."""
    if not (turns := _mean(records, "episodes/turns")):
        return SimEnvironment()
    return SimEnvironment(
        mean_s=_mean(records, "episodes/environment_s") / (1 + turns),
        turns=max(1, round(turns)),
        observation_tokens=max(1, round(_mean(records, "episodes/observation_tokens") / turns)),
    )


def _signal(record: Record) -> float:
    """Return the share of a step's tokens that had a gradient; others are not computed."""
    tokens = record.get("num_tokens", 0.0)
    return min(1.0, record.get("num_trained_tokens", tokens) / tokens) if tokens > 0 else 1.0


def _token_s(records: Iterable[Record], prompt_tokens: int) -> float:
    """Return the training seconds of a token with a gradient, or whose prompt leads to one."""
    seconds = tokens = 0.0
    for record in records:
        mean = record.get("response_length/mean", 0.0)
        num = record.get("num_tokens", 0.0) / mean if mean else 0.0
        seconds += record.get("timing_s/accumulate", record.get("timing_s/forward_backward", 0.0))
        tokens += _signal(record) * (record.get("num_tokens", 0.0) + prompt_tokens * num)
    return seconds / tokens if tokens else 0.0


def _mean(records: Sequence[Record], name: str) -> float:
    return _fmean(record[name] for record in records if name in record)


def _fmean(values: Iterable[float]) -> float:
    found = [v for v in values if math.isfinite(v)]
    return fmean(found) if found else 0.0
