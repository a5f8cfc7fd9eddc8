"""The outcome of a simulation: one record per round, and totals of the run. Data only."""

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from lightrl.sim.weights.swarm import SimPull


@dataclass(slots=True)
class StepRecord:
    """One optimizer step. Times in seconds, work in seconds of one node that the profile
    describes."""

    step: int
    kind: str
    opened_at: float = 0.0
    rollout_s: float = 0.0
    train_s: float = 0.0
    weights_s: float = 0.0
    # responses
    kept: int = 0
    kept_tokens: int = 0
    longest_tokens: int = 0
    # of the longest kept response alone on a fast node
    longest_s: float = 0.0
    # the least that all kept responses take on one node
    work_s: float = 0.0
    training_s: float = 0.0
    # the least that any schedule of the same kept responses takes
    bound_s: float = 0.0
    preemptions: int = 0
    # time average; a slow node counts less
    nodes: float = 0.0
    # of these, nodes that also train
    training_nodes: float = 0.0
    parallelism: int = 1

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.train_s + self.weights_s

    @property
    def mean_tokens(self) -> float:
        return self.kept_tokens / max(1, self.kept)


@dataclass(slots=True)
class SimOutcome:
    """A whole simulation."""

    elapsed_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    # kind of node -> state -> seconds
    device_times: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    # limit of a response
    limit: int = 0
    # length of a trained response -> number
    kept: Counter[int] = field(default_factory=Counter[int])
    # of all that the trained prompts launched first, aborted responses included
    launched: Counter[int] = field(default_factory=Counter[int])
    # complete ones
    pulls: list[SimPull] = field(default_factory=list[SimPull])
    # bytes that the trainer sent
    trainer_bytes: float = 0.0
    # of each member of each broadcast: from the first byte until it is verified
    broadcasts_s: list[float] = field(default_factory=list[float])
    # broadcasts that were announced, but some nodes had to pull
    num_broken: int = 0
    # by all engines
    sampled_tokens: int = 0
    trained_tokens: int = 0
    prefilled_tokens: int = 0
    # share of the slots that were in use, while their nodes were present
    slots_busy: float = 0.0
    # that have ended
    episodes: int = 0
    # of all episodes: observations, their tokens, seconds in environments
    turns: int = 0
    inserted_tokens: int = 0
    environment_s: float = 0.0
    preemptions: int = 0
    # of the core
    counters: dict[str, int] = field(default_factory=dict[str, int])
    # deferred and not trained at the end
    waiting_prompts: int = 0
    # ids of the trained responses of each step
    winners: list[tuple[int, tuple[str, ...]]] = field(
        default_factory=list[tuple[int, tuple[str, ...]]]
    )

    @property
    def step_s(self) -> float:
        return fmean(s.step_s for s in self.steps)

    @property
    def device_s(self) -> dict[str, float]:
        """Kind of node -> seconds of presence."""
        return {kind: sum(times.values()) for kind, times in self.device_times.items()}
