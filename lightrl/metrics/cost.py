"""What a run has cost, what a step would cost with other nodes, and what devices that are used in
turn did in a step. Reads the core.
"""

import math
from dataclasses import replace
from itertools import islice

from lightrl.core.coordinator import Coordinator
from lightrl.core.nodes.cost_model import Outcome
from lightrl.messages.snapshot import CostRow, StepForecast

MAX_DEVICE_FIGURES = 512  # of single nodes; the size of a message is limited


def cost_figures(core: Coordinator) -> dict[str, float]:
    """Return US$ of the whole run so far; nothing where prices are not known."""
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
    # after the end of a run there are no nodes
    if not fleet.nodes or (forecast := scaling.forecast()) is None:
        return row
    nearby = range(max(0, now - 1), now + 3)
    outcomes = tuple(_row(forecast.outcome(n)) for n in nearby)
    return replace(row, forecast=outcomes, enough=scaling.enough(forecast))


def _row(outcome: Outcome) -> StepForecast:
    is_endless = math.isinf(outcome.step_s)  # JSON has no infinity
    return StepForecast(
        outcome.nodes,
        None if is_endless else outcome.step_s,
        None if is_endless else outcome.usd,
    )


def turns_figures(core: Coordinator, step: int) -> dict[str, float]:
    """Return figures of the step that closed last, for devices that engines and training ranks, or
    engines of several sizes, use in turn."""
    figures = {f"planner/{name}": value for name, value in core.sizes.figures(step).items()}
    if core.fleet.devices.nodes:
        figures |= {f"offload/{name}": value for name, value in core.colocation.figures.items()}
        seconds = islice(core.colocation.device_s.items(), MAX_DEVICE_FIGURES)
        figures |= {f"device_s/{name}": value for name, value in seconds}
    return figures
