"""The costs in a snapshot, and what more or fewer nodes would save. Plain data, as in
message.py."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The forecast of a step with `preemptible` nodes. Example: StepForecast(3, 12.5, 0.04)."""

    preemptible: int
    # None: it would never end
    step_s: float | None
    # US$; None: prices are not known
    usd: float | None


@dataclass(frozen=True, slots=True)
class CostRow:
    """Costs of the run so far in US$, None where prices are not known, and a forecast."""

    # nodes that take part
    reserved: int
    preemptible: int
    usd: float | None = None
    usd_per_step: float | None = None
    # of those that were sampled and kept
    usd_per_million_tokens: float | None = None
    # with one preemptible node fewer, as it is, with one and two more; (): not known yet
    forecast: tuple[StepForecast, ...] = ()
    # preemptible nodes beyond which another one saves nothing; None: not known yet
    enough: int | None = None
    # preemptible nodes requested; None: there is no scale command, or not known yet
    wanted: int | None = None
