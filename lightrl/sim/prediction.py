"""A recorded run in virtual time, with its own nodes or others, and predicted beside measured step
times."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import islice
from statistics import fmean, median

from rich.table import Table

from lightrl.core_settings import settings_of
from lightrl.sim.inputs.recorded import Record, RecordedRun
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.report import table_of
from lightrl.sim.variants import SimFleet, configured, simulate


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """Seconds of steps: means but for the median. The last four sum to the first."""

    step_s: float
    median_s: float
    rollout_s: float
    # not overlapped with the rollout
    training_s: float
    # until the version is announced
    publishing_s: float
    # until a node serves it
    weights_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a run in its own setting; `changed`: of the same run in another setting."""

    steps: int
    measured: PredictedTimes
    predicted: PredictedTimes
    # predicted / measured - 1
    error: float
    median_error: float
    changed: PredictedTimes | None = None

    def table(self, change: str) -> Table:
        """Return a table for people; `change` names the other setting."""
        names = (f.name for f in fields(PredictedTimes)[2:])
        table = table_of(f"{self.steps} steps", "step_s", "median", *names)
        table.add_row("measured", *(f"{s:.3g}" for s in astuple(self.measured)))
        table.add_row("predicted", *(f"{s:.3g}" for s in astuple(self.predicted)))
        table.add_row("", *(f"{100 * e:+.1f} %" for e in (self.error, self.median_error)))
        if self.changed is not None:
            table.add_row(change, *(f"{s:.3g}" for s in astuple(self.changed)))
            pairs = zip(astuple(self.changed), astuple(self.predicted), strict=True)
            ratios = [f"x {changed / before:.2f}" for changed, before in islice(pairs, 2)]
            table.add_row("", *ratios)
        return table


def simulate_again(run: RecordedRun, num_steps: int) -> SimOutcome:
    """Simulate the first steps of a run in its own setting."""
    settings = settings_of(run.config, run.scenario.workload.num_prompts)
    settings = replace(settings, num_steps=num_steps)
    fleet = SimFleet(run.own_nodes(settings.slots), (), run.changes)
    return simulate(configured(settings), run.scenario, fleet)


def predict(run: RecordedRun, own: SimOutcome, changed: SimOutcome | None = None) -> Prediction:
    """Compare a run with its simulation in its own setting, or the begin of it."""
    records, simulated = run.records, {s.step for s in own.steps}
    counted = [s.step for s in run.counted if s.step in simulated]
    counted = counted or [step for step in records if step in simulated]
    measured = _mean_times([_measured(records[step]) for step in counted])
    publishing_s = run.scenario.transfer.publishing_s
    predicted = _simulated(own, counted, publishing_s)
    return Prediction(
        len(counted),
        measured,
        predicted,
        predicted.step_s / measured.step_s - 1,
        predicted.median_s / measured.median_s - 1,
        _simulated(changed, counted, publishing_s) if changed is not None else None,
    )


def _simulated(outcome: SimOutcome, counted: Sequence[int], publishing_s: float) -> PredictedTimes:
    """Return the means of the same steps; of all if it has none of them."""
    rows: list[tuple[float, float, float, float]] = []
    for s in [s for s in outcome.steps if s.step in counted] or outcome.steps:
        publish_s = min(s.train_s, publishing_s)
        rows.append((s.rollout_s, s.train_s - publish_s, publish_s, s.weights_s))
    return _mean_times(rows)


def _measured(record: Record) -> tuple[float, float, float, float]:
    """Return (rollout, training, publishing, weights)."""
    train_s = record["timing_s/train_after_rollout"]
    finish_s = record.get("timing_s/finish", record.get("timing_s/publish", 0.0))
    publish_s = min(train_s, max(0.0, finish_s - record.get("timing_s/optimizer", 0.0)))
    return record["timing_s/rollout"], train_s - publish_s, publish_s, record["timing_s/weights"]


def _mean_times(rows: Sequence[tuple[float, float, float, float]]) -> PredictedTimes:
    steps = [sum(row) for row in rows]
    return PredictedTimes(fmean(steps), median(steps), *map(fmean, zip(*rows, strict=True)))
