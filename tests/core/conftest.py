"""A core under test, driven by hand. After every test its invariants are checked."""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from lightrl.core.commands import CloseRound, CloseStep, Command, DrawPrompts, Record, Send
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import (
    Event,
    MessageArrived,
    NodeJoined,
    PromptsDrawn,
    ResponseScored,
    ShardLeft,
)
from lightrl.core.log_entries import LogEntry, ShardSent
from lightrl.core.recovery import recover, take_snapshot
from lightrl.core.settings import EvalSet, Settings
from lightrl.core.state import DrawnPrompt, Response, Round
from lightrl.messages.nodes import PROTOCOL, Hello
from lightrl.messages.responses import (
    Generate,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    TokenChunk,
)
from lightrl.messages.sharing import SetDevices
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import PublishWeights, WeightsEndpoint, WeightsReady
from tests.support import invariants

SETTINGS = Settings(
    run_seed=0,
    num_steps=2,
    prompts_per_step=2,
    group_size=2,
    max_response_tokens=10,
    sampling=Sampling(1.0),
    slots=4,
    vocabulary=100,
    lease_s=5.0,
    reward_on_failure=None,
    num_prompts=1000,
    chunk_tokens=1,
    patience_s=60.0,
)


def held_out(num_prompts: int, samples: int = 1) -> tuple[EvalSet, ...]:
    """One set to evaluate on, answered greedily."""
    return (EvalSet("e", num_prompts, samples, Sampling(0.0), 10),)


M = TypeVar("M")
Length = Callable[[str], int]  # of a response, by its name
Reward = Callable[[str], float | None]


