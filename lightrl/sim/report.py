"""What a simulation says, as figures, as a table for people, as one JSON object. Computes nothing
new.

Every figure is defined here, once. The physical bound of a step is the largest of: the least work
that its kept responses are, over the capacity that was there; its longest kept response on a fast
node of its own; its training. On shared GPUs work and training add up. No schedule that trains the
same can beat it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from lightrl.sim.outcome import Outcome, StepRecord
from lightrl.sim.scenario import Scenario

if TYPE_CHECKING:
    from rich.console import RenderableType

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Means over the rounds of one kind."""

    rounds: int
    step_s: float
    rollout_s: float
    train_s: float
    weights_s: float
    bound_s: float
    # of those kept
    longest_tokens: float
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class WeightsFigures:
    """How new weights came to the nodes. Seconds are means where nothing else is said."""

    pulls: int
    pull_s: float
    longest_pull_s: float
    # of the pulled bytes: from other rollout nodes; as differences to an older version
    from_peers: float
    as_deltas: float
    # what the trainer sent to those who pulled: whole versions for each that it published
    trainer_versions: float
    # nodes that got a version by broadcast
    broadcasts: int
    broadcast_s: float
    # that ended with the loss of a member
    broken_broadcasts: int


@dataclass(frozen=True, slots=True)
class Figures:
    """All of one simulation. Shares are between 0 and 1, costs in dollars."""

    workload: str
    steps: int
    step_s: float
    # over the synchronous baseline on the same devices
    speed_up: float | None
    bound_s: float
    # bound_s / step_s
    share_of_bound: float
    # trained
    responses_per_s: float
    tokens_per_s: float
    kinds: dict[str, RoundFigures]
    # class -> state -> share of its time
    devices: dict[str, dict[str, float]]
    device_hours: dict[str, float]
    weights: WeightsFigures
    migrations: int
    responses_moved: int
    nodes_lost: int
    preemptions: int
    sampled_tokens: int
    trained_tokens: int
    # of the sampled tokens
    wasted_share: float
    prefilled_tokens: int
    # tokens of a trained response
    kept_mean: float
    # of all that the same prompts launched first: what they would give without a race
    true_mean: float
    # kept_mean / true_mean - 1
    length_bias: float
    kept_at_limit: float
    true_at_limit: float
    # put off at the end; their responses are in neither mean
    prompts_waiting: int
    cost: float
    cost_per_step: float
    tokens_per_dollar: float | None


def bound_s(step: StepRecord, colocated: bool, synchronous: bool = True) -> float:
    longest = step.longest_s if synchronous else 0.0
    work_s = step.work_s + (step.training_s * step.training_nodes if colocated else 0.0)
    return max(longest, work_s / step.nodes if step.nodes else 0.0, step.training_s)


def figures(
    outcome: Outcome,
    scenario: Scenario,
    synchronous: bool = True,
    baseline_step_s: float | None = None,
) -> Figures:
    colocated = scenario.training.placement == "colocated"
    steps = outcome.steps
    bounds = {s.step: bound_s(s, colocated, synchronous) for s in steps}
    step_s = fmean(s.step_s for s in steps)
    total_s = sum(s.step_s for s in steps)
    kinds: dict[str, RoundFigures] = {}
    for kind in dict.fromkeys(s.kind for s in steps):
        mine = [s for s in steps if s.kind == kind]
        kinds[kind] = RoundFigures(
            rounds=len(mine),
            step_s=fmean(s.step_s for s in mine),
            rollout_s=fmean(s.rollout_s for s in mine),
            train_s=fmean(s.train_s for s in mine),
            weights_s=fmean(s.weights_s for s in mine),
            bound_s=fmean(bounds[s.step] for s in mine),
            longest_tokens=fmean(s.kept_longest for s in mine),
            mean_tokens=fmean(s.kept_tokens / max(1, s.kept) for s in mine),
        )
    hours = {kind: seconds / HOUR_S for kind, seconds in outcome.device_s.items()}
    cost = sum(h * scenario.prices.of(kind) for kind, h in hours.items())
    kept, true = outcome.kept, outcome.launched
    return Figures(
        workload=scenario.workload.name,
        steps=len(steps),
        step_s=step_s,
        speed_up=baseline_step_s / step_s if baseline_step_s is not None else None,
        bound_s=fmean(bounds.values()),
        share_of_bound=fmean(bounds.values()) / step_s,
        responses_per_s=sum(s.kept for s in steps) / total_s,
        tokens_per_s=outcome.trained_tokens / total_s,
        kinds=kinds,
        devices={
            kind: _shares(t, outcome.device_s[kind]) for kind, t in outcome.device_times.items()
        },
        device_hours=hours,
        weights=_weights(outcome, scenario),
        migrations=outcome.counters["migrations"],
        responses_moved=outcome.counters["responses_moved"],
        nodes_lost=outcome.counters["nodes_lost"],
        preemptions=outcome.preemptions,
        sampled_tokens=outcome.sampled_tokens,
        trained_tokens=outcome.trained_tokens,
        wasted_share=1 - outcome.trained_tokens / max(1, outcome.sampled_tokens),
        prefilled_tokens=outcome.prefilled_tokens,
        kept_mean=kept.mean,
        true_mean=true.mean,
        length_bias=kept.mean / true.mean - 1 if true.num else 0.0,
        kept_at_limit=kept.share_at_limit,
        true_at_limit=true.share_at_limit,
        prompts_waiting=outcome.waiting_prompts,
        cost=cost,
        cost_per_step=cost / len(steps),
        tokens_per_dollar=outcome.trained_tokens / cost if cost else None,
    )


