"""The entities of a run and the edges between their states. Data and transitions, no policy."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from lightrl.core.nodes.speed import Speed
from lightrl.errors import InvariantViolation
from lightrl.messages.episodes import EpisodeEnded
from lightrl.messages.load import Load
from lightrl.messages.nodes import Role
from lightrl.messages.responses import FinishReason, Sampling
from lightrl.messages.weights import WeightsProgress

RoundKind: TypeAlias = Literal["plain", "short", "long", "flush", "eval"]
UNBOUNDED = sys.maxsize  # a number of tokens that no response reaches


class ResponseState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    # its environment resets or steps; it has no slot
    WAITING = "waiting"
    # finished and held here; scored or waiting for its score
    DONE = "done"
    # given up: lost its race, or its group was dropped or deferred
    ABORTED = "aborted"


class GroupState(StrEnum):
    OPEN = "open"
    # all responses to be kept are finished and scored
    COMPLETE = "complete"
    # belongs to the step, independent of the rest of the round
    ACCEPTED = "accepted"
    TRAINED = "trained"
    # lost the race of its round; its prompt waits for a long one
    DEFERRED = "deferred"
    # too few scores, or no signal
    DROPPED = "dropped"


class NodeState(StrEnum):
    JOINING = "joining"
    # receives or loads its first version
    LOADING = "loading"
    READY = "ready"
    # its devices are requested for training: the node sends its last tokens and then sleeps
    RELEASING = "releasing"
    # its engine sleeps, and its devices train
    RELEASED = "released"
    # receives or loads a newer version, or wakes
    UPDATING = "updating"
    DRAINING = "draining"
    GONE = "gone"


# states of a node whose devices train, or will train next
RESTING = {NodeState.RELEASING, NodeState.RELEASED}


class RoundState(StrEnum):
    FILLING = "filling"  # its prompts are being drawn
    RUNNING = "running"
    # every group is accepted, deferred or dropped
    CLOSED = "closed"
    TRAINED = "trained"


class RunState(StrEnum):
    # until the first version is published and a rollout node serves it
    STARTING = "starting"
    RUNNING = "running"
    EVALUATING = "evaluating"
    # nodes are leaving
    FINISHING = "finishing"
    FINISHED = "finished"
    STOPPED = "stopped"  # by an operator
    FAILED = "failed"


UNFINISHED = {ResponseState.QUEUED, ResponseState.RUNNING, ResponseState.WAITING}
OVER = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})

R, G, N, D = ResponseState, GroupState, NodeState, RoundState

# By class first: states of different entities may share a name.
EDGES: dict[type[StrEnum], dict[StrEnum, frozenset[StrEnum]]] = {
    R: {
        R.QUEUED: frozenset({R.RUNNING, R.WAITING, R.ABORTED}),
        R.RUNNING: frozenset({R.QUEUED, R.WAITING, R.DONE, R.ABORTED}),
        R.WAITING: frozenset({R.QUEUED, R.DONE, R.ABORTED}),
        R.DONE: frozenset(),
        R.ABORTED: frozenset(),
    },
    G: {
        G.OPEN: frozenset({G.COMPLETE, G.DEFERRED, G.DROPPED}),
        G.COMPLETE: frozenset({G.ACCEPTED, G.DEFERRED, G.DROPPED}),
        G.ACCEPTED: frozenset({G.TRAINED}),
        G.TRAINED: frozenset(),
        G.DEFERRED: frozenset(),
        G.DROPPED: frozenset(),
    },
    N: {
        N.JOINING: frozenset({N.LOADING, N.READY, N.RELEASING, N.RELEASED, N.DRAINING, N.GONE}),
        N.LOADING: frozenset({N.READY, N.RELEASING, N.RELEASED, N.DRAINING, N.GONE}),
        N.READY: frozenset({N.RELEASING, N.UPDATING, N.DRAINING, N.GONE}),
        N.RELEASING: frozenset({N.RELEASED, N.DRAINING, N.GONE}),
        N.RELEASED: frozenset({N.UPDATING, N.DRAINING, N.GONE}),
        N.UPDATING: frozenset({N.READY, N.RELEASING, N.RELEASED, N.DRAINING, N.GONE}),
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


@dataclass(frozen=True, slots=True)
class Turn:
    """An observation of an episode, whose tokens were inserted; sampled ones follow it.

    Example: Turn(start=0, num_inserted=9, max_new_tokens=64, digest="5f0c", record="[...]")
    """

    # index of its first token in the response
    start: int
    num_inserted: int
    # of the turn that follows
    max_new_tokens: int
    # of what the environment returned
    digest: str = ""
    # its messages as JSON, after that of the turn before it; never read in the core
    record: str = ""
    # of the turn before it; None = none was given
    reward: float | None = None
    # of the environment, if it can be saved
    state: bytes = b""
    # in the environment
    seconds: float = 0.0
    num_tool_calls: int = 0

    @property
    def end(self) -> int:
        """Index of the first token that may be sampled."""
        return self.start + self.num_inserted


def sampled_spans(turns: Sequence[Turn], num_tokens: int) -> list[tuple[int, int]]:
    """Return (start, end) of the tokens that were sampled after each observation. `num_tokens`: of
    the whole response."""
    ends = [*(turn.start for turn in turns[1:]), num_tokens]
    return [(turn.end, end) for turn, end in zip(turns, ends, strict=False)]


@dataclass(frozen=True, slots=True)
class HeldResponse:
    """The tokens of a response whose group was deferred; arrays are little-endian."""

    # int32
    tokens: bytes = b""
    # float32; empty if the response will restart
    logprobs: bytes = b""
    # as Response.starts
    starts: tuple[tuple[int, int], ...] = ()
    finish_reason: FinishReason | None = None
    # None: no score
    reward: float | None = None
    # of an episode, as in Response
    turns: tuple[Turn, ...] = ()
    finishes: tuple[FinishReason, ...] = ()
    outcome: EpisodeEnded | None = None

    @property
    def num_sampled(self) -> int:
        """Number of its tokens that a model sampled."""
        return len(self.tokens) // 4 - sum(turn.num_inserted for turn in self.turns)


@dataclass(slots=True, eq=False)
class Response:
    """The tokens sampled for one prompt by one group member; `tokens` and `logprobs` grow together.

    An episode is a response of which some tokens are inserted by its environment: see `turns`.
    """

    id: str
    group: "Group" = field(repr=False)
    index: int  # in its group
    seed: int
    state: ResponseState = ResponseState.QUEUED
    # where it runs; None unless RUNNING. An episode keeps the node of its last turn in `last_node`
    node: "Node | None" = field(default=None, repr=False)
    # number of its valid entry in the queue
    queued_as: int = 0
    # placements so far; messages about an older one are ignored
    attempt: int = 0
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    # policy version of its newest token
    version: int = -1
    # (policy version, index of its first token), in order
    starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    finish_reason: FinishReason | None = None
    reward: float | None = None
    # has a score, or will have none
    scored: bool = False
    # its group no longer depends on it
    resolved: bool = False
    # Of episodes only.
    # observations, in order
    turns: list[Turn] = field(default_factory=list[Turn])
    # of all turns
    num_inserted: int = 0
    # how it ended; None until then
    outcome: EpisodeEnded | None = None
    # the environment node that has it; None = it must be begun, or begun again
    environment: "Node | None" = field(default=None, repr=False)
    # how often it was begun; messages about an older one are ignored
    incarnation: int = 0
    # how its turns ended; one for each of `turns`, while its environment steps the last
    finishes: list[FinishReason] = field(default_factory=list[FinishReason])
    # its environment may have stepped that turn
    was_stepped: bool = False
    # name of the node that ran it last, which may hold its KV
    last_node: str = ""
    # it runs on the node that ran its last turn, under the same version
    came_back: bool = False
    # when it was placed, or given to its environment
    since: float = 0.0
    # for its environment, with the way there and back
    waited_s: float = 0.0

    def transition(self, to: ResponseState, node: "Node | None" = None) -> None:
        check_edge(self.id, self.state, to)
        self.state = to
        self.node = node

    @property
    def context(self) -> int:
        """Number of its tokens in an engine, with the prompt."""
        return len(self.group.prompt.tokens) // 4 + len(self.tokens)

    @property
    def sampled_logprobs(self) -> "array[float]":
        """Logprobs of the tokens that were sampled in its round."""
        if not self.turns:
            return self.logprobs[self.carried :]
        sampled: array[float] = array("f")
        for start, end in sampled_spans(self.turns, len(self.tokens)):
            sampled += self.logprobs[start:end]
        return sampled[self.carried :]

    @property
    def num_sampled(self) -> int:
        """Number of its tokens that a model sampled."""
        return len(self.tokens) - self.num_inserted

    @property
    def will_grow(self) -> bool:
        """Return whether it will certainly have more sampled tokens. An episode that waits may end
        with those it has."""
        return not self.finish_reason and self.state is not ResponseState.WAITING

    @property
    def max_new_tokens(self) -> int:
        """Number of tokens that may still be sampled, of an episode in this turn."""
        left = self.group.max_response_tokens - self.num_sampled
        if self.turns:
            turn = self.turns[-1]
            left = min(left, turn.max_new_tokens - (len(self.tokens) - turn.end))
        return left

    @property
    def carried(self) -> int:
        """Number of sampled tokens when its round opened, of the round that deferred its group."""
        held = self.group.held
        if self.index >= len(held):
            return 0
        return held[self.index].num_sampled if held[self.index].logprobs else 0

    @property
    def num_new(self) -> int:
        """Number of tokens sampled in its round."""
        return self.num_sampled - self.carried

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(policy version, sampled tokens), in order."""
        ends = [start for _, start in self.starts[1:]] + [len(self.tokens)]
        spans = [(v, a, z) for (v, a), z in zip(self.starts, ends, strict=False)]
        if not self.turns:
            return [(version, end - start) for version, start, end in spans]
        inserted = [
            sum(max(0, min(t.end, z) - max(t.start, a)) for t in self.turns) for _, a, z in spans
        ]
        return [(v, z - a - num) for (v, a, z), num in zip(spans, inserted, strict=True)]

    def num_before(self, version: int) -> int:
        """Number of tokens before the first that this version, or a newer one, sampled."""
        return next((start for v, start in self.starts if v >= version), len(self.tokens))


