"""A backend that answers by a script, served on loopback by the real server in a thread."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lightrl.endpoints.api import Answered, ApiError, Asked, EpisodeReport, SamplingLimits
from lightrl.endpoints.app import EndpointApp
from lightrl.endpoints.server import serving

KEY, ENVIRONMENT_KEY = "session-key", "environment-key"
DEADLINE_S = 30.0


def turn(content: str, *calls: tuple[str, str, Any], cut: bool = False, **more: str) -> Answered:
    """A turn of the assistant with calls (id, name, arguments)."""
    message: dict[str, Any] = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    finish = "length" if cut else "stop"
    return Answered(message, [1, 2, 3], [7, 8], [-0.25, float("-inf")], finish, 4)


@dataclass
class ScriptedBackend:
    """Answers with the turns of its script, in a circle. A turn may be an error, or None: no
    answer."""

    script: list[Answered | Exception | None] = field(default_factory=lambda: [turn("Hi.")])
    limits: SamplingLimits = field(default_factory=lambda: SamplingLimits("tiny", 64))
    # an answer waits until it is set
    gate: asyncio.Event | None = None
    asked: list[Asked] = field(default_factory=list)
    reports: list[EpisodeReport] = field(default_factory=list)
    events: "queue.Queue[str]" = field(default_factory=queue.Queue)

    async def ask(self, key: str, asked: Asked) -> Answered:
        self.asked.append(asked)
        self.events.put("asked")
        answer = self.script[(len(self.asked) - 1) % len(self.script)]
        try:
            if self.gate is not None:
                await self.gate.wait()
            if answer is None:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events.put("cancelled")
            raise
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    def episode(self, key: str) -> dict[str, Any]:
        return {"row": {"question": "1+1?"}, "seed": 5, "max_length": 64}

    def report(self, key: str, report: EpisodeReport) -> None:
        self.reports.append(report)

    async def open(self, key: str) -> dict[str, Any]:
        if key != ENVIRONMENT_KEY:
            raise ApiError(403, "a session opens none; use the environment key")
        return {"api_key": KEY, "row": {}, "seed": 5, "max_length": 64}

    def require(self, key: str) -> None:
        if key not in (KEY, ENVIRONMENT_KEY):
            raise ApiError(401, "unknown key; open a session", "invalid_api_key")

    def wait_for(self, event: str) -> None:
        """Wait until this happens next; anything else that happens is an error."""
        assert self.events.get(timeout=DEADLINE_S) == event


@dataclass
class Served:
    """A server that is running."""

    url: str
    loop: asyncio.AbstractEventLoop
    app: EndpointApp

    def call(self, function: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(function)


@contextlib.contextmanager
def served(backend: ScriptedBackend, head_s: float = 20.0, **settings: Any) -> Iterator[Served]:
    ready: queue.Queue[Served] = queue.Queue()
    stop = asyncio.Event()

    async def run() -> None:
        app = EndpointApp(backend, **settings)
        async with serving(app, "127.0.0.1", 0, head_s) as url:
            ready.put(Served(url, asyncio.get_running_loop(), app))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    server = ready.get(timeout=DEADLINE_S)
    try:
        yield server
    finally:
        server.call(stop.set)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
