"""A run once more, in virtual time: in its own setting, in a changed one, or as the workload of
another config.

Owns which nodes there are then. What a run says of itself is read in `recorded.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightrl.config.run_file import CONFIG_FILE, load_config
from lightrl.config.schema import Config
from lightrl.core_settings import settings_of
from lightrl.sim.baselines import Fleet, configured, outcome_of
from lightrl.sim.machines import SPOT, NodeSpec
from lightrl.sim.outcome import Outcome
from lightrl.sim.recorded import RecordedRun, changes_of, nodes_of, recorded, scenario_of
from lightrl.sim.scenario import Scenario

MOST_STEPS = 200  # by default


@dataclass(frozen=True)
class Rerun:
    run: RecordedRun
    # of the run
    config: Config
    scenario: Scenario
    specs: Mapping[str, NodeSpec]

    @property
    def num_steps(self) -> int:
        """Up to the last one of which anything is known, unless these are many."""
        return min(MOST_STEPS, self.run.steps[-1].step + 1)

    def notes(self, config: Config) -> list[str]:
        """What a simulation of this config leaves out, as the run does not tell it."""
        notes: list[str] = []
        if config.speculates != self.config.speculates:
            has = "drafts are in" if self.config.speculates else "there are no drafts in"
            notes.append(f"{has} the measured speeds, whatever speculation.enabled says now")
        if self.config.rollout.placement == "shared":
            notes.append("the run's engines shared the trainer's devices; devices are apart here")
        return notes

    def fleet(self, slots: int) -> Fleet:
        """The nodes of the run, as they came and went; those that had as many slots as its config
        says have so many."""
        usual = self.config.rollout.slots
        specs = {
            name: replace(spec, slots=slots) if spec.slots == usual else spec
            for name, spec in self.specs.items()
        }
        return Fleet((), (), changes_of(self.run, specs))

    def has_nodes_of(self, config: Config) -> bool:
        """Its own nodes are meant, not others in their place."""
        return config.rollout.nodes == self.config.rollout.nodes

    def alike(self, nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
        """These nodes, as fast as those of the run in turn."""
        known = [s for s in self.specs.values() if s.kind != SPOT] or list(self.specs.values())
        return [
            replace(node, profile=known[k % len(known)].profile) for k, node in enumerate(nodes)
        ]

    def outcome(self, num_steps: int) -> Outcome:
        """Of the first steps of the run, as it was."""
        settings = settings_of(self.config, self.scenario.workload.num_prompts)
        settings = replace(settings, num_steps=num_steps)
        return outcome_of(configured(settings), self.scenario, self.fleet(settings.slots))


def open_run(workload: str) -> Rerun | None:
    """None: it is no run, or one that does not say how fast it was. Raises SimError or
    ConfigError."""
    folder = Path(workload)
    if not workload or not (folder / CONFIG_FILE).is_file() or (run := recorded(folder)) is None:
        return None
    config = load_config(folder / CONFIG_FILE)
    return Rerun(run, config, scenario_of(run, config), nodes_of(run))