@dataclass(slots=True, eq=False)
class Group:
    """The responses sampled for one prompt in one round."""

    id: str
    prompt: DrawnPrompt
    round: "Round" = field(repr=False)
    # in its round, in the order in which prompts were drawn
    position: int
    # responses to be kept
    size: int
    # of each response
    sampling: Sampling
    max_response_tokens: int
    # placements of its responses, or episodes begun, in earlier rounds, which deferred the group
    attempts: int = 0
    # the step whose round launched it first
    since: int = 0
    # its responses when it was deferred; () = never launched before
    held: tuple[HeldResponse, ...] = ()
    # the group was deferred, and a later round continues its responses
    continues: bool = False
    responses: list[Response] = field(default_factory=list[Response])
    state: GroupState = GroupState.OPEN
    # Its race; see `race`.
    # unresolved responses
    num_open: int = 0
    # (finishing time, index) of scored responses, first first
    finishers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    # an unfinished response with this many tokens has lost
    bound: int = UNBOUNDED
    # mean length of a response, from earlier epochs
    foreseen_tokens: float | None = None
    # in an evaluation: tokens of the longest response of its set in the last one
    longest_of_set: int = 0
    # the update of its step, from 0; None until it may be trained
    mini_batch: int | None = None

    def transition(self, to: GroupState) -> None:
        check_edge(self.id, self.state, to)
        self.state = to

    @property
    def set(self) -> str:
        """Name of the evaluation set of its prompt."""
        return self.prompt.id.partition("/")[0]

    @property
    def key(self) -> str:
        """Key of its prompt in values learned from earlier rounds. Training and evaluation sets may
        have the same ids; no id contains a control character."""
        return f"\0{self.prompt.id}" if self.round.is_eval else self.prompt.id

    @property
    def kept(self) -> list[Response]:
        """Responses of a complete group to be trained, in order: the first to finish, if scored."""
        first = sorted(index for _, index in self.finishers[: self.size])
        return [r for index in first if (r := self.responses[index]).reward is not None]


