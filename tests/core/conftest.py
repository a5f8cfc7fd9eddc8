"""A core under test, driven by hand. After every test its invariants are checked."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from lightrl.core.commands import Command, DrawPrompts, Send
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import (
    Event,
    NodeJoined,
    PromptsDrawn,
    ResponseScored,
    StepTrained,
    TokensArrived,
    WeightsConfirmed,
    WeightsPublished,
)
from lightrl.core.state import DrawnPrompt, Settings
from lightrl.messages import (
    Bucket,
    Generate,
    Hello,
    Manifest,
    PublishWeights,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    StepDone,
    TokenChunk,
    WeightsReady,
)

SETTINGS = Settings(
    run_seed=0,
    num_steps=2,
    prompts_per_step=2,
    group_size=2,
    max_response_tokens=10,
    sampling=Sampling(1.0),
    eval_interval=0,
    num_eval_prompts=0,
    eval_samples=1,
    eval_sampling=Sampling(0.0),
    slots=4,
    vocabulary=100,
    lease_s=5.0,
    reward_on_failure=None,
)

M = TypeVar("M")


class Driver:
    """Feeds events to a core, checks its invariants after each, and keeps what it was told to do."""

    def __init__(self, **changes: Any) -> None:
        self.core = Coordinator(replace(SETTINGS, **changes), now=0.0)
        self.now = 0.0
        self.drawn = 0
        self.requests: dict[str, tuple[str, ResponseRequest]] = {}  # response -> (node, newest request)

    def feed(self, event: Event, now: float | None = None) -> list[Command]:
        """All commands, those of answering DrawPrompts included."""
        self.now = self.now if now is None else now
        commands = self.core.handle(event, self.now)
        self.core.check()
        for command in commands:
            match command:
                case Send(node, Generate(requests=requests)):
                    self.requests |= {r.response: (node, r) for r in requests}
                case DrawPrompts("train", count):
                    commands = commands + self.feed(PromptsDrawn(self.draw(count)))
                case DrawPrompts("eval", count):
                    prompts = tuple(DrawnPrompt(f"e{i}", 0, ids(7)) for i in range(count))
                    commands = commands + self.feed(PromptsDrawn(prompts))
                case _:
                    pass
        return commands

    def draw(self, count: int) -> tuple[DrawnPrompt, ...]:
        first, self.drawn = self.drawn, self.drawn + count
        return tuple(DrawnPrompt(f"p{i}", 0, ids(1, 2, i)) for i in range(first, first + count))

    def join(self, name: str, role: str = "rollout", slots: int = 0, incarnation: int = 1) -> list[Command]:
        hello = Hello(name, incarnation, (role,), 1, pid=1, host="h", slots=slots)  # type: ignore[arg-type]
        return self.feed(NodeJoined(hello))

    def publish(self, version: int, trainer: str = "t") -> list[Command]:
        return self.feed(WeightsPublished(trainer, publication(version)))

    def confirm(self, node: str, version: int, digest: str | None = None) -> list[Command]:
        digest = f"digest-{version}" if digest is None else digest
        return self.feed(WeightsConfirmed(node, WeightsReady(version, digest)))

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
        """Tokens of a response from where it runs, by default the next ones of its newest attempt."""
        where, request = self.requests[response]
        held = self.core.ledger.responses.get(response)
        version = self.core.fleet.published.policy_version if version is None else version  # type: ignore[union-attr]
        item = ResponseTokens(
            response,
            request.attempt if attempt is None else attempt,
            (len(held.tokens) if held else 0) if offset is None else offset,
            ids(*token_ids),
            logprobs(len(token_ids)),
            finish,
        )
        return self.feed(TokensArrived(node or where, TokenChunk(version, f"digest-{version}", (item,))))

    def finish(self, response: str, reward: float | None = 1.0, *token_ids: int) -> list[Command]:
        """One more token or the given ones, the end, and the score."""
        return self.tokens(response, *(token_ids or (9,)), finish="stop") + self.score(response, reward)

    def score(self, response: str, reward: float | None = 1.0, failure: str = "") -> list[Command]:
        return self.feed(
            ResponseScored(response, reward, failure or ("" if reward is not None else "crashed"))
        )

    def finish_round(self, reward: float = 1.0) -> list[Command]:
        commands: list[Command] = []
        while waiting := [r for r in self.core.ledger.responses.values() if r.state == "running"]:
            commands += self.finish(waiting[0].id, reward)
        return commands

    def train(self, step: int) -> list[Command]:
        commands = self.publish(step + 1)
        return commands + self.feed(StepTrained("t", StepDone(step, step + 1, {"loss/policy": 0.5})))


@pytest.fixture
def driver() -> Iterator[Driver]:
    d = Driver()
    yield d
    d.core.check()


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def logprobs(n: int) -> bytes:
    return array("f", [-0.5] * n).tobytes()


def publication(version: int) -> PublishWeights:
    return PublishWeights(Manifest(version, f"digest-{version}", (), (Bucket(1, "b"),)), ("h:1",), "ticket")


def sent(commands: list[Command], kind: type[M]) -> list[tuple[str, M]]:
    """(node, message) of all messages of a kind, in order."""
    return [(c.node, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, kind)]


def of_kind(commands: list[Command], kind: type[M]) -> list[M]:
    return [c for c in commands if isinstance(c, kind)]
