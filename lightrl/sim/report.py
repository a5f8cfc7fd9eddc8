"""The report of a simulation: figures, tables for people, and one JSON object."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from rich.console import RenderableType
from rich.table import Table

from lightrl.sim.inputs.scenario import Scenario
from lightrl.sim.outcome import SimOutcome, StepRecord

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Means over the rounds of one kind, of what `StepRecord` has of each."""

    rounds: int
    step_s: float
    rollout_s: float
    train_s: float
    weights_s: float
    bound_s: float
    # of the kept responses
    longest_tokens: float
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class WeightsFigures:
    """How new weights reached the nodes. Seconds are means, except for the longest."""

    pulls: int
    pull_s: float
    longest_pull_s: float
    # share of the pulled bytes from other rollout nodes; as deltas to an older version
    from_peers: float
    as_deltas: float
    # bytes that the trainer sent to pulling nodes, over those of the published versions
    trainer_versions: float
    # nodes that got a version by broadcast
    broadcasts: int
    broadcast_s: float
    # groups that lost a member
    broken_broadcasts: int


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """Means over the episodes that ended. Lengths and prefills are of all, also of aborted ones."""

    episodes: int
    turns: float
    environment_s: float
    observation_tokens: float
    # tokens that engines prefilled, over those that were sampled and inserted
    prefilled: float


@dataclass(frozen=True, slots=True)
class Figures:
    """All of one simulation. Shares are between 0 and 1, costs in dollars."""

    workload: str
    steps: int
    step_s: float
    # relative to the synchronous baseline on the same devices
    speed_up: float | None
    bound_s: float
    # bound_s / step_s
    share_of_bound: float
    # trained
    responses_per_s: float
    tokens_per_s: float
    kinds: dict[str, RoundFigures]
    # kind of node -> state -> share of its time
    devices: dict[str, dict[str, float]]
    device_hours: dict[str, float]
    # share of the slots in use
    slots_busy: float
    weights: WeightsFigures
    # None: single turns
    episodes: EpisodeFigures | None
    migrations: int
    responses_moved: int
    nodes_lost: int
    preemptions: int
    sampled_tokens: int
    trained_tokens: int
    # of the sampled tokens
    wasted_share: float
    prefilled_tokens: int
    # tokens of a trained response, mean
    kept_mean: float
    # of all responses that the same prompts launched first: the mean without a race
    true_mean: float
    # kept_mean / true_mean - 1
    length_bias: float
    kept_at_limit: float
    true_at_limit: float
    # deferred at the end; their responses are in neither mean
    prompts_waiting: int
    cost: float
    cost_per_step: float
    tokens_per_dollar: float | None


def figures(
    outcome: SimOutcome, scenario: Scenario, baseline_step_s: float | None = None
) -> Figures:
    steps = outcome.steps
    step_s = outcome.step_s
    total_s = sum(s.step_s for s in steps)
    hours = {kind: seconds / HOUR_S for kind, seconds in outcome.device_s.items()}
    cost = sum(h * scenario.prices.of(kind) for kind, h in hours.items())
    bound_s = fmean(s.bound_s for s in steps)
    kept_mean, true_mean = (_mean_length(lengths) for lengths in (outcome.kept, outcome.launched))
    return Figures(
        workload=scenario.workload.name,
        steps=len(steps),
        step_s=step_s,
        speed_up=baseline_step_s / step_s if baseline_step_s is not None else None,
        bound_s=bound_s,
        share_of_bound=bound_s / step_s,
        responses_per_s=sum(s.kept for s in steps) / total_s,
        tokens_per_s=outcome.trained_tokens / total_s,
        kinds=_by_kind(steps),
        devices={
            kind: {label: s / total for label, s in times.items() if s} if total else {}
            for kind, times in outcome.device_times.items()
            for total in [outcome.device_s[kind]]
        },
        device_hours=hours,
        slots_busy=outcome.slots_busy,
        weights=_weights(outcome, scenario),
        episodes=_episodes(outcome) if outcome.episodes else None,
        migrations=outcome.counters["migrations"],
        responses_moved=outcome.counters["responses_moved"],
        nodes_lost=outcome.counters["nodes_lost"],
        preemptions=outcome.preemptions,
        sampled_tokens=outcome.sampled_tokens,
        trained_tokens=outcome.trained_tokens,
        wasted_share=1 - outcome.trained_tokens / max(1, outcome.sampled_tokens),
        prefilled_tokens=outcome.prefilled_tokens,
        kept_mean=kept_mean,
        true_mean=true_mean,
        length_bias=kept_mean / true_mean - 1 if true_mean else 0.0,
        kept_at_limit=_share_at_limit(outcome.kept, outcome.limit),
        true_at_limit=_share_at_limit(outcome.launched, outcome.limit),
        prompts_waiting=outcome.waiting_prompts,
        cost=cost,
        cost_per_step=cost / len(steps),
        tokens_per_dollar=outcome.trained_tokens / cost if cost else None,
    )


