"""What a run has cost, from the seconds that its nodes were there; and what a step would cost with
other nodes, as an operator sees it. Reads the core, decides nothing."""

import math
from dataclasses import replace

from lightrl.core.coordinator import Coordinator
from lightrl.core.cost_model import Outcome
from lightrl.messages.costs import CostRow, StepForecast


def cost_figures(core: Coordinator) -> dict[str, float]:
    """US$ of the whole run so far; nothing where prices are not known, or nothing was done yet."""
    prices, learned, counters = core.settings.prices, core.scaling.learned, core.table.counters
    if prices is None:
        return {}
    usd = prices.usd(learned.reserved_s, learned.preemptible_s)
    figures = {"usd": usd}
    if (tokens := counters.rollout_tokens - counters.aborted_tokens) > 0:
        figures["usd_per_million_tokens"] = 1e6 * usd / tokens
    if core.step:
        figures["usd_per_step"] = usd / core.step
    return figures


def cost_row(core: Coordinator) -> CostRow:
    figures, fleet, scaling = cost_figures(core), core.fleet, core.scaling
    now = fleet.num_preemptible
    row = CostRow(
        reserved=scaling.num_reserved,
        preemptible=now,
        usd=figures.get("usd"),
        usd_per_step=figures.get("usd_per_step"),
        usd_per_million_tokens=figures.get("usd_per_million_tokens"),
        wanted=scaling.learned.wanted if core.settings.scale_max else None,
    )
    # a run that is over has no nodes to be foreseen
    if not fleet.nodes or (forecast := scaling.forecast()) is None:
        return row
    nearby = range(max(0, now - 1), now + 3)
    outcomes = tuple(_row(forecast.outcome(n)) for n in nearby)
    return replace(row, forecast=outcomes, enough=scaling.enough(forecast))


def _row(outcome: Outcome) -> StepForecast:
    is_endless = math.isinf(outcome.step_s)  # JSON knows no infinity
    return StepForecast(
        outcome.nodes,
        None if is_endless else outcome.step_s,
        None if is_endless else outcome.usd,
    )