@dataclass(slots=True, eq=False)
class Round:
    """The groups that feed one optimizer step, or one evaluation before step `step`."""

    kind: RoundKind
    step: int
    # prompts to be accepted
    needed: int
    prompts_launched: int
    opened_at: float
    state: RoundState = RoundState.FILLING
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    # groups with unresolved responses
    num_open: int = 0
    # in the order in which they were accepted
    accepted: list[Group] = field(default_factory=list[Group])
    # accepted groups that may be trained, in the order in which they are sent to the trainer
    in_turn: list[Group] = field(default_factory=list[Group])
    # groups of `in_turn` sent to the trainer
    num_sent: int = 0
    num_shards: int = 0
    # the last shard was sent
    is_handed_over: bool = False
    # Its race; see `race`.
    # (finishing time, position) of complete groups that may be trained, first first
    finishers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    # no response with more tokens can be kept
    cut: int = UNBOUNDED
    # the clock of a race by the clock
    num_scores: int = 0
    # rewards that were computed, and those that failed, with the reason of the first
    num_rewards: int = 0
    num_failed: int = 0
    failure: str = ""
    # complete groups at which acceptance is checked again
    recheck_at: int = 0
    closed_at: float = 0.0
    # when the version trained on it was published
    published_at: float = 0.0

    def transition(self, to: RoundState) -> None:
        check_edge(f"round of step {self.step}", self.state, to)
        self.state = to

    @property
    def is_eval(self) -> bool:
        return self.kind == "eval"

    @property
    def source(self) -> Literal["train", "eval"]:
        """Data set of its prompts."""
        return "eval" if self.is_eval else "train"

    @property
    def races(self) -> bool:
        return self.kind == "short"

    @property
    def aborted_tokens(self) -> int:
        """Tokens of a closed round whose responses are neither trained nor continued."""
        used = {r.id for g in self.accepted for r in g.kept}
        used |= {r.id for g in self.groups.values() if g.continues for r in g.responses[: g.size]}
        responses = (r for g in self.groups.values() for r in g.responses)
        return sum(r.num_sampled for r in responses if r.id not in used)

    @property
    def finishing_tokens(self) -> int:
        """Length of the longest trained response, at which the round was decided."""
        return max((r.num_sampled for g in self.accepted for r in g.kept), default=0)


