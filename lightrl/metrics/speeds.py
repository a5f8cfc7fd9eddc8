"""Record how fast nodes, rewards and shards were in a step: speeds.jsonl, from which a simulation
of the run is made (`sim/inputs/recorded.py`).

Reads each event before the core handles it, and the commands after it. Stores sums, not estimates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightrl.core.commands import CloseRound, CloseStep, Command, ScoreResponse, Send
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import (
    Event,
    MessageArrived,
    NodeDraining,
    NodeLeft,
    PromptsDrawn,
    ResponseScored,
    ShardLeft,
)
from lightrl.core.state import Node
from lightrl.messages.responses import Abort, Generate, ResponseRequest, TokenChunk
from lightrl.messages.training import TrainShard
from lightrl.messages.weights import PublishWeights, WeightsReady
from lightrl.metrics.chunk_window import ENOUGH_STEPS, MOST, ChunkWindow, size_of

MAX_STARTS = 8  # stored of a node in a step
DIGITS = 6  # after the point; more would be noise, and half of the file
READY, LEFT, LOST = "ready", "left", "lost"
TOKEN_BYTES = 4
ORDERS = (Send, CloseRound)  # that begin or end something


class Start(NamedTuple):
    """An idle node got work. Example: Start(0.12, 940, 3, 64)"""

    # until most of its responses had tokens
    seconds: float
    # of prompts and prefixes that it prefilled first, a prompt once for all siblings
    prefill_tokens: int
    # of each response in that time
    steps: int
    batch: int


class Decoded(NamedTuple):
    """Sums over the time in which about as many responses ran."""

    # batch x response_s
    weighted: float = 0.0
    # batch x seconds
    response_s: float = 0.0
    tokens: int = 0

    @property
    def batch(self) -> float:
        return self.weighted / self.response_s

    def plus(self, other: "Decoded") -> "Decoded":
        return Decoded(
            self.weighted + other.weighted,
            self.response_s + other.response_s,
            self.tokens + other.tokens,
        )


@dataclass(slots=True)
class NodeSpeeds:
    """One node in a step. Seconds are measured by the coordinator."""

    slots: int
    preemptible: bool = False
    # by size of batch: see `chunk_window.size_of`
    decoded: dict[int, Decoded] = field(default_factory=dict[int, Decoded])
    starts: list[Start] = field(default_factory=list[Start])
    # of each version: from its offer until it was served
    load_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class RewardSpeed:
    """Times of the responses that were scored."""

    num: int = 0
    # of calls of the functions, divided among the responses of each: sum, of squares, longest
    seconds: float = 0.0
    squares: float = 0.0
    longest_s: float = 0.0
    # responses that waited for no other: their number, and the seconds in addition to the call
    num_alone: int = 0
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepSpeeds:
    """A line of speeds.jsonl."""

    step: int
    num_prompts: int
    nodes: dict[str, NodeSpeeds]
    # [seconds since the step began, node, "ready" | "left" | "lost"]
    changes: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    # prompts and their epochs, launched or deferred unlaunched
    drawn: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    rewards: RewardSpeed = field(default_factory=RewardSpeed)
    # of each shard: from the coordinator to the trainer
    shard_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class _Watched:
    """A present node, and what it does."""

    incarnation: int
    speed: NodeSpeeds
    window: ChunkWindow = field(default_factory=ChunkWindow)
    # in the chunks of the window so far
    tokens: int = 0
    runs: bool = False
    # it was idle then, and most of its responses have no tokens since
    started_at: float | None = None
    prefill_tokens: int = 0
    steps: int = 0
    is_ready: bool = False
    # version -> when it was first offered
    offered: dict[int, float] = field(default_factory=dict[int, float])

    def rest(self) -> None:
        """Mark the node as idle."""
        self.window.pause()
        self.tokens, self.runs, self.started_at = 0, False, None


class _Chunk(NamedTuple):
    """Tokens of a node that the core is about to handle, and the node as it is until then."""

    tokens: TokenChunk
    node: Node
    watched: _Watched
    batch: int
    num_tokens: int
    counts: bool


class SpeedRecorder:
    """Measures the current step. Call `before`, `core.handle` and `after` for each event."""

    def __init__(self) -> None:
        self._now = 0.0  # of the current event
        self._chunk: _Chunk | None = None  # the current event, if it brings tokens
        self._nodes: dict[str, _Watched] = {}
        self._gone: dict[str, NodeSpeeds] = {}  # in this step
        self._num_joined = self._num_nodes = 0
        self._changes: list[tuple[float, str, str]] = []
        self._drawn: list[tuple[str, int]] = []
        self._rewards = RewardSpeed()
        self._submitted: dict[str, tuple[float, bool]] = {}  # response -> (when, alone?)
        self._called_s: dict[str, float] = {}  # response -> seconds of its reward function
        self._shards: dict[tuple[int, int], float] = {}
        self._shard_s: list[float] = []

    def before(self, core: Coordinator, event: Event, now: float) -> None:
        """Record an event that the core is about to handle."""
        self._now, self._chunk = now, None
        if isinstance(event, MessageArrived) and isinstance(event.message, TokenChunk):
            node, watched = core.fleet.nodes.get(event.node), self._nodes.get(event.node)
            if node is not None and watched is not None:  # most events
                batch, counts = len(node.running), not core.table.is_evaluating
                tokens = event.message
                self._chunk = _Chunk(tokens, node, watched, batch, node.num_tokens, counts)
        elif isinstance(event, ResponseScored):
            self._scored(event.response, now)
        else:
            self._event(core, event, now)

    def after(self, core: Coordinator, event: Event, commands: Sequence[Command]) -> None:
        """Record the effects of the event that the core has handled."""
        now, fleet = self._now, core.fleet
        if self._chunk is not None:
            self._tokens(self._chunk, now)
        if fleet.num_joined != self._num_joined or len(fleet.nodes) != self._num_nodes:
            self._num_joined, self._num_nodes = fleet.num_joined, len(fleet.nodes)
            self._update_nodes(fleet.nodes, LEFT if isinstance(event, NodeLeft) else LOST, now)
        for command in commands:  # a match of each would take long, and few matter here
            if isinstance(command, ScoreResponse):
                self._submit(command, now)
            elif type(command) in ORDERS:
                self._ordered(core, command, now)

    def _tokens(self, chunk: _Chunk, now: float) -> None:
        tokens, node, watched, batch, before, counts = chunk
        if counts and (num_new := node.num_tokens - before):
            _take(watched, tokens, batch, num_new, now)
        if not node.running:
            watched.rest()

    def called(self, response: str, seconds: float) -> None:
        """Store how long its reward function took, before the response is scored."""
        self._called_s[response] = seconds

    def close_step(self, core: Coordinator, step: CloseStep) -> StepSpeeds:
        began = self._now - (step.rollout_s + step.train_s + step.weights_s)
        speeds = self._gone | {name: watched.speed for name, watched in self._nodes.items()}
        line = StepSpeeds(
            step.step,
            core.settings.num_prompts,
            {name: _row(speed) for name, speed in speeds.items()},
            [(_rounded(at - began), name, what) for at, name, what in self._changes],
            self._drawn,
            self._rewards,
            [_rounded(s) for s in self._shard_s],
        )
        for watched in self._nodes.values():
            old = watched.speed
            watched.speed = NodeSpeeds(old.slots, old.preemptible)
        self._gone, self._changes, self._shard_s, self._drawn = {}, [], [], []
        self._rewards = RewardSpeed()
        open_ones = core.table.responses
        self._submitted = {r: s for r, s in self._submitted.items() if r in open_ones}
        self._called_s.clear()
        return line

    # Events of the core

    def _event(self, core: Coordinator, event: Event, now: float) -> None:
        match event:
            case MessageArrived(name, WeightsReady(version)):
                self._confirmed(name, version, now)
            case ShardLeft(step, index):
                if (sent_at := self._shards.pop((step, index), None)) is not None:
                    self._shard_s.append(now - sent_at)
            case NodeDraining(name):
                self._leaves(name, LEFT, now)
            case PromptsDrawn(prompts) if core.steps.draws and not core.steps.draws[0].is_eval:
                self._drawn += [(prompt.id, prompt.epoch) for prompt in prompts]
            case _:
                pass

    def _update_nodes(self, nodes: dict[str, Node], why: str, now: float) -> None:
        for name, watched in list(self._nodes.items()):
            node = nodes.get(name)
            if node is None or node.incarnation != watched.incarnation:
                self._leaves(name, why, now)
                self._gone[name] = self._nodes.pop(name).speed
        for name, node in nodes.items():
            if name not in self._nodes and "rollout" in node.roles:
                speed = self._gone.pop(name, None) or NodeSpeeds(node.slots, node.is_preemptible)
                self._nodes[name] = _Watched(node.incarnation, speed)

    def _leaves(self, name: str, why: str, now: float) -> None:
        watched = self._nodes.get(name)
        if watched is not None and watched.is_ready:
            watched.is_ready = False
            self._changes.append((now, name, why))

    def _confirmed(self, name: str, version: int, now: float) -> None:
        watched = self._nodes.get(name)
        offered_at = watched.offered.get(version) if watched is not None else None
        if watched is None or offered_at is None:
            return
        watched.offered.clear()
        if watched.is_ready:
            watched.speed.load_s.append(now - offered_at)
        else:  # its engine had to start
            watched.is_ready = True
            self._changes.append((now, name, READY))

    def _scored(self, response: str, now: float) -> None:
        submitted = self._submitted.pop(response, None)
        called_s = self._called_s.pop(response, None)
        if submitted is None:
            return
        at, is_alone = submitted
        seconds = now - at if called_s is None else called_s
        rewards = self._rewards
        rewards.num += 1
        rewards.seconds += seconds
        rewards.squares += seconds * seconds
        rewards.longest_s = max(rewards.longest_s, seconds)
        if is_alone:
            rewards.num_alone += 1
            rewards.overhead_s += max(0.0, now - at - seconds)

    # Commands of the core

    def _ordered(self, core: Coordinator, command: Command, now: float) -> None:
        match command:
            case Send(name, Generate(requests=requests)) if not core.table.is_evaluating:
                if (watched := self._nodes.get(name)) is not None:
                    _begin(watched, requests, now)
            case Send(name, PublishWeights(version)):
                if (watched := self._nodes.get(name)) is not None:
                    watched.offered.setdefault(version, now)
            case Send(_, TrainShard(step, index)):
                self._shards[step, index] = now
            case Send(name, Abort()):
                self._rest(core, name)
            case CloseRound():
                self._shards.clear()
                for name in self._nodes:
                    self._rest(core, name)
            case _:
                pass

    def _submit(self, command: ScoreResponse, now: float) -> None:
        if command.source == "train":
            self._submitted[command.response.id] = now, not self._submitted

    def _rest(self, core: Coordinator, name: str) -> None:
        """Check whether a node is idle now."""
        node, watched = core.fleet.nodes.get(name), self._nodes.get(name)
        if node is not None and watched is not None and not node.running:
            watched.rest()


def _begin(watched: _Watched, requests: Iterable[ResponseRequest], now: float) -> None:
    if not watched.runs:
        watched.runs, watched.started_at = True, now
        watched.prefill_tokens = watched.steps = 0
    if watched.started_at is not None:
        prompts = {r.prompt: len(r.prompt) for r in requests}
        num_bytes = sum(prompts.values()) + sum(len(r.prefix) for r in requests)
        watched.prefill_tokens += num_bytes // TOKEN_BYTES


def _take(watched: _Watched, chunk: TokenChunk, batch: int, tokens: int, now: float) -> None:
    """Count `tokens` new tokens of a node on which `batch` responses ran. Called for every chunk.
    How several chunks that arrive together count as steps: see `ChunkWindow`."""
    num = min(batch, len(chunk.responses))
    if watched.started_at is not None:
        longest = max(len(r.token_ids) for r in chunk.responses)
        watched.steps = max(watched.steps, longest // TOKEN_BYTES)
        if num <= MOST * batch and watched.steps < ENOUGH_STEPS:
            return
        start = Start(now - watched.started_at, watched.prefill_tokens, watched.steps, batch)
        if len(watched.speed.starts) < MAX_STARTS:
            watched.speed.starts.append(start)
        watched.started_at, watched.tokens = None, 0
        watched.window.pause()
        watched.window.add(now, batch, num, 0.0)
        return
    watched.tokens += tokens
    if found := watched.window.add(now, batch, num, tokens):
        mean_batch, step_s = found
        response_s, decoded = step_s * watched.tokens, watched.speed.decoded
        more = Decoded(mean_batch * response_s, response_s, watched.tokens)
        size = size_of(mean_batch)
        decoded[size] = decoded.get(size, Decoded()).plus(more)
        watched.tokens = 0


def _row(speed: NodeSpeeds) -> NodeSpeeds:
    return replace(
        speed,
        decoded={
            size: Decoded(_rounded(d.weighted), _rounded(d.response_s), d.tokens)
            for size, d in sorted(speed.decoded.items())
        },
        starts=[s._replace(seconds=_rounded(s.seconds)) for s in speed.starts],
        load_s=[_rounded(s) for s in speed.load_s],
    )


def _rounded(value: float) -> float:
    return round(value, DIGITS)
