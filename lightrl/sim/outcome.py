"""The outcome of a simulation: one record per round, and totals of the run. Data only."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepRecord:
    """One optimizer step. Times in seconds, work in seconds of one node that the profile
    describes."""

    step: int
    kind: str
    # responses
    launched: int
    opened_at: float = 0.0
    closed_at: float = 0.0
    rollout_s: float = 0.0
    train_s: float = 0.0
    weights_s: float = 0.0
    # responses
    kept: int = 0
    kept_tokens: int = 0
    kept_longest: int = 0
    # of the longest kept response alone on a fast node
    longest_s: float = 0.0
    # the least that all kept responses take on one node
    work_s: float = 0.0
    training_s: float = 0.0
    preemptions: int = 0
    # time average; a slow node counts less
    nodes: float = 0.0
    # of these, nodes that also train
    training_nodes: float = 0.0
    parallelism: int = 1
    # prompts
    put_off: int = 0
    dropped: int = 0

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.train_s + self.weights_s

    def bound_s(self, colocated: bool, synchronous: bool = True) -> float:
        """Return the least seconds that any schedule of the same kept responses takes.

        It is the largest of: their least work over the capacity of the fleet; the longest of them
        alone on a fast node; their training. On shared GPUs work and training add up.
        """
        longest = self.longest_s if synchronous else 0.0
        work_s = self.work_s + (self.training_s * self.training_nodes if colocated else 0.0)
        return max(longest, work_s / self.nodes if self.nodes else 0.0, self.training_s)


@dataclass(slots=True)
class LengthSums:
    """Sums over responses."""

    num: int = 0
    tokens: int = 0
    at_limit: int = 0

    def add(self, tokens: int, limit: int) -> None:
        self.num += 1
        self.tokens += tokens
        self.at_limit += tokens >= limit

    def merge(self, other: "LengthSums") -> None:
        self.num += other.num
        self.tokens += other.tokens
        self.at_limit += other.at_limit

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.num)

    @property
    def share_at_limit(self) -> float:
        return self.at_limit / max(1, self.num)


@dataclass(slots=True)
class WeightsSums:
    """Sums over transfers of weights to machines."""

    num_pulls: int = 0
    pull_s: float = 0.0
    longest_pull_s: float = 0.0
    # pulled
    num_bytes: float = 0.0
    # of these: from other rollout nodes; as deltas
    peer_bytes: float = 0.0
    delta_bytes: float = 0.0
    # sent by the trainer
    trainer_bytes: float = 0.0
    # machines that got a version by broadcast; from the first byte until it is verified
    num_broadcast: int = 0
    broadcast_s: float = 0.0
    # announced, but some nodes had to pull
    num_broken: int = 0

    def add_pull(
        self, seconds: float, num_bytes: float, peer_bytes: float, delta_bytes: float
    ) -> None:
        self.num_pulls += 1
        self.pull_s += seconds
        self.longest_pull_s = max(self.longest_pull_s, seconds)
        self.num_bytes += num_bytes
        self.peer_bytes += peer_bytes
        self.delta_bytes += delta_bytes

    def add_broadcast(self, seconds: float) -> None:
        self.num_broadcast += 1
        self.broadcast_s += seconds


@dataclass(slots=True)
class SimOutcome:
    """A whole simulation."""

    elapsed_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    # kind of node -> state -> seconds
    device_times: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    # kind of node -> seconds of presence
    device_s: dict[str, float] = field(default_factory=dict[str, float])
    kept: LengthSums = field(default_factory=LengthSums)
    # all that the trained prompts launched first, aborted responses included
    launched: LengthSums = field(default_factory=LengthSums)
    weights: WeightsSums = field(default_factory=WeightsSums)
    # by all engines
    sampled_tokens: int = 0
    trained_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0
    counters: dict[str, int] = field(default_factory=dict[str, int])
    # deferred and not trained at the end
    waiting_prompts: int = 0
    winners: list[tuple[int, tuple[str, ...]]] = field(
        default_factory=list[tuple[int, tuple[str, ...]]]
    )
