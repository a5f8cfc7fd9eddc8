"""What a step would take if no second of any device were lost, and how many devices there were.

Pure. With W engine-seconds of sampling, t_train seconds of training with all N shared devices, and
n preemptible nodes, all of one size, no step is shorter than

    max( (W + N t_train) / (N + n),  t_train,  longest )

the first of which is T* of `sharing_rules.py` plus t_train. W is reckoned at a full batch, where a
token is cheapest; `longest` is the longest response alone on a node. Switches, publishing, pulling
and loading, what is idle because a batch runs out, and all overheads are losses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightrl.sim.inputs.traces import TraceEvent
from scripts.studies.published_lib.synthetic import synthetic_trace

SHARED = 2  # devices that sample and train
NODES = 6  # preemptible ones, at most
RANKS = 2
UP_S, DOWN_S = 90.0, 45.0  # of a preemptible node, on average: four are there


@dataclass(frozen=True, slots=True)
class Workload:
    """Emulated; seconds. A decode step with B responses takes t0 (1 + B / half_batch)."""

    prompts: int = 96
    group_size: int = 8
    slots: int = 8
    t0_s: float = 0.010
    half_batch: float = 2.0
    mean_length: float = 20.0
    limit: int = 60
    # of a token, on its rank
    train_token_s: float = 0.00135
    train_step_s: float = 0.1
    version_mb: float = 100.0
    # each way of a switch, on each side; and loading a version that is here
    switch_s: float = 0.1
    load_s: float = 0.15

    @property
    def token_s(self) -> float:
        """Of an engine whose slots are all taken."""
        return self.t0_s * (1 / self.slots + 1 / self.half_batch)

    def train_s(self, tokens: float) -> float:
        return tokens * self.train_token_s / RANKS + self.train_step_s

    def longest_s(self, tokens: float) -> float:
        return tokens * self.t0_s * (1 + 1 / self.half_batch)

    def without_times(self) -> "Workload":
        """The same responses, as soon as they can be had."""
        return replace(
            self, t0_s=0.0, train_token_s=0.0, train_step_s=0.0, switch_s=0.0, load_s=0.0
        )

    def quicker(self, times: float) -> "Workload":
        """The same responses, engines and ranks so many times as fast."""
        return replace(
            self,
            t0_s=self.t0_s / times,
            train_token_s=self.train_token_s / times,
            train_step_s=self.train_step_s / times,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it was."""

    seconds: float
    # trained, of all responses; of the longest
    tokens: float
    longest: float
    # preemptible nodes, on average
    others: float


def ideal_s(work: Workload, step: Step, shared: int = SHARED) -> float:
    """Of the step, with the devices that were there while it lasted."""
    train_s = work.train_s(step.tokens)
    rollout_s = (step.tokens * work.token_s + shared * train_s) / (shared + step.others)
    return max(rollout_s, train_s, work.longest_s(step.longest))


def ratio(work: Workload, steps: Sequence[Step]) -> float:
    """Of the ideal: 1 = nothing was lost."""
    return sum(ideal_s(work, s) for s in steps) / sum(s.seconds for s in steps)


def mean_present(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Nodes that were there between two moments, on average; `spans`: from when to when each."""
    there = sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans)
    return there / (end - begin)


def trace_of(seed: int, seconds: float, times: float = 1.0) -> tuple[TraceEvent, ...]:
    """When preemptible nodes come and go, so many times as often as usual."""
    return synthetic_trace(NODES, seconds, UP_S / times, DOWN_S / times, seed)
