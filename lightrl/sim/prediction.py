"""A recorded run in virtual time, with its own nodes or others, and predicted beside measured step
times."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from itertools import islice
from statistics import fmean, median
from typing import TYPE_CHECKING

from lightrl.config.schema import Config
from lightrl.core_settings import settings_of
from lightrl.sim.inputs.nodes import SPOT, NodeSpec
from lightrl.sim.inputs.recorded import Record, RecordedRun
from lightrl.sim.inputs.scenario import Scenario
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.variants import SimFleet, configured, outcome_of

if TYPE_CHECKING:
    from rich.table import Table

MAX_STEPS = 200  # by default


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

    def table(self, change: str) -> "Table":
        """Return a table for people; `change` names the other setting."""
        from rich.table import Table

        table = Table(f"{self.steps} steps", box=None)
        for name in ("step_s", "median", *(f.name for f in fields(PredictedTimes)[2:])):
            table.add_column(name, justify="right")
        table.add_row("measured", *(f"{s:.3g}" for s in astuple(self.measured)))
        table.add_row("predicted", *(f"{s:.3g}" for s in astuple(self.predicted)))
        table.add_row("", *(f"{100 * e:+.1f} %" for e in (self.error, self.median_error)))
        if self.changed is not None:
            table.add_row(change, *(f"{s:.3g}" for s in astuple(self.changed)))
            pairs = zip(astuple(self.changed), astuple(self.predicted), strict=True)
            ratios = [f"x {changed / before:.2f}" for changed, before in islice(pairs, 2)]
            table.add_row("", *ratios)
        return table


@dataclass(frozen=True)
class Rerun:
    """A recorded run as a workload."""

    run: RecordedRun

    @cached_property
    def scenario(self) -> Scenario:
        return self.run.scenario()

    @cached_property
    def specs(self) -> Mapping[str, NodeSpec]:
        return self.run.nodes()

    @property
    def num_steps(self) -> int:
        return min(MAX_STEPS, self.run.steps[-1].step + 1)

    def notes(self, config: Config) -> list[str]:
        """Return what a simulation of this config leaves out, as the run did not measure it."""
        notes: list[str] = []
        own = self.run.config
        if config.speculates != own.speculates:
            has = "drafts are in" if own.speculates else "there are no drafts in"
            notes.append(f"{has} the measured speeds, whatever speculation.enabled says now")
        if own.rollout.placement == "shared":
            notes.append("the run's engines shared the trainer's devices; devices are apart here")
        return notes

    def fleet(self, slots: int) -> SimFleet:
        """Return the nodes of the run, with the recorded times of joining and leaving. Nodes with
        the number of slots of the run's config get `slots` instead."""
        usual = self.run.config.rollout.slots
        specs = {
            name: replace(spec, slots=slots) if spec.slots == usual else spec
            for name, spec in self.specs.items()
        }
        return SimFleet((), (), self.run.changes(specs))

    def alike(self, nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
        """Return these nodes with the speeds of the run's nodes in turn."""
        known = [s for s in self.specs.values() if s.kind != SPOT] or list(self.specs.values())
        return [
            replace(node, profile=known[k % len(known)].profile) for k, node in enumerate(nodes)
        ]

    def outcome(self, num_steps: int) -> SimOutcome:
        """Simulate the first steps of the run in its own setting."""
        settings = settings_of(self.run.config, self.scenario.workload.num_prompts)
        settings = replace(settings, num_steps=num_steps)
        return outcome_of(configured(settings), self.scenario, self.fleet(settings.slots))

    def predict(self, own: SimOutcome, changed: SimOutcome | None = None) -> Prediction:
        """Compare with the simulated run in its own setting, or the begin of it."""
        records, simulated = self.run.records, {s.step for s in own.steps}
        counted = [s.step for s in self.run.counted if s.step in simulated]
        counted = counted or [step for step in records if step in simulated]
        measured = _mean_times([_measured(records[step]) for step in counted])
        predicted = self._simulated(own, counted)
        return Prediction(
            len(counted),
            measured,
            predicted,
            predicted.step_s / measured.step_s - 1,
            predicted.median_s / measured.median_s - 1,
            self._simulated(changed, counted) if changed is not None else None,
        )

    def _simulated(self, outcome: SimOutcome, counted: Sequence[int]) -> PredictedTimes:
        """Return the means of the same steps; of all if it has none of them."""
        publishing_s = self.scenario.transfer.publishing_s
        chosen = [s for s in outcome.steps if s.step in counted] or outcome.steps
        rows: list[tuple[float, float, float, float]] = []
        for s in chosen:
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
