"""What a snapshot says of costs, and of what nodes more or less would save. Plain data, as in
message.py."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepForecast:
    """A step with so many preemptible nodes. Example: StepForecast(3, 12.5, 0.04)."""

    preemptible: int
    # None: it would never end
    step_s: float | None
    # US$; None: prices are not known
    usd: float | None


@dataclass(frozen=True, slots=True)
class CostRow:
    """Of the run so far in US$, None where prices are not known; and what may be expected."""

    # nodes that take part
    reserved: int
    preemptible: int
    usd: float | None = None
    usd_per_step: float | None = None
    # that were sampled and not given up
    usd_per_million_tokens: float | None = None
    # with a preemptible node less, as it is, with one and two more; (): nothing is learned yet
    forecast: tuple[StepForecast, ...] = ()
    # preemptible nodes from which on one more saves nothing; None: nothing is learned yet
    enough: int | None = None
    # that are asked for; None: nobody asks, or nothing is learned yet
    wanted: int | None = None
