"""The entities of a run and the edges between their states. Data and transitions, no policy."""

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from lightrl.errors import InvariantViolation
from lightrl.messages import FinishReason, Load, PublishWeights, Role, Sampling


@dataclass(frozen=True, slots=True)
class Settings:
    """What the core must know of the configuration. Lengths in tokens, times in seconds."""

    run_seed: int
    num_steps: int
    prompts_per_step: int
    group_size: int
    max_response_tokens: int
    sampling: Sampling
    eval_interval: int  # 0 = only before the first and after the last step
    num_eval_prompts: int  # 0 = no evaluation
    eval_samples: int
    eval_sampling: Sampling
    slots: int  # of a node that does not name its own
    vocabulary: int  # token ids are below it
    lease_s: float
    reward_on_failure: float | None  # None = a group with an unscored response is dropped


class ResponseState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"  # finished and held here; scored or waiting for its score
    ABORTED = "aborted"  # its round goes on, or ended, without it


class GroupState(StrEnum):
    OPEN = "open"
    COMPLETE = "complete"  # all responses finished
    SCORED = "scored"  # all responses have a reward; handed to the trainer
    TRAINED = "trained"
    DROPPED = "dropped"


class NodeState(StrEnum):
    JOINING = "joining"
    LOADING = "loading"  # its first version is on the way
    READY = "ready"
    UPDATING = "updating"  # a newer version is on the way
    DRAINING = "draining"
    GONE = "gone"


class RoundState(StrEnum):
    FILLING = "filling"  # its prompts are being drawn
    RUNNING = "running"
    CLOSED = "closed"  # every group is scored or dropped
    TRAINED = "trained"


class RunState(StrEnum):
    STARTING = "starting"  # until the first version is published and a rollout node serves it
    RUNNING = "running"
    EVALUATING = "evaluating"
    FINISHING = "finishing"  # nodes are leaving
    FINISHED = "finished"
    STOPPED = "stopped"  # by an operator
    FAILED = "failed"


R, G, N, D = ResponseState, GroupState, NodeState, RoundState

# By class first: states of different entities may share a name.
EDGES: dict[type[StrEnum], dict[StrEnum, frozenset[StrEnum]]] = {
    R: {
        R.QUEUED: frozenset({R.RUNNING, R.ABORTED}),
        R.RUNNING: frozenset({R.QUEUED, R.DONE, R.ABORTED}),
        R.DONE: frozenset(),
        R.ABORTED: frozenset(),
    },
    G: {
        G.OPEN: frozenset({G.COMPLETE, G.DROPPED}),
        G.COMPLETE: frozenset({G.SCORED, G.DROPPED}),
        G.SCORED: frozenset({G.TRAINED}),
        G.TRAINED: frozenset(),
        G.DROPPED: frozenset(),
    },
    N: {
        N.JOINING: frozenset({N.LOADING, N.READY, N.DRAINING, N.GONE}),
        N.LOADING: frozenset({N.READY, N.DRAINING, N.GONE}),
        N.READY: frozenset({N.UPDATING, N.DRAINING, N.GONE}),
        N.UPDATING: frozenset({N.READY, N.DRAINING, N.GONE}),
        N.DRAINING: frozenset({N.GONE}),
        N.GONE: frozenset(),
    },
    D: {
        D.FILLING: frozenset({D.RUNNING}),
        D.RUNNING: frozenset({D.CLOSED}),
        D.CLOSED: frozenset({D.TRAINED}),
        D.TRAINED: frozenset(),
    },
}


def check_edge(name: str, before: StrEnum, after: StrEnum) -> None:
    if after not in EDGES[type(before)][before]:
        raise InvariantViolation(f"{name}: {before} -> {after}")


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """One prompt as the core sees it. `tokens` is raw int32."""

    id: str
    epoch: int
    tokens: bytes


