"""A rollout node that speaks the protocol but has no engine: it answers every order at once.

It keeps a connection as the real node does (connection.py): nothing but a hello leaves before a
welcome, and one that the coordinator gave up or does not hear any more says hello again. So cheap
that hundreds live in a process.
"""

import asyncio
import hashlib
import time

from lightrl.daemon.connection import WELCOME_S
from lightrl.errors import PeerUnreachable
from lightrl.messages.load import Load
from lightrl.messages.message import Message
from lightrl.messages.nodes import ENDING, PROTOCOL, REJOIN, Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import Generate, ResponseRequest, ResponseTokens, TokenChunk
from lightrl.messages.weights import PublishWeights, WeightsReady
from lightrl.transport.link import Link
from lightrl.wire import pack_f32, pack_i32

MAX_TOKENS = 12  # of a response, its end included
STOP = 1
FIRST, NUM_WORDS = 2, 10  # token ids of what comes before it
BEAT_S = 1.0
CONNECT_S = 60.0


class ScriptedRollout:
    """Confirms every version without pulling it."""

    def __init__(self, name: str, slots: int = 8) -> None:
        self.name = name
        self.slots = slots
        self.num_hellos = 0
        self.num_answered: dict[int, int] = {}  # version -> responses
        self.welcomed = asyncio.Event()  # or refused, or unable to connect
        self._link: Link | None = None
        self._said: Hello | None = None  # and not answered yet
        self._said_at = 0.0
        self._admitted = False
        self._serves: tuple[int, str] | None = None

    async def run(self, address: str, key: str) -> None:
        """Until the coordinator lets it go. Raises PeerUnreachable if it is refused for good."""
        try:
            await self._run(address, key)
        finally:
            self.welcomed.set()

    async def _run(self, address: str, key: str) -> None:
        link = self._link = await Link.connect(
            address, self.name, key, CONNECT_S, self._on_break, self._send_hello
        )
        self._send_hello()
        beating = asyncio.create_task(self._beat(link))
        try:
            while True:
                for message in await link.receive():
                    if not self._take(message):
                        return
        finally:
            beating.cancel()
            link.close()

    def _take(self, message: Message) -> bool:
        """False if this node may go."""
        match message:
            case Welcome():
                return self._take_welcome(message)
            case PublishWeights(version, digest):
                self._serves = version, digest
                self._send(WeightsReady(*self._serves))
            case Generate(version, _, requests) if self._admitted and self._serves is not None:
                self.num_answered[version] = self.num_answered.get(version, 0) + len(requests)
                self._send(TokenChunk(version, self._serves[1], tuple(map(answer, requests))))
            case Drain():
                self._send(Bye("drained"))
                return False
            case _:
                pass
        return True

    def _take_welcome(self, welcome: Welcome) -> bool:
        """As `NodeConnection` does; False if the run is ending."""
        if welcome.refused == REJOIN:
            if self._said is None:  # else it will be answered
                self._on_break()
                self._send_hello()
            return True
        said, self._said = self._said, None
        if welcome.refused and welcome.refused != ENDING:
            raise PeerUnreachable(welcome.refused)
        if said is not None and said.serves != self._serves:
            self._send_hello()  # the last one is out of date
            return True
        self._admitted = self._admitted or said is not None
        self.welcomed.set()
        return welcome.refused != ENDING

    def _send(self, message: Message) -> None:
        if self._link is not None and self._admitted:
            self._link.send(message)

    def _on_break(self) -> None:
        self._admitted, self._said = False, None

    def _send_hello(self) -> None:
        """Nothing runs here: what was on its way, the coordinator hands out again."""
        assert self._link is not None
        self.num_hellos += 1
        name, slots, serves = self.name, self.slots, self._serves
        self._said = Hello(
            name, 1, ("rollout",), PROTOCOL, pid=0, host="test", slots=slots, serves=serves
        )
        self._said_at = time.monotonic()
        self._link.send(self._said)

    async def _beat(self, link: Link) -> None:
        while True:
            self._send(Heartbeat(Load()))
            if (
                self._said is not None
                and time.monotonic() - self._said_at > WELCOME_S
                and link.is_up
            ):
                self._send_hello()
            await asyncio.sleep(BEAT_S)


def tokens_of(response: str, limit: int = MAX_TOKENS) -> list[int]:
    """All of a response, by its name alone: whoever has sampled how much of it."""
    noise = hashlib.blake2b(response.encode(), digest_size=MAX_TOKENS).digest()
    words = [FIRST + byte % NUM_WORDS for byte in noise[: noise[-1] % MAX_TOKENS]]
    return [*words, STOP][:limit]


def answer(request: ResponseRequest) -> ResponseTokens:
    held = len(request.prefix) // 4
    tokens = tokens_of(request.response, held + request.max_new_tokens)[held:]
    reason = "stop" if tokens[-1] == STOP else "length"
    logprobs = pack_f32([-1.0] * len(tokens))
    return ResponseTokens(
        request.response, request.attempt, held, pack_i32(tokens), logprobs, reason
    )
