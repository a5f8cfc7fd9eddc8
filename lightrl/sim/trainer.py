"""The trainer as a model: groups arrive, gradients take time, a new version is published.

Steps are trained one after the other. Without streaming, a step's work begins when all of it has
arrived. `rate` is the share of the trainer's devices that it has at the moment: 1 for devices of
its own; on those of the rollout nodes 0 while they sample, and 1/2 while half of them are released.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from lightrl.messages.training import StepDone, TrainShard
from lightrl.sim.simulation import Simulation
from lightrl.wire import num_trained

TRAINER = "trainer"  # its node


@dataclass(slots=True)
class TrainingJob:
    """The training of one step; `work_s`: what is left, with all devices."""

    step: int
    work_s: float = 0.0
    # received so far
    all_s: float = 0.0
    # all of it has arrived
    closed: bool = False
    # when the rewards are known that are computed after the rollout
    ready_at: float = 0.0


class SimTrainer:
    """`trained(done)` is called at the end of a step; `times`: state -> seconds."""

    def __init__(self, world: Simulation, trained: Callable[[StepDone], None]) -> None:
        self._world = world
        self._trained = trained
        self._streams = world.switches.streaming and world.switches.async_rewards
        self.rate = 0.0 if world.scenario.is_colocated else 1.0
        self.jobs: deque[TrainingJob] = deque()
        self.times = {"train": 0.0, "publish": 0.0, "wait": 0.0}
        self._now = 0.0
        self._publishing_until = 0.0  # of a version; no step is trained until then
        self._held_s, self._held_tokens = 0.0, 0  # work and tokens of groups that wait for others

    def train(self, shard: TrainShard, ready_at: float) -> None:
        """Add a shard to the work of its step; its groups wait for more while a micro-batch is not
        full and more shards follow. `ready_at`: when the rewards are known."""
        scenario = self._world.scenario
        training, signal = scenario.training, scenario.workload.signal
        share = signal.get(shard.step, fmean(signal.values())) if signal else 1.0
        for group in shard.groups:
            num, sampled = len(group.responses), sum(len(r.token_ids) for r in group.responses) // 4
            tokens = len(group.prompt) // 4 * num + sampled
            self._world.outcome.trained_tokens += sum(
                num_trained(r.token_ids, r.loss_mask) for r in group.responses
            )
            self._held_s += share * training.seconds(num, tokens)
            self._held_tokens += round(share * tokens)
        self.advance()
        if not self.jobs or self.jobs[-1].step != shard.step:
            self.jobs.append(TrainingJob(shard.step))
        job = self.jobs[-1]
        if shard.last or self._held_tokens >= training.wait_tokens:
            seconds = self._held_s + training.step_s * shard.last
            job.work_s += seconds
            job.all_s += seconds
            self._held_s, self._held_tokens = 0.0, 0
        job.closed = shard.last
        job.ready_at = max(job.ready_at, ready_at)
        self._plan()

    def set_rate(self, rate: float) -> None:
        self.advance()
        self.rate = rate
        self._plan()

    def publish(self, seconds: float) -> None:
        """Train nothing for so long."""
        self.advance()
        self._publishing_until = self._now + seconds
        self._plan()

    def advance(self) -> None:
        """Bring `times` and the work that is left up to date."""
        now = self._world.now
        elapsed = now - self._now
        if elapsed <= 0:
            return
        job = self.jobs[0] if self.jobs else None
        trained, publishing = 0.0, max(0.0, min(now, self._publishing_until) - self._now)
        if job is not None and self.rate > 0 and (self._streams or job.closed):
            trained = min(max(0.0, now - self._begins_at(job)), job.work_s / self.rate)
            job.work_s -= trained * self.rate
        self.times["train"] += trained
        self.times["publish"] += publishing
        self.times["wait"] += elapsed - trained - publishing
        self._now = now

    def _begins_at(self, job: TrainingJob) -> float:
        return max(self._now, job.ready_at, self._publishing_until)

    def _plan(self) -> None:
        """Schedule the end of the oldest step, at the current rate."""
        at = math.inf
        if self.jobs and self.jobs[0].closed and self.rate > 0:
            at = self._begins_at(self.jobs[0]) + self.jobs[0].work_s / self.rate
        self._world.set_alarm(TRAINER, at, self._finish)

    def _finish(self) -> None:
        """Remove the oldest step, which is trained."""
        self.advance()
        job = self.jobs.popleft()
        metrics = {"timing_s/forward_backward": job.all_s}
        self._trained(StepDone(job.step, job.step + 1, metrics))
