"""The trainer as a model: groups arrive, gradients take time, a new version is published.

Steps are trained one after the other. Without streaming, a step's work begins when all of it has
arrived. `rate` is the share of the trainer's devices that it has at the moment: 1 for devices of
its own; on those of the rollout nodes 0 while they sample, and 1/2 while half of them are released.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from lightrl.messages.training import StepDone, TrainShard
from lightrl.sim.inputs.scenario import Scenario


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


@dataclass(slots=True)
class TrainerModel:
    step_s: float
    streaming: bool
    rate: float
    now: float = 0.0
    jobs: deque[TrainingJob] = field(default_factory=deque[TrainingJob])
    times: dict[str, float] = field(
        default_factory=lambda: {"train": 0.0, "publish": 0.0, "wait": 0.0}
    )
    # of a version; no step is trained until then
    publishing_until: float = 0.0
    # of groups that wait for others: seconds of work, and tokens
    _held_s: float = 0.0
    _held_tokens: int = 0

    def take(self, shard: TrainShard, scenario: Scenario) -> float:
        """Return the work that begins with this shard: its own and what waited for it; nothing
        while a micro-batch is not full and more shards follow."""
        training, signal = scenario.training, scenario.workload.signal
        share = signal.get(shard.step, fmean(signal.values())) if signal else 1.0
        for group in shard.groups:
            num, sampled = len(group.responses), sum(len(r.token_ids) for r in group.responses)
            tokens = (len(group.prompt) * num + sampled) // 4
            self._held_s += share * training.seconds(num, tokens)
            self._held_tokens += round(share * tokens)
        if not shard.last and self._held_tokens < training.wait_tokens:
            return 0.0
        seconds, self._held_s, self._held_tokens = self._held_s, 0.0, 0
        return seconds

    def add_work(self, now: float, step: int, seconds: float, last: bool, ready_at: float) -> None:
        """Add work to a step; `last` = all of it has arrived."""
        self.advance(now)
        job = self.jobs[-1] if self.jobs and self.jobs[-1].step == step else None
        if job is None:
            job = TrainingJob(step)
            self.jobs.append(job)
        seconds += self.step_s * last
        job.work_s += seconds
        job.all_s += seconds
        job.closed = last
        job.ready_at = max(job.ready_at, ready_at)

    def set_rate(self, now: float, rate: float) -> None:
        self.advance(now)
        self.rate = rate

    def advance(self, now: float) -> None:
        elapsed = now - self.now
        if elapsed <= 0:
            return
        job = self.jobs[0] if self.jobs else None
        trained, publishing = 0.0, max(0.0, min(now, self.publishing_until) - self.now)
        if job is not None and self.rate > 0 and (self.streaming or job.closed):
            trained = min(max(0.0, now - self._begins_at(job)), job.work_s / self.rate)
            job.work_s -= trained * self.rate
        self.times["train"] += trained
        self.times["publish"] += publishing
        self.times["wait"] += elapsed - trained - publishing
        self.now = now

    def done_at(self) -> float:
        """Return when the oldest step is trained, at the current rate."""
        job = self.jobs[0] if self.jobs else None
        if job is None or not job.closed or self.rate <= 0:
            return math.inf
        return self._begins_at(job) + job.work_s / self.rate

    def _begins_at(self, job: TrainingJob) -> float:
        return max(self.now, job.ready_at, self.publishing_until)

    def publish(self, now: float, seconds: float) -> None:
        self.advance(now)
        self.publishing_until = now + seconds

    def finish(self, now: float) -> StepDone:
        """Remove the oldest step, which is trained."""
        self.advance(now)
        job = self.jobs.popleft()
        return StepDone(job.step, job.step + 1, {"timing_s/forward_backward": job.all_s})
