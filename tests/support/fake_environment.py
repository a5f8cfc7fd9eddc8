"""A pool of environments and a renderer without processes and tokenizer, for tests of the agent."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightrl.environments.calls import Returned, WorkerLost
from lightrl.errors import LightRLError

Message = dict[str, Any]
CLOSES = 0  # a sampled turn
BEGINS = 1  # the next one


class FakePool:
    """Environments that say how often they were stepped; "quit" ends one. `faults` are raised by
    the next calls, in order; None lets one pass."""

    def __init__(self, is_stateless: bool = False) -> None:
        self.tools: list[Message] = []
        self.is_stateless = is_stateless
        self.has_user_turns = not is_stateless
        self.calls: list[str] = []
        self.faults: list[Exception | None] = []
        self.unusable: LightRLError | None = None
        self.drift = ""  # in all that is said
        self.reward: float | None = 0.25  # of each step
        self.final: float | None = None  # of `end`
        self.tokens: list[dict[str, Any]] = []  # of the next ones returned, as agents ask
        self.metrics: dict[str, float] = {}
        self.may_reset = asyncio.Event()
        self.may_reset.set()
        self._worlds: dict[str, int] = {}  # handle -> steps

    @property
    def num_open(self) -> int:
        return len(self._worlds)

    def kill(self) -> None:
        """As the death of all workers."""
        self._worlds.clear()

    async def start(self) -> None:
        if self.unusable is not None:
            raise self.unusable

    async def stop(self) -> None:
        self.calls.append("stop")

    async def reset(
        self, episode: str, row: dict[str, Any], seed: int, expected: str = ""
    ) -> Returned:
        self._call("reset")
        self._worlds[episode] = 0
        await self.may_reset.wait()
        return self._returned(f"seed {seed}", None, False, 0)

    async def load(self, episode: str, row: dict[str, Any], state: bytes) -> None:
        self._call(f"load {state.decode()}")
        self._worlds[episode] = int(state)

    async def step(
        self, episode: str, message: Message, tokens: Any, expected: str = ""
    ) -> Returned:
        said = message["content"]
        if episode not in self._worlds:
            raise WorkerLost("its worker was lost")
        self._call(f"step {said}")
        self._worlds[episode] = steps = self._worlds[episode] + 1
        return self._returned(f"{said} {steps}", self.reward, said == "quit", steps)

    async def end(self, episode: str, cut: Message | None, tokens: Any) -> Returned:
        if episode not in self._worlds:
            raise WorkerLost("its worker was lost")
        self._call("end" if cut is None else f"end {cut['content']}")
        return self._returned("", self.final, True, self._worlds[episode])

    def answers(self, message: Message) -> bool:
        return bool(self.tools and message.get("tool_calls"))

    def close(self, episode: str, why: str = "") -> None:
        self._worlds.pop(episode, None)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault

    def _returned(self, said: str, reward: float | None, done: bool, steps: int) -> Returned:
        messages = [{"role": "user", "content": said + self.drift}]
        digest = hashlib.blake2b(repr((messages, reward, done)).encode(), digest_size=16)
        state = b"" if self.is_stateless else str(steps).encode()
        what = (
            messages,
            reward,
            done,
            self.metrics,
            [],
            0,
            self.final is not None,
            state,
            0.5,
            digest.hexdigest(),
        )
        returned = Returned(*what)
        return replace(returned, **self.tokens.pop(0)) if self.tokens else returned


class FakeRenderer:
    """A token for each character."""

    def __init__(self) -> None:
        self.refusal: LightRLError | None = None

    def prove(self, tools: Sequence[Message], user_turns: bool = True) -> None:
        if self.refusal is not None:
            raise self.refusal

    def first(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        return [*_ids(messages), BEGINS]

    def append(
        self,
        held: Sequence[int],
        turn_start: int,
        messages: Sequence[Message],
        tools: Sequence[Message],
    ) -> list[int]:
        assert held[turn_start - 1] == BEGINS
        return [CLOSES, *_ids(messages), BEGINS]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def parse(self, sampled: Sequence[int], tools: Sequence[Message]) -> Message:
        return {"role": "assistant", "content": "".join(map(chr, sampled))}


def _ids(messages: Sequence[Message]) -> list[int]:
    return [ord(c) for m in messages for c in m["content"]]