def _mean_length(lengths: Counter[int]) -> float:
    return sum(lengths.elements()) / max(1, lengths.total())


def _share_at_limit(lengths: Counter[int], limit: int) -> float:
    return sum(num for n, num in lengths.items() if n >= limit) / max(1, lengths.total())


def _by_kind(steps: Sequence[StepRecord]) -> dict[str, RoundFigures]:
    by_kind: dict[str, list[StepRecord]] = {}
    for step in steps:
        by_kind.setdefault(step.kind, []).append(step)
    names = [f.name for f in fields(RoundFigures)][1:]
    return {
        kind: RoundFigures(len(mine), *(fmean(getattr(s, name) for s in mine) for name in names))
        for kind, mine in by_kind.items()
    }


def _weights(outcome: SimOutcome, scenario: Scenario) -> WeightsFigures:
    pulls, broadcasts_s = outcome.pulls, outcome.broadcasts_s
    pulled = sum(p.num_bytes for p in pulls) or 1.0
    published = (len(outcome.steps) + 1) * scenario.transfer.num_bytes
    return WeightsFigures(
        pulls=len(pulls),
        pull_s=fmean(p.seconds for p in pulls) if pulls else 0.0,
        longest_pull_s=max((p.seconds for p in pulls), default=0.0),
        from_peers=sum(p.peer_bytes for p in pulls) / pulled,
        as_deltas=sum(p.delta_bytes for p in pulls) / pulled,
        trainer_versions=outcome.trainer_bytes / published if published else 0.0,
        broadcasts=len(broadcasts_s),
        broadcast_s=fmean(broadcasts_s) if broadcasts_s else 0.0,
        broken_broadcasts=outcome.num_broken,
    )


def _episodes(outcome: SimOutcome) -> EpisodeFigures:
    num, length = outcome.episodes, outcome.sampled_tokens + outcome.inserted_tokens
    return EpisodeFigures(
        episodes=num,
        turns=outcome.turns / num,
        environment_s=outcome.environment_s / num,
        observation_tokens=outcome.inserted_tokens / num,
        prefilled=outcome.prefilled_tokens / length,
    )


def tables(figures: Figures) -> list[RenderableType]:
    """Return tables of one simulation for people."""
    head = ["rounds", "step_s", "rollout_s", "train_s", "weights_s", "bound_s", "longest", "mean"]
    rounds = table_of("round", *head)
    for kind, k in figures.kinds.items():
        times = (k.step_s, k.rollout_s, k.train_s, k.weights_s, k.bound_s)
        tokens = (f"{k.longest_tokens:,.0f}", f"{k.mean_tokens:,.0f}")
        rounds.add_row(kind, str(k.rounds), *(f"{t:.1f}" for t in times), *tokens)
    labels = list(dict.fromkeys(label for shares in figures.devices.values() for label in shares))
    devices = table_of("time of", "hours", *labels)
    for kind, shares in figures.devices.items():
        cells = (f"{100 * shares[label]:.1f} %" if label in shares else "" for label in labels)
        devices.add_row(kind, f"{figures.device_hours[kind]:.2f}", *cells)
    return [rounds, "", devices, "", "\n".join(_lines(figures))]


def table_of(name: str, *columns: str) -> Table:
    table = Table(name, box=None)
    for column in columns:
        table.add_column(column, justify="right")
    return table


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
    if (e := f.episodes) is not None:
        lines.append(
            f"episodes   {e.episodes:,} of {e.turns:.1f} turns, each {e.environment_s:.3g} s in "
            f"environments and {e.observation_tokens:,.0f} observed tokens"
        )
        lines.append(
            f"prefill    {e.prefilled:.2f} x the tokens of the episodes; "
            f"{100 * f.slots_busy:.0f} % of the slots were busy"
        )
    w = f.weights
    if w.pulls:
        lines.append(
            f"weights    {w.pulls} pulls, {w.pull_s:.3g} s on average, {w.longest_pull_s:.3g} s at "
            f"most; {100 * w.from_peers:.0f} % of the bytes from peers, the trainer sent each "
            f"version {w.trainer_versions:.1f} times"
            + (f"; {100 * w.as_deltas:.0f} % as deltas" if w.as_deltas else "")
        )
    if w.broadcasts or w.broken_broadcasts:
        lines.append(
            f"broadcast  to {w.broadcasts} nodes, {w.broadcast_s:.3g} s each; "
            f"{w.broken_broadcasts} broken"
        )
    if f.cost:
        lines.append(f"cost       ${f.cost:,.2f}, ${f.cost_per_step:.3f} a step")
    return lines


def comparison(named: Mapping[str, Figures]) -> Table:
    """Return a table of several simulations of the same run, one a row."""
    head = ["step_s", "speed-up", "of_bound", "decode", "wasted", "bias", "at_limit", "moves"]
    with_cost = any(f.cost for f in named.values())
    table = table_of("mechanism", *head, *(["$/step"] if with_cost else []))
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
    return table