class Driver:
    """Feeds events to a core, checks its invariants after each, and keeps what it was told to
    do."""

    def __init__(self, shuffled: bool = False, **changes: Any) -> None:
        self.core = Coordinator(replace(SETTINGS, **changes), now=0.0)
        self.now = 0.0
        self.shuffled = shuffled  # every epoch in another order
        self.drawn = 0
        self.opens_endpoints = True  # every node that joins, at once
        self.disk_is_slow = False  # nobody says that shards have left
        self.digests: dict[int, str] = {}  # of versions that the trainer trained again, otherwise
        self.reads_slowly = False  # prompts are drawn by `answer_draw`, not at once
        self.unanswered: deque[DrawPrompts] = deque()
        self.is_step_over = False  # and the next segment has not begun
        self._shards: list[LogEntry] = []  # with which it will
        # response -> (node, newest request)
        self.requests: dict[str, tuple[str, ResponseRequest]] = {}
        self.segment: list[LogEntry] = list(
            take_snapshot(self.core)
        )  # what a journal holds, from its last step on

    def feed(self, event: Event, now: float | None = None) -> list[Command]:
        """All commands, those of answering DrawPrompts included."""
        self.now = self.now if now is None else now
        commands = self.answer(self.core.handle(event, self.now))
        invariants.check(self.core)
        for command in commands:
            if isinstance(command, CloseStep):
                self.is_step_over, self._shards = True, []
            elif isinstance(command, Record) and not self.is_step_over:
                self.segment.append(command.entry)
            elif isinstance(command, Record) and isinstance(command.entry, ShardSent):
                self._shards.append(command.entry)
        # what the core did since stands in what the segment begins with
        if self.is_step_over and not self.unanswered:
            self.segment = [*take_snapshot(self.core), *self._shards]
            self.is_step_over = False
        return commands

    def answer_draw(self) -> list[Command]:
        """The oldest."""
        return self.feed(self._drawn(self.unanswered.popleft()))

    def _drawn(self, wanted: DrawPrompts) -> PromptsDrawn:
        if wanted.source == "train":
            return PromptsDrawn(self.draw(wanted.count))
        return PromptsDrawn(tuple(self.held_out()))

    def restart(self, lost: int = 0) -> list[Command]:
        """The coordinator dies and is made again from its journal, but for the last `lost`
        facts."""
        self.segment = self.segment[: len(self.segment) - lost]
        self.core = Coordinator(self.core.settings, self.now)
        self.unanswered.clear()
        self.is_step_over = False
        commands = recover(self.core, self.segment, self.now)
        self.drawn = self.core.backlog.num_drawn
        commands = self.answer(commands)
        while self.unanswered:
            drawn = self._drawn(self.unanswered.popleft())
            commands = commands + self.answer(self.core.handle(drawn, self.now))
        invariants.check(self.core)
        self.segment = list(take_snapshot(self.core))
        return commands

    def answer(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            match command:
                case Send(node, Generate(requests=requests)):
                    self.requests |= {r.response: (node, r) for r in requests}
                case Send(_, TrainShard(step, index)) if not self.disk_is_slow:
                    commands = commands + self.answer(
                        self.core.handle(ShardLeft(step, index), self.now)
                    )
                case DrawPrompts() if self.reads_slowly:
                    self.unanswered.append(command)
                case DrawPrompts():
                    drawn = self._drawn(command)
                    commands = commands + self.answer(self.core.handle(drawn, self.now))
                case _:
                    pass
        return commands

    def draw(self, count: int) -> tuple[DrawnPrompt, ...]:
        first, self.drawn = self.drawn, self.drawn + count
        prompts = map(self.prompt_at, range(first, first + count))
        return tuple(DrawnPrompt(name, epoch, ids(1, 2, int(name[1:]))) for name, epoch in prompts)

    def held_out(self) -> Iterator[DrawnPrompt]:
        for one in self.core.settings.eval_sets:
            yield from (DrawnPrompt(f"{one.name}/{i}", 0, ids(7)) for i in range(one.num_prompts))

    def prompt_at(self, number: int) -> tuple[str, int]:
        """Name and epoch; p0, p1, ... are one epoch, and then come again."""
        count = self.core.settings.num_prompts
        epoch, i = divmod(number, count)
        if self.shuffled and epoch:
            i = random.Random(epoch).sample(range(count), count)[i]
        return f"p{i}", epoch

    def join(
        self,
        name: str,
        role: str = "rollout",
        slots: int = 0,
        incarnation: int = 1,
        serves: int | None = None,
        running: dict[str, int] | None = None,
        **fields: Any,
    ) -> list[Command]:
        hello = Hello(
            name,
            incarnation,
            (role,),  # type: ignore[arg-type]
            PROTOCOL,
            pid=1,
            slots=slots,
            serves=None if serves is None else (serves, f"digest-{serves}"),
            running=tuple((running or {}).items()),
            **{"host": "h", **fields},
        )
        commands = self.feed(NodeJoined(hello))
        return commands + self.open(name, incarnation) if self.opens_endpoints else commands

    def open(self, name: str, incarnation: int = 1) -> list[Command]:
        """The node says where it serves the weights, as each does after its welcome."""
        return self.feed(MessageArrived(name, endpoint_of(name, incarnation)))

    def publish(self, version: int, trainer: str = "t") -> list[Command]:
        return self.feed(MessageArrived(trainer, self.publication(version)))

    def publication(self, version: int) -> PublishWeights:
        digest = self.digests.get(version, f"digest-{version}")
        return replace(publication(version), digest=digest)

    def digest(self, version: int) -> str:
        """The one that is current."""
        return self.core.fleet.digests.get(version, (f"digest-{version}",))[-1]

    def confirm(self, node: str, version: int, digest: str | None = None) -> list[Command]:
        digest = self.digest(version) if digest is None else digest
        return self.feed(MessageArrived(node, WeightsReady(version, digest)))

    def start(self, *rollouts: str, slots: int = 0) -> list[Command]:
        """A trainer and rollout nodes that serve version 0; the commands of the last event."""
        self.join("t", "trainer")
        self.publish(0)
        for name in rollouts:
            self.join(name, slots=slots)
        return [c for name in rollouts for c in self.confirm(name, 0)]

    def tokens(
        self,
        response: str,
        *token_ids: int,
        offset: int | None = None,
        finish: Any = None,
        version: int | None = None,
        node: str | None = None,
        attempt: int | None = None,
    ) -> list[Command]:
        """Tokens of a response from where it runs, by default the next ones of its newest
        attempt."""
        where, request = self.requests[response]
        held = self.core.table.responses.get(response)
        if version is None:
            version = self.version_at(node or where)
        item = ResponseTokens(
            response,
            request.attempt if attempt is None else attempt,
            (len(held.tokens) if held else 0) if offset is None else offset,
            ids(*token_ids),
            logprobs(len(token_ids)),
            finish,
        )
        return self.feed(
            MessageArrived(node or where, TokenChunk(version, f"digest-{version}", (item,)))
        )

    def version_at(self, node: str) -> int:
        """What a node serves; the published version where that is not known any more."""
        known, published = self.core.fleet.nodes.get(node), self.core.fleet.published
        assert published is not None
        served = known.policy_version if known is not None else None
        return published.policy_version if served is None else served

    def finish(self, response: str, reward: float | None = 1.0, *token_ids: int) -> list[Command]:
        """One more token or the given ones, the end, and the score."""
        return self.tokens(response, *(token_ids or (9,)), finish="stop") + self.score(
            response, reward
        )

    def score(
        self,
        response: str,
        reward: float | None = 1.0,
        failure: str = "",
        attempt: int | None = None,
    ) -> list[Command]:
        return self.feed(
            ResponseScored(
                response,
                self.core.table.responses[response].attempt if attempt is None else attempt,
                reward,
                failure or ("" if reward is not None else "crashed"),
            )
        )

    def running(self) -> list[str]:
        return [r.id for r in self.core.table.responses.values() if r.state == "running"]

    def held(self, response: str) -> Response:
        return self.core.table.responses[response]

    @property
    def round(self) -> Round:
        """The oldest open round."""
        assert self.core.table.round is not None
        return self.core.table.round

    def finish_round(self, reward: float = 1.0) -> list[Command]:
        """Every response in turn gets one token more, and its end."""
        commands: list[Command] = []
        while waiting := self.running():
            commands += self.finish(waiting[0], reward)
        return commands

    def decode(
        self,
        length: Length,
        reward: Reward = lambda _: 1.0,
        order: Callable[[list[str]], list[str]] = list,
    ) -> list[Command]:
        """All running responses in lock step, one token each, until none runs; whoever is done is
        scored."""
        commands: list[Command] = []
        while waiting := self.running():
            for name in order(waiting):
                if self.held(name).state != "running":
                    continue  # given up meanwhile
                last = len(self.held(name).tokens) + 1 == length(name)
                commands += self.tokens(name, 9, finish="stop" if last else None)
                if last:
                    commands += self.score(name, reward(name))
        return commands

    def train(self, step: int) -> list[Command]:
        commands = self.publish(step + 1)
        return commands + self.feed(
            MessageArrived("t", StepDone(step, step + 1, {"loss/policy": 0.5}))
        )

    def next_step(self) -> list[Command]:
        """The oldest round is trained, and every node loads the new version."""
        step = self.round.step
        commands = self.train(step)
        for name in list(self.core.fleet.nodes):
            if name != "t":
                commands += self.confirm(name, step + 1)
        return commands

    def complete(self, length: Length, reward: Reward = lambda _: 1.0) -> list[Command]:
        """All running responses, each at once and whole, until none runs."""
        commands: list[Command] = []
        while waiting := self.running():
            for name in waiting:
                if (held := self.held(name)).state == "running":
                    commands += self.tokens(
                        name, *[9] * (length(name) - len(held.tokens)), finish="stop"
                    )
                    if not held.resolved:
                        commands += self.score(name, reward(name))
        return commands

    def play(self, length: Length, reward: Reward = lambda _: 1.0, rounds: int = 1) -> list[Round]:
        """That many training rounds, with their steps; the rounds as they were when they closed."""
        closed: list[Round] = []
        while len(closed) < rounds:
            closed += [c.round for c in of_kind(self.complete(length, reward), CloseRound)]
            if self.core.state != "finishing" and not closed[-1].is_eval:
                self.next_step()
        return closed


@pytest.fixture
def driver() -> Iterator[Driver]:
    d = Driver()
    yield d
    invariants.check(d.core)


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def logprobs(n: int) -> bytes:
    return array("f", [-0.5] * n).tobytes()


def publication(version: int) -> PublishWeights:
    return PublishWeights(version, f"digest-{version}", num_bytes=1000, manifest_bytes=10)


def endpoint_of(name: str, incarnation: int = 1) -> WeightsEndpoint:
    return WeightsEndpoint((f"{name}:1",), f"secret of {name} {incarnation}")


def sent(commands: list[Command], kind: type[M]) -> list[tuple[str, M]]:
    """(node, message) of all messages of a kind, in order."""
    return [
        (c.node, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, kind)
    ]


SLEEP, WAKE = "sleep", "wake"


def assign(step: int, parts: tuple[int, ...]) -> SetDevices:
    return SetDevices("trainer", step, True, parts)


def suspend(number: int) -> SetDevices:
    return SetDevices("trainer", number, False)


def order_of(message: object) -> object:
    """A whole order to ranks, SLEEP or WAKE for one to an engine, or the class of a message."""
    if not isinstance(message, SetDevices):
        return type(message)
    if message.role == "trainer":
        return message
    return WAKE if message.active else SLEEP


def of_kind(commands: list[Command], kind: type[M]) -> list[M]:
    return [c for c in commands if isinstance(c, kind)]
