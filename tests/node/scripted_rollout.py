"""A rollout node that speaks the protocol but has no engine: it answers every order at once."""

import asyncio

from lightrl.errors import PeerUnreachable
from lightrl.messages import (
    PROTOCOL,
    Bye,
    Drain,
    Generate,
    Heartbeat,
    Hello,
    Load,
    PublishWeights,
    ResponseRequest,
    ResponseTokens,
    TokenChunk,
    WeightsReady,
    Welcome,
)
from lightrl.node.link import Link
from lightrl.wire import pack_f32, pack_i32

NUM_TOKENS = 6  # of every response
TOKEN = 5
BEAT_S = 1.0


class ScriptedRollout:
    """Confirms every version without pulling it."""

    def __init__(self, name: str, slots: int = 8) -> None:
        self.name = name
        self.slots = slots
        self._serves: tuple[int, str] | None = None

    async def run(self, address: str, key: str) -> None:
        """Until the coordinator lets it go, or refuses it because the run is ending."""
        link = await Link.connect(address, self.name, key, timeout_s=60.0)
        link.send(Hello(self.name, 1, ("rollout",), PROTOCOL, pid=0, host="test", slots=self.slots))
        beating = asyncio.create_task(self._beat(link))
        try:
            while True:
                for message in await link.receive():
                    match message:
                        case Welcome(refused=why) if why:
                            raise PeerUnreachable(why)
                        case PublishWeights(manifest):
                            self._serves = manifest.policy_version, manifest.digest
                            link.send(WeightsReady(*self._serves))
                        case Generate(version, _, requests) if self._serves is not None:
                            answers = tuple(map(answer, requests))
                            link.send(TokenChunk(version, self._serves[1], answers))
                        case Drain():
                            link.send(Bye("drained"))
                            return
                        case _:
                            pass
        finally:
            beating.cancel()
            link.close()

    async def _beat(self, link: Link) -> None:
        while True:
            link.send(Heartbeat(Load()))
            await asyncio.sleep(BEAT_S)


def answer(request: ResponseRequest) -> ResponseTokens:
    held = len(request.prefix) // 4
    count = max(1, min(NUM_TOKENS - held, request.max_new_tokens))
    reason = "length" if count == request.max_new_tokens else "stop"
    tokens = [TOKEN] * (count - 1) + [1 if reason == "stop" else TOKEN]
    logprobs = pack_f32([-1.0] * count)
    return ResponseTokens(request.response, request.attempt, held, pack_i32(tokens), logprobs, reason)
