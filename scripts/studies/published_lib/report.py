"""What `published` prints: tables for people, one JSON object for programs."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any, cast

from scripts.studies.published_lib.published import ENGINES, GROUP_SIZE, PROMPTS_PER_STEP, RLBOOST
from scripts.studies.published_lib.reproduce import EXTRA, Baseline, Reproduction
from scripts.studies.published_lib.simulated import Check
from scripts.studies.published_lib.systems import EPOCH, MOST, SPARE_NODES

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTES = f"""\
Published figures: RollPacker, arXiv 2509.21009, figure 12 and table 2. One set of parameters serves
all rows of a workload; it was fitted to these very figures, so an error here is not a prediction
error. The planner answers KV preemptions, and there are none. The step time of veRL is implied, not
published.

Systems: {PROMPTS_PER_STEP} prompts x {GROUP_SIZE} responses a step, on the devices of {ENGINES}
engines; steps of the second epoch, {EPOCH} of them. The others sample on all devices and train on
all of them, and so do LightRL's, which change sides by the core's own rule. of bound: the least
that these devices need for what was kept, against what the step took. kept, at limit: tokens
of trained responses and the share of them that was cut off; true: of the same prompts without a
race. wasted: sampled, not trained, in both epochs. + spare nodes: {SPARE_NODES} preemptible ones
more, counted in $/step. - speculation: the row above without; {{acceptance:.0%}} of drafted tokens
are accepted, which is an assumption from published figures.
"""
NOTES_ON_INSTANCES = """\
Published figures: RLBoost, arXiv 2510.19225, 14B with preemptible instances that stay, unless
something else is said. Its reserved devices sample for a window: that of its release where the
number of instances and the limit are as there, else learned by the rule that it publishes
(sharing_rules.py), and held where the number stays. Rates are those of the hardware, caches and
passes those of the release, and lengths what the data set's authors say of it; that most of their
spread is the problem's was chosen with the speed-ups in view. Reproduced means within {:.0%}.
"""
NOTES_EXTRA = """\
Not published: RLBoost and LightRL on the same preemptible instances, up to {} that come and go, at
the same prices; transfers and switches are paid for. Asked of LightRL is what stands in the column
"published". +: RLBoost with one mechanism of LightRL more. -: LightRL with all but one.
"""
CLOSE = 0.12


def as_json(results: Iterable[Reproduction]) -> dict[str, object]:
    return {
        r.workload: {
            "checks": [{**asdict(c), "error": c.error} for c in r.checks],
            "rounds": r.period,
            "systems": [{**asdict(s), "bias": s.bias} for s in r.baselines],
            "parameters": {name: asdict(cast("Any", part)) for name, part in r.parameters.items()},
        }
        for r in results
    }


def tables(result: Reproduction) -> "Iterable[RenderableType]":
    """One workload, for people."""
    yield f"{result.workload}\n"
    if result.workload == RLBOOST.workload:
        yield NOTES_ON_INSTANCES.format(CLOSE)
    elif result.workload == RLBOOST.workload + EXTRA:
        yield NOTES_EXTRA.format(MOST)
    if result.checks:
        yield _checks(result.checks)
        worst = max(result.checks, key=lambda c: abs(c.error))
        yield f"\nworst      {100 * worst.error:+.1f} %: {worst.name}"
        if result.workload == RLBOOST.workload:
            yield _reproduced(result.checks)
    yield f"rounds     {result.period}  (s short, l long)\n" if result.period else ""
    if result.baselines:
        yield _baselines(result.baselines)
        yield ""
    for name, part in result.parameters.items():
        yield f"{name:10} {_short(part)}"
    yield ""


def _reproduced(checks: Iterable[Check]) -> str:
    missed = [c.name for c in checks if abs(c.error) > CLOSE]
    names = "; ".join(missed) if missed else "none"
    return f"not within {CLOSE:.0%}: {names}"


def _checks(checks: Iterable[Check]) -> "RenderableType":
    from rich.table import Table

    table = Table("figure", "published", "ours", "error", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for c in checks:
        table.add_row(
            c.name,
            f"{c.published:g}",
            f"{c.ours:.{1 if c.published > 10 else 2}f}",
            f"{100 * c.error:+.1f} %",
        )
    return table


def _baselines(baselines: Iterable[Baseline]) -> "RenderableType":
    from rich.table import Table

    head = [
        "step_s",
        "speed-up",
        "of bound",
        "kept",
        "true",
        "bias",
        "at limit",
        "true",
        "wasted",
        "$/step",
    ]
    table = Table("system", *head, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for r in baselines:
        table.add_row(
            r.name,
            f"{r.step_s:.1f}",
            f"{r.speed_up:.2f}",
            f"{100 * r.share_of_bound:.0f} %",
            f"{r.kept_mean:.0f}",
            f"{r.true_mean:.0f}",
            f"{100 * r.bias:+.1f} %",
            f"{100 * r.kept_at_limit:.2f} %",
            f"{100 * r.true_at_limit:.2f} %",
            f"{100 * r.wasted_share:.0f} %",
            f"{r.cost_per_step:.2f}",
        )
    return table


def _short(part: object) -> str:
    """Fields that are not 0 or off, in one line; parts of parts in brackets."""
    if isinstance(part, tuple):
        return "; ".join(_short(p) for p in cast("tuple[object, ...]", part))
    if not is_dataclass(part) or isinstance(part, type):
        return f"{part:.4g}" if isinstance(part, float) else str(part)
    said: Mapping[str, object] = {f.name: getattr(part, f.name) for f in fields(part)}
    return ", ".join(f"{name} {_bracketed(value)}" for name, value in said.items() if value)


def _bracketed(value: object) -> str:
    is_part = isinstance(value, tuple) or is_dataclass(value)
    text = _short(cast("object", value))
    return f"({text})" if is_part else text