@dataclass(slots=True)
class Response:
    """The tokens sampled for one prompt by one group member; `tokens` and `logprobs` grow together."""

    id: str
    group: str
    seed: int
    state: ResponseState = ResponseState.QUEUED
    node: str | None = None  # where it runs; None unless RUNNING
    attempt: int = 0  # placements so far; news of an older one is ignored
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: list[tuple[int, int]] = field(
        default_factory=list[tuple[int, int]]
    )  # (policy version, tokens), in order
    finish_reason: FinishReason | None = None
    reward: float | None = None
    scored: bool = False

    def move(self, to: ResponseState, node: str | None = None) -> None:
        check_edge(self.id, self.state, to)
        self.state = to
        self.node = node

    def append(self, policy_version: int, tokens: "array[int]", logprobs: "array[float]") -> None:
        """Tokens of one version, all of them new."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        if self.spans and self.spans[-1][0] == policy_version:
            self.spans[-1] = (policy_version, self.spans[-1][1] + len(tokens))
        elif tokens:
            self.spans.append((policy_version, len(tokens)))


@dataclass(slots=True)
class Group:
    """The responses sampled for one prompt in one round."""

    id: str
    prompt: DrawnPrompt
    responses: list[Response]
    state: GroupState = GroupState.OPEN

    def move(self, to: GroupState) -> None:
        check_edge(self.id, self.state, to)
        self.state = to


@dataclass(slots=True)
class Round:
    """The groups that feed one optimizer step, or one evaluation of the policy before step `step`."""

    kind: str  # "short" or "eval"
    step: int
    policy_version: int
    sampling: Sampling
    needed: int  # prompts
    group_size: int
    opened_at: float
    state: RoundState = RoundState.FILLING
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    num_settled: int = 0  # groups scored or dropped
    num_scored: int = 0
    num_shards: int = 0  # sent to the trainer
    closed_at: float = 0.0
    published_at: float = 0.0  # when the version that it was trained into appeared

    def move(self, to: RoundState) -> None:
        check_edge(f"round of step {self.step}", self.state, to)
        self.state = to

    @property
    def is_eval(self) -> bool:
        return self.kind == "eval"


@dataclass(slots=True)
class Node:
    """A daemon that said hello. `running` holds response ids in the order they were sent."""

    name: str
    incarnation: int
    roles: tuple[Role, ...]
    slots: int
    heard_at: float
    pid: int
    host: str
    state: NodeState = NodeState.JOINING
    running: dict[str, None] = field(default_factory=dict[str, None])
    policy_version: int | None = None  # confirmed by digest
    weights_failures: int = 0  # of the version on its way
    load: Load = field(default_factory=Load)
    loop_lag_ms: float = 0.0
    device: str = ""
    num_tokens: int = 0  # accepted from it

    def move(self, to: NodeState) -> None:
        check_edge(self.name, self.state, to)
        self.state = to

    def serves(self, policy_version: int) -> bool:
        return self.state is NodeState.READY and self.policy_version == policy_version


@dataclass(slots=True)
class Counters:
    """What happened in the run so far; all of it is shown to operators."""

    nodes_lost: int = 0
    responses_moved: int = 0  # resumed elsewhere from their tokens
    chunks_ignored: int = 0  # of attempts given up
    holes: int = 0  # chunks with tokens missing before them
    bad_chunks: int = 0  # wrong version, digest or size; the sender is lost
    rewards_failed: int = 0
    groups_dropped: int = 0
    rollout_tokens: int = 0  # accepted for training rounds
    eval_tokens: int = 0
    aborted_tokens: int = 0  # accepted, then given up with their group
    trained_responses: int = 0


@dataclass(slots=True)
class Published:
    """The newest complete version of the weights."""

    message: PublishWeights

    @property
    def policy_version(self) -> int:
        return self.message.manifest.policy_version

    @property
    def digest(self) -> str:
        return self.message.manifest.digest


def sample_seed(run_seed: int, response: str) -> int:
    """Seed of a response's noise, 0 <= seed < 2**63: with the position it determines every sampled token."""
    digest = hashlib.blake2b(f"{run_seed} {response}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
