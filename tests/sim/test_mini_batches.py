"""Which responses land in which update of a step, in whole runs in virtual time."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from lightrl.core.commands import Command, Send
from lightrl.core.events import Event
from lightrl.core.settings import Tail
from lightrl.messages.training import TrainGroup, TrainShard
from lightrl.sim.world import World
from lightrl.trainer.learner.token_mean import TokenMean
from tests.sim.conftest import SCENARIO, nodes, world
from tests.support.tiers import e2e

PROMPTS, STEPS, PARTS = 32, 20, 4
MODES: dict[str, dict[str, Any]] = {
    "lockstep": {},
    "asynchronous": {"max_staleness": 1},
    "tail-batched": {"tail": Tail(1.25)},
    "tail-batched, both": {"tail": Tail(1.25, 1.25)},
    "deterministic": {"deterministic": True},
    "deterministic, tail-batched": {"deterministic": True, "tail": Tail(1.25)},
}

Steps = dict[int, list[TrainGroup]]  # as they were sent


def trained(mode: str, **changes: Any) -> tuple[World, Steps]:
    settings = {
        "num_steps": STEPS,
        "prompts_per_step": PROMPTS,
        "mini_batches": PARTS,
        **MODES[mode],
        **changes,
    }
    scenario = replace(SCENARIO, workload=replace(SCENARIO.workload, num_prompts=300))
    run = world(scenario, fleet=nodes(4, slots=48), **settings)
    found: Steps = defaultdict(list)

    def handle(event: Event, now: float) -> list[Command]:
        commands = run.core.handle(event, now)
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, TrainShard):
                found[command.message.step] += command.message.groups
        return commands

    run.handle = handle
    run.run()
    return run, found


def lengths_of(groups: Iterable[TrainGroup]) -> list[int]:
    return [len(r.token_ids) // 4 for g in groups for r in g.responses]


def labels_of(steps: Steps) -> dict[str, int]:
    return {g.group: g.mini_batch for groups in steps.values() for g in groups}


def ranks(values: list[float]) -> list[float]:
    """Of equal ones the mean."""
    ordered = sorted(values)
    first = {v: ordered.index(v) for v in set(values)}
    return [first[v] + (ordered.count(v) - 1) / 2 for v in values]


def correlation(steps: Steps) -> float:
    """Of lengths and mini-batches by rank (Spearman), mean over the steps."""
    found: list[float] = []
    for groups in steps.values():
        x = ranks([fmean(lengths_of([g])) for g in groups])
        y = ranks([float(g.mini_batch) for g in groups])
        mx, my = fmean(x), fmean(y)
        cov = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
        spread = sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)
        found.append(cov / spread**0.5)
    return fmean(found)


@pytest.mark.parametrize(
    "mode", ["tail-batched", *e2e(mode for mode in MODES if mode != "tail-batched")]
)
def test_lengths_do_not_tell_the_mini_batch(mode: str):
    _, steps = trained(mode)
    assert len(steps) == STEPS
    for groups in steps.values():
        labels = [g.mini_batch for g in groups]
        assert [labels.count(k) for k in range(PARTS)] == [PROMPTS // PARTS] * PARTS
    assert abs(correlation(steps)) < 0.1


def test_in_the_order_of_arrival_they_do():
    assert correlation(trained("lockstep", mini_batch_order="arrival")[1]) > 0.6


def weight_of_longest(sent: Steps, mean: TokenMean | None = None) -> float:
    """Share of the weight of all tokens that the longest tenth of the responses of a run has, if
    each step is divided by its own tokens, or as `mean` has it."""
    steps = {step: lengths_of(groups) for step, groups in sent.items()}
    every = sorted(n for lengths in steps.values() for n in lengths)
    cut, long, total = every[-len(every) // 10], 0.0, 0.0
    for _, lengths in sorted(steps.items()):
        divisor = float(sum(lengths))
        if mean is not None:
            divisor = len(lengths) * mean.add(len(lengths), sum(lengths))
            mean.end_step()
        long += sum(n for n in lengths if n >= cut) / divisor
        total += sum(lengths) / divisor
    return long / total


@pytest.mark.e2e
def test_tail_batching_takes_no_weight_from_the_longest_responses():
    plain, own, running = list[float](), list[float](), list[float]()
    for seed in range(2):
        sizes = {"num_steps": 50, "mini_batches": 1, "run_seed": seed}
        plain.append(weight_of_longest(trained("lockstep", **sizes)[1]))
        _, tail = trained("lockstep", tail=Tail(1.25, deferred="continue"), **sizes)
        own.append(weight_of_longest(tail))
        running.append(weight_of_longest(tail, TokenMean()))
    assert fmean(own) < 0.8 * fmean(plain)
    assert fmean(running) == pytest.approx(fmean(plain), rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"tail": Tail(1.1), "num_steps": 7},
        {"tail": Tail(2.5), "num_steps": 6},
        {"tail": Tail(1.25), "max_staleness": 1, "num_steps": 8},
        {"tail": Tail(1.25), "max_staleness": 3, "num_steps": 9},
        {"tail": Tail(1.25, 1.25, race="clock"), "num_steps": 6},
    ],
    ids=str,
)
def test_a_run_ends_with_nothing_put_off(changes: dict[str, Any]):
    run, steps = trained("lockstep", **changes)
    assert len(steps) == run.settings.num_steps
    assert not run.core.backlog.deferred
    kinds = [step.kind for step in run.outcome.steps]
    assert "short" in kinds
    assert all(len(groups) == PROMPTS for groups in steps.values())


def test_runs_repeat_their_mini_batches_whatever_the_order():
    one = labels_of(trained("lockstep", num_steps=3)[1])
    assert labels_of(trained("deterministic", num_steps=3)[1]) == one
    assert labels_of(trained("lockstep", num_steps=3, run_seed=1)[1]) != one