@dataclass(slots=True, eq=False)
class Node:
    """A node that sent a Hello. `running` has its responses in the order of their requests."""

    name: str
    incarnation: int
    roles: tuple[Role, ...]
    slots: int
    heard_at: float
    pid: int
    host: str
    joined_at: float = 0.0
    # nodes that had joined the run before
    number: int = 0
    state: NodeState = NodeState.JOINING
    running: dict[str, Response] = field(default_factory=dict[str, Response], repr=False)
    # of an environment node: those that it has
    episodes: dict[str, Response] = field(default_factory=dict[str, Response], repr=False)
    # of a turn's prefix, the mean part whose KV the node still had when it ran the turn before
    hit_rate: float = 1.0
    # confirmed by digest
    policy_version: int | None = None
    # digest of the version that its engine has loaded from a file; "" = none, or it was broadcast
    base: str = ""
    # of the version that is being sent
    weights_failures: int = 0
    receives: bool = False  # the newest version, by broadcast
    broadcast_failures: int = 0  # in a row
    # of its engine, each a member of a broadcast group; 0 = none can receive
    num_workers: int = 0
    is_preemptible: bool = False  # may be lost at any moment
    # the trainer node whose devices it uses; "" = its own devices
    shares: str = ""
    part: int = 0  # of those devices; parts change sides separately
    # devices of its engine, which takes turns with those of other sizes; 0 = takes no turns
    parallel: int = 0
    is_asleep: bool = False  # no part of its engine is on its devices
    order: int = 0  # number of the last order to change sides
    since: float = 0.0  # time of the last change of `state`
    weights: WeightsProgress | None = None
    load: Load = field(default_factory=Load)
    loop_lag_ms: float = 0.0
    device: str = ""  # "" until its engine, or its ranks, have started
    reported_at: float | None = None  # time of the last heartbeat
    is_saving: bool = False  # its ranks are blocked until a checkpoint is written
    # accepted from the node
    num_tokens: int = 0
    # learned from its chunks
    speed: Speed = field(default_factory=Speed)
    # relative share of the work, set when the node becomes UPDATING or READY
    share: float = 0.0
    # when its running responses have sent their last tokens
    chunk_at: float | None = None
    # tokens, prompts included, that the responses running here hold
    context: int = 0

    def transition(self, to: NodeState) -> None:
        check_edge(self.name, self.state, to)
        self.state = to

    @property
    def has_file(self) -> bool:
        """Return whether it has a file of its policy_version, which others can pull."""
        return bool(self.base)

    @property
    def takes_turns(self) -> bool:
        return bool(self.shares) or self.parallel > 0

    @property
    def free(self) -> int:
        return self.slots - len(self.running)

    def observe(self, now: float, batch: int, num_tokens: int) -> None:
        """Observe a chunk of `num_tokens` of the `batch` responses that ran."""
        self.context += num_tokens
        self.num_tokens += num_tokens
        if batch and self.chunk_at is not None and now >= self.chunk_at:
            self.speed.observe(batch, now - self.chunk_at, num_tokens / batch)
        self.chunk_at = now if self.running else None
