"""What is predicted of a run's own setting beside what it measured, and what a change would bring.

Owns the comparison, step by step, and the table of it. Simulates nothing itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from lightrl.sim.outcome import Outcome
from lightrl.sim.recorded import RecordedRun
from lightrl.sim.scenario import Scenario

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of steps: means but for the median. The last four sum to the first."""

    step_s: float
    median_s: float
    rollout_s: float
    # not hidden behind the rollout
    training_s: float
    # a version, until it is announced
    publishing_s: float
    # until a node serves it
    weights_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a run, as it was; `changed`: of the same run, were it otherwise."""

    steps: int
    measured: StepTimes
    predicted: StepTimes
    # predicted / measured - 1
    error: float
    median_error: float
    # mean of the same of each step, without signs
    error_of_each: float
    changed: StepTimes | None = None


def predict(
    run: RecordedRun, scenario: Scenario, own: Outcome, changed: Outcome | None = None
) -> Prediction:
    """`own`: the simulated run of the same setting, or the begin of it."""
    step_s = {s.step: s.step_s for s in own.steps}
    counted = [k for k in run.counted if k in step_s] or [k for k in run.records if k in step_s]
    measured = _times([_measured(run.records[k]) for k in counted])
    predicted = _simulated(own, scenario, counted)
    each = (abs(step_s[k] / run.records[k]["timing_s/step"] - 1) for k in counted)
    return Prediction(
        len(counted),
        measured,
        predicted,
        predicted.step_s / measured.step_s - 1,
        predicted.median_s / measured.median_s - 1,
        fmean(each),
        _simulated(changed, scenario, counted) if changed is not None else None,
    )


def _measured(record: Mapping[str, float]) -> tuple[float, float, float, float]:
    """(rollout, training, publishing, weights)"""
    train_s = record["timing_s/train_after_rollout"]
    finish_s = record.get("timing_s/finish", record.get("timing_s/publish", 0.0))
    publishing_s = min(train_s, max(0.0, finish_s - record.get("timing_s/optimizer", 0.0)))
    weights_s = record["timing_s/weights"]
    return record["timing_s/rollout"], train_s - publishing_s, publishing_s, weights_s


def _simulated(outcome: Outcome, scenario: Scenario, counted: Sequence[int]) -> StepTimes:
    """Of the same steps; of all if it has none of them."""
    publish_s = scenario.transfer.publishing_s
    chosen = [s for s in outcome.steps if s.step in set(counted)] or outcome.steps
    rows = [
        (s.rollout_s, s.train_s - min(s.train_s, publish_s), min(s.train_s, publish_s), s.weights_s)
        for s in chosen
    ]
    return _times(rows)


def _times(rows: Sequence[tuple[float, float, float, float]]) -> StepTimes:
    steps, columns = [sum(row) for row in rows], list(zip(*rows, strict=True))
    rollout, training, publishing, weights = map(fmean, columns)
    return StepTimes(fmean(steps), median(steps), rollout, training, publishing, weights)


def comparison_table(prediction: Prediction, change: str = "") -> "Table":
    """For people; `change` names what is otherwise."""
    from rich.table import Table

    table = Table(f"{prediction.steps} steps", box=None)
    for name in ("step_s", "median", "rollout_s", "training_s", "publishing_s", "weights_s"):
        table.add_column(name, justify="right")
    measured, predicted = prediction.measured, prediction.predicted
    table.add_row("measured", *_cells(measured))
    table.add_row("predicted", *_cells(predicted))
    errors = prediction.error, prediction.median_error
    table.add_row("", *(f"{100 * error:+.1f} %" for error in errors))
    if prediction.changed is not None:
        table.add_row(change, *_cells(prediction.changed))
        ratios = (
            prediction.changed.step_s / predicted.step_s,
            prediction.changed.median_s / predicted.median_s,
        )
        table.add_row("", *(f"x {ratio:.2f}" for ratio in ratios))
    return table


def _cells(times: StepTimes) -> list[str]:
    parts = (times.rollout_s, times.training_s, times.publishing_s, times.weights_s)
    return [f"{seconds:.3g}" for seconds in (times.step_s, times.median_s, *parts)]
