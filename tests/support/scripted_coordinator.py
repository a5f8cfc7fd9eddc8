"""A coordinator that does just what a test says, on a real router: it vanishes and comes back with
no memory."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self, TypeVar

from lightrl.config.schema import Config
from lightrl.errors import ConfigError, PeerUnreachable
from lightrl.keys import JOIN_FILE, KEY_FILE, read_key, write_keys
from lightrl.messages.message import Message
from lightrl.messages.nodes import REJOIN, Heartbeat, Hello, Welcome
from lightrl.messages.responses import (
    Generate,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    TokenChunk,
)
from lightrl.model_files import model_files
from lightrl.transport.router import Peer, Router
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile
from lightrl.wire import pack_i32, unpack_i32
from tests.support.daemons import DEADLINE_S, expected_tokens, published, uniform_version
from tests.support.versions import source

M = TypeVar("M", bound=Message)
PROMPT = pack_i32([5, 6, 7])


class ScriptedHead:
    """One node at a time. Everything heard is kept; `expect` goes through it in order."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.key_file = folder / JOIN_FILE  # of a node
        write_keys(folder)
        self.heard: list[Message] = []
        self.node: Peer | None = None  # heard last
        self.files: list[VersionFile] = []
        self.welcome = Welcome("r", config.model_dump_json(), model_files(config.model.path))
        self._position = 0  # in `heard`, of what was not expected yet
        self._news = asyncio.Event()
        self._server = WeightServer()
        self.listen("tcp://127.0.0.1:*")

    async def __aenter__(self) -> Self:
        await self._server.start("127.0.0.1")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.vanish()
        await self._server.close()

    def listen(self, address: str) -> None:
        self.router = Router(address, read_key(self.folder / KEY_FILE))
        self.address = self.router.address
        self._tasks = [
            asyncio.create_task(work(self.router)) for work in (self._receive, self._beat)
        ]

    def vanish(self) -> None:
        """As if killed."""
        for task in self._tasks:
            task.cancel()
        self.router.close()

    async def come_back(self) -> None:
        """As another process on the same port, which knows of nobody."""
        self.node = None
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with contextlib.suppress(ConfigError):  # the port is set free by a thread of ZeroMQ
                    self.listen(self.address)
                    return
                await asyncio.sleep(0)

    async def _receive(self, router: Router) -> None:
        while True:
            for peer, message in await router.receive():
                assert not isinstance(message, Exception), message
                self.node = peer
                self.heard.append(message)
                self._news.set()

    async def _beat(self, router: Router) -> None:
        while True:
            with contextlib.suppress(PeerUnreachable):
                if self.node:
                    router.send(self.node, Heartbeat())
            await asyncio.sleep(0.1)

    def send(self, message: Message) -> None:
        assert self.node is not None
        self.router.send(self.node, message)

    def skip(self) -> None:
        """What was heard so far is not what is expected next."""
        self._position = len(self.heard)

    async def expect(self, kind: type[M], holds: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this kind for which `holds`."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                while self._position < len(self.heard):
                    message = self.heard[self._position]
                    self._position += 1
                    if isinstance(message, kind) and holds(message):
                        return message
                self._news.clear()
                await self._news.wait()

    async def hello(self) -> Hello:
        return await self.expect(Hello)

    async def ask_to_rejoin(self) -> Hello:
        """Answers the next heartbeat as a coordinator does that does not know the node."""
        self.skip()
        await self.expect(Heartbeat)
        self.send(Welcome("r", refused=REJOIN))
        return await self.hello()

    def offer(self, node: str, version: int) -> VersionFile:
        file = uniform_version(self.folder, version)
        self.files.append(file)
        self._server.serve(file)
        self.send(published(file, (source(self._server, node, version),)))
        return file

    def generate(self, *names: str, version: int = 0, attempt: int = 1, prefix: int = 0) -> None:
        """Orders responses whose first `prefix` tokens are held already."""
        r = self.config.rollout
        requests = tuple(
            ResponseRequest(
                name,
                attempt,
                seed_of(name),
                PROMPT,
                pack_i32(self.expected(name, prefix)),
                r.max_response_length - prefix,
            )
            for name in names
        )
        self.send(Generate(version, Sampling(r.temperature, r.top_p, r.top_k, (1,)), requests))

    def expected(self, name: str, num_tokens: int) -> list[int]:
        """The first tokens of a response under version 0."""
        rollout = self.config.rollout.model_copy(update={"max_response_length": max(1, num_tokens)})
        config = self.config.model_copy(update={"rollout": rollout})
        return expected_tokens(config, self.files[0], seed_of(name), PROMPT)[:num_tokens]

    def items(self, name: str, since: int = 0) -> list[ResponseTokens]:
        """What was heard of a response, from a position in `heard` on."""
        chunks = [m for m in self.heard[since:] if isinstance(m, TokenChunk)]
        return [item for chunk in chunks for item in chunk.responses if item.response == name]

    async def until_finished(self, *names: str, since: int = 0) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not all(any(i.finish_reason for i in self.items(name, since)) for name in names):
                self._news.clear()
                await self._news.wait()


def seed_of(name: str) -> int:
    return sum(name.encode()) * 7919


def joined(items: list[ResponseTokens]) -> tuple[int, list[int]]:
    """(first offset, tokens) of consecutive items; no hole, nothing twice."""
    tokens: list[int] = []
    for item in items:
        assert item.offset == items[0].offset + len(tokens)
        tokens += unpack_i32(item.token_ids)
    return items[0].offset, tokens


@contextlib.asynccontextmanager
async def rollout_daemon(
    address: str, key_file: Path, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    command = ("-m", "lightrl.cli", "up", "--join", address, "--key", str(key_file), "--name", "a")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *options, stdout=pipe, stderr=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