def _weights(outcome: Outcome, scenario: Scenario) -> WeightsFigures:
    sums, num_bytes = outcome.weights, scenario.transfer.num_bytes
    published = (len(outcome.steps) + 1) * num_bytes
    return WeightsFigures(
        pulls=sums.num_pulls,
        pull_s=sums.pull_s / max(1, sums.num_pulls),
        longest_pull_s=sums.longest_pull_s,
        from_peers=sums.peer_bytes / sums.num_bytes if sums.num_bytes else 0.0,
        as_deltas=sums.delta_bytes / sums.num_bytes if sums.num_bytes else 0.0,
        trainer_versions=sums.trainer_bytes / published if published else 0.0,
        broadcasts=sums.num_broadcast,
        broadcast_s=sums.broadcast_s / max(1, sums.num_broadcast),
        broken_broadcasts=sums.num_broken,
    )


def _shares(times: Mapping[str, float], total_s: float) -> dict[str, float]:
    return (
        {label: seconds / total_s for label, seconds in times.items() if seconds} if total_s else {}
    )


def as_json(named: Mapping[str, Figures]) -> dict[str, object]:
    return {name: asdict(f) for name, f in named.items()}


def tables(figures: Figures) -> "list[RenderableType]":
    """One simulation, for people."""
    from rich.table import Table

    head = ["rounds", "step_s", "rollout_s", "train_s", "weights_s", "bound_s", "longest", "mean"]
    rounds = Table("round", *head, box=None)
    for column in rounds.columns[1:]:
        column.justify = "right"
    for kind, k in figures.kinds.items():
        times = (k.step_s, k.rollout_s, k.train_s, k.weights_s, k.bound_s)
        tokens = (f"{k.longest_tokens:,.0f}", f"{k.mean_tokens:,.0f}")
        rounds.add_row(kind, str(k.rounds), *(f"{t:.1f}" for t in times), *tokens)
    labels = list(dict.fromkeys(label for shares in figures.devices.values() for label in shares))
    devices = Table("time of", "hours", *labels, box=None)
    for column in devices.columns[1:]:
        column.justify = "right"
    for kind, shares in figures.devices.items():
        cells = (f"{100 * shares[label]:.1f} %" if label in shares else "" for label in labels)
        devices.add_row(kind, f"{figures.device_hours[kind]:.2f}", *cells)
    return [rounds, "", devices, "", "\n".join(_lines(figures))]


def _lines(f: Figures) -> list[str]:
    lines = [
        f"step       {f.step_s:.1f} s on average, {f.responses_per_s:.2f} responses/s"
        + (f", {f.speed_up:.2f} x the synchronous baseline" if f.speed_up is not None else ""),
        f"bound      {f.bound_s:.1f} s: no schedule of the same responses is faster; this one is "
        f"at {100 * f.share_of_bound:.0f} %",
        f"tokens     {f.sampled_tokens:,} sampled, {f.trained_tokens:,} trained, "
        f"{100 * f.wasted_share:.1f} % wasted, {f.prefilled_tokens:,} prefilled",
        f"moves      {f.migrations} migrations, {f.responses_moved} resumed elsewhere, "
        f"{f.nodes_lost} nodes lost, {f.preemptions} KV preemptions",
        f"lengths    {f.kept_mean:,.0f} tokens trained against {f.true_mean:,.0f} without a race "
        f"({100 * f.length_bias:+.1f} %), at the limit {100 * f.kept_at_limit:.1f} against "
        f"{100 * f.true_at_limit:.1f} %"
        + (f"; {f.prompts_waiting} prompts wait" if f.prompts_waiting else ""),
    ]
    w = f.weights
    if w.pulls:
        lines.append(
            f"weights    {w.pulls} pulls, {w.pull_s:.3g} s on average, {w.longest_pull_s:.3g} s at "
            f"most; {100 * w.from_peers:.0f} % of the bytes from peers, the trainer sent each "
            f"version {w.trainer_versions:.1f} times"
            + (f"; {100 * w.as_deltas:.0f} % as differences" if w.as_deltas else "")
        )
    if w.broadcasts or w.broken_broadcasts:
        lines.append(
            f"broadcast  to {w.broadcasts} nodes, {w.broadcast_s:.3g} s each; "
            f"{w.broken_broadcasts} broken off"
        )
    if f.cost:
        lines.append(f"cost       ${f.cost:,.2f}, ${f.cost_per_step:.3f} a step")
    return lines


def comparison(named: Mapping[str, Figures]) -> "Sequence[RenderableType]":
    """Several simulations of the same run, one a row."""
    from rich.table import Table

    head = ["step_s", "speed-up", "of_bound", "decode", "wasted", "bias", "at_limit", "moves"]
    with_cost = any(f.cost for f in named.values())
    table = Table("mechanism", *head, *(["$/step"] if with_cost else []), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, f in named.items():
        nodes = [
            (f.device_hours[k], s.get("decode", 0.0))
            for k, s in f.devices.items()
            if k != "trainer"
        ]
        decode = sum(h * s for h, s in nodes) / max(1e-9, sum(h for h, _ in nodes))
        table.add_row(
            name,
            f"{f.step_s:.1f}",
            f"{f.speed_up:.2f}" if f.speed_up is not None else "",
            f"{100 * f.share_of_bound:.0f} %",
            f"{100 * decode:.0f} %",
            f"{100 * f.wasted_share:.0f} %",
            f"{100 * f.length_bias:+.1f} %",
            f"{100 * f.kept_at_limit:.1f} %",
            str(f.responses_moved),
            *([f"{f.cost_per_step:.3f}"] if with_cost else []),
        )
    return [table]
