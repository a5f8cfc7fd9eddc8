"""A row to be simulated, its result, and a published figure beside ours. Values only."""

from dataclasses import dataclass

from lightrl.sim.report import Figures
from scripts.studies.published_lib.systems import System


@dataclass(frozen=True, slots=True)
class Setting:
    workload: str
    system: System
    seed: int


@dataclass(frozen=True, slots=True)
class Simulated:
    figures: Figures
    # first letters of the rounds' kinds
    kinds: str
    cost_per_s: float

    @property
    def step_s(self) -> float:
        return self.figures.step_s

    @property
    def cost_per_step(self) -> float:
        return self.cost_per_s * self.step_s


@dataclass(frozen=True, slots=True)
class Check:
    """One published figure again."""

    name: str
    published: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.published - 1
