"""The pool of worker processes that run the environments of an environment node.

Owns where an episode lives, the time limit of a call, restarts. User code runs in the workers only
(worker/main.py), in an interpreter of its own, so that frames are JSON (worker/frames.py).

A worker runs plain functions one at a time, in the order of the calls, and coroutines at once. The
limit of a call counts from when the worker begins it. A worker that exceeds it is killed, and all
episodes that it held are lost.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from lightrl.config.environment import Environment
from lightrl.errors import LightRLError, ProtocolError, first_error
from lightrl.system.child import Child, ChildDied, retry_on_resource_limit
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.wire import Codec

START_LIMIT_S = 300.0  # importing user code may load a model, a server may download itself
GRACE_S = 0.05  # for an answer in the pipe
MAX_GRACE_S = 1.0  # an asynchronous call is cancelled inside its worker before the kill
# After deaths without a call, each soon after the start.
RESTARTS = RestartPolicy(max_restarts=2, settled_s=10.0)
DEFAULT_WORKERS = 2  # of a node whose config starts none with `lightrl up`
SETUP = {"source", "args", "tools", "mcp", "resume", "timeout_s"}  # what a worker has to know

PACKAGE = Path(__file__).parents[1]
# The interpreter need not have what `import lightrl` needs, nor know the option -P.
BOOT = """
import sys, types
if sys.version_info < (3, 10):
    sys.exit("Python %d.%d is too old for a worker: it needs 3.10" % sys.version_info[:2])
sys.path[:] = [each for each in sys.path if each]
package = types.ModuleType("lightrl")
package.__path__ = [sys.argv[1]]
sys.modules["lightrl"] = package
from lightrl.environments.worker.main import main
main(int(sys.argv[2]))
"""

Frame = dict[str, Any]


class EnvironmentUnusable(LightRLError):
    """The source, a tool or the interpreter cannot be used, or workers cannot be kept alive."""


class EnvironmentRaised(LightRLError):
    """User code raised, or returned what is no observation; one line."""


class StepTimedOut(LightRLError):
    """A call took longer than `environment.timeout_s`; its episode is lost."""


class WorkerLost(LightRLError):
    """The worker of an episode died. `in_call`: during a call of the episode, the likely cause."""

    def __init__(self, text: str, in_call: bool = False) -> None:
        super().__init__(text)
        self.in_call = in_call


@dataclass(frozen=True, slots=True)
class Returned:
    """What `reset` or `step` returned."""

    # new messages of the chat
    messages: list[dict[str, Any]]
    # None = none was given
    reward: float | None
    done: bool
    metrics: dict[str, float]
    # of this episode, beside those of the pool
    tools: list[dict[str, Any]]
    num_tool_calls: int
    # what `save` returned, if environment.resume is "snapshot"
    state: bytes
    # of the call
    seconds: float
    # of messages, reward and done
    digest: str


class JsonCodec(Codec[Frame]):
    """Frames of worker/frames.py, whose types are not checked."""

    def __init__(self) -> None:
        pass

    def encode(self, message: Frame) -> bytes:
        return json.dumps(message).encode()

    def decode(self, frame: bytes | memoryview) -> Frame:
        try:
            return dict(json.loads(bytes(frame)))
        except (ValueError, TypeError, RecursionError) as e:  # user code has written to the socket
            raise ProtocolError(f"undecodable frame: {e}") from None


FRAMES = JsonCodec()


@dataclass(slots=True, eq=False)
class _Call:
    # "returned", "raised" and "timeout" of the worker, or "lost"
    ended: asyncio.Future[Frame]
    # None = it has not begun
    timer: asyncio.TimerHandle | None = None

    def end(self, frame: Frame) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.ended.done():  # else nobody waits for it any more
            self.ended.set_result(frame)


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    log: Path
    limit_s: float
    child: Child[Frame, Frame] | None = None
    is_ready: bool = False
    # name -> environment and row, for errors
    episodes: dict[str, str] = field(default_factory=dict[str, str])
    # by number
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])
    timed_out: _Call | None = None

    async def receive(self) -> None:
        """Take an event. Raises ChildDied; ProtocolError if it is none."""
        assert self.child is not None
        frame = await self.child.receive()
        number = frame.get("id", -1)
        if number not in self.calls:
            raise ProtocolError(f"unexpected frame: {str(frame)[:100]}")
        call = self.calls[number]
        if frame["event"] == "started":
            limit_s = self.limit_s + GRACE_S + min(MAX_GRACE_S, self.limit_s / 10)
            call.timer = asyncio.get_running_loop().call_later(limit_s, self._overrun, call)
        else:
            self.calls.pop(number).end(frame)

    def _overrun(self, call: _Call) -> None:
        self.timed_out, self.is_ready = call, False
        if self.child is not None:
            self.child.kill()  # `receive` then raises ChildDied

    def lose(self, why: str) -> bool:
        """End all calls and forget the episodes; return whether a call had begun. A call that timed
        out is to blame for the others; else each that had begun may be."""
        calls, blamed = list(self.calls.values()), self.timed_out
        for call in calls:
            has_begun = call.timer is not None
            event = "timeout" if call is blamed else "lost"
            in_call = has_begun and blamed is None
            call.end({"event": event, "reason": why, "in_call": in_call, "has_begun": has_begun})
        self.calls, self.episodes, self.timed_out, self.is_ready = {}, {}, None, False
        return any(call.timer is not None for call in calls)

    async def end(self) -> None:
        if self.child is not None:
            self.child.kill()  # it has nothing to save, and may hang
            with contextlib.suppress(ChildDied):
                await self.child.stop()


class WorkerPool:
    """`await start()`, calls at any time, `await stop()` at the end. An episode, any unique string,
    belongs to one worker from `reset` or `load` on; its calls must not overlap."""

    def __init__(
        self,
        settings: Environment,
        log_dir: Path,
        report: Callable[[str], None],
        prompt_key: str = "prompt",
        system_prompt: str = "",
    ) -> None:
        """`report` gets a line about each worker that ended without a call and starts again.
        `prompt_key`, `system_prompt`: of the data, for runs with tools and without a class."""
        self.tools: list[dict[str, Any]] = []
        self.is_stateless = False
        self._settings = settings
        self._named = settings.source or ", ".join(settings.tools) or "environment.mcp"
        self._report = report
        self._setup = {
            **settings.model_dump(mode="json", include=SETUP),
            "named": self._named,
            "prompt_key": prompt_key,
            "system_prompt": system_prompt,
        }
        self._workers = [
            _Worker(f"environment-{k}", log_dir / f"environment-{k}.log", settings.timeout_s)
            for k in range(settings.workers or DEFAULT_WORKERS)
        ]
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # replaced at each change of a worker
        self._unusable = ""  # why no worker will serve

    async def start(self) -> None:
        """Start all workers. Raises EnvironmentUnusable, one line, if the source, a tool or the
        interpreter cannot be used."""
        command = self._settings.command
        if command and shutil.which(command[0]) is None:
            raise EnvironmentUnusable(f"environment.command: {command[0]}: no such program")
        try:
            async with asyncio.TaskGroup() as tasks:
                for w in self._workers:
                    tasks.create_task(self._start(w))
        except BaseExceptionGroup as group:
            await self.stop()
            raise first_error(group) from None
        except asyncio.CancelledError:
            await self.stop()
            raise
        self._tasks = [asyncio.create_task(self._serve(w), name=w.name) for w in self._workers]

    async def stop(self) -> None:
        """Kill the workers. Open calls raise WorkerLost or EnvironmentUnusable."""
        self._notify("the environments have stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for w in self._workers:
            w.lose("it was stopped")
        await asyncio.gather(*(w.end() for w in self._workers))

    async def reset(self, episode: str, row: dict[str, Any], seed: int) -> Returned:
        """Begin an episode. Raises EnvironmentRaised, StepTimedOut, WorkerLost; EnvironmentUnusable
        when no worker can be kept alive."""
        return _returned(await self._begin(episode, row, {"call": "reset", "seed": seed}))

    async def load(self, episode: str, row: dict[str, Any], seed: int, state: bytes) -> None:
        """Begin an episode from what `save` returned. Raises as `reset`."""
        encoded = base64.b64encode(state).decode()
        await self._begin(episode, row, {"call": "load", "seed": seed, "state": encoded})

    async def step(self, episode: str, message: dict[str, Any]) -> Returned:
        """Step with a message of the assistant. Raises as `reset`; WorkerLost(in_call=False) if the
        episode was lost before."""
        w = self._home(episode)
        if w is None:
            raise WorkerLost(f"{self._named}: episode {episode}: its worker was lost")
        label, fields = w.episodes[episode], {"call": "step", "message": message}
        return _returned(self._check(label, await self._post(w, episode, fields)))

    def close(self, episode: str) -> None:
        """Forget an episode, whatever it is doing."""
        if (w := self._home(episode)) is not None:
            del w.episodes[episode]
            self._post(w, episode, {"call": "close"})

    async def _begin(self, episode: str, row: dict[str, Any], fields: Frame) -> Frame:
        self.close(episode)
        which = f"row {row['index']}" if "index" in row else f"episode {episode}"
        label = f"{self._named}: {which}"
        try:
            while True:
                w = await self._free_worker()
                w.episodes[episode] = label
                frame = await self._post(w, episode, {**fields, "row": row})
                if frame["event"] != "lost" or frame["has_begun"]:
                    return self._check(label, frame)
        except BaseException:
            self.close(episode)
            raise

    def _home(self, episode: str) -> _Worker | None:
        return next((w for w in self._workers if episode in w.episodes), None)

    def _post(self, w: _Worker, episode: str, fields: Frame) -> asyncio.Future[Frame]:
        assert w.child is not None
        number = next(self._numbers)
        call = w.calls[number] = _Call(asyncio.get_running_loop().create_future())
        w.child.send({**fields, "episode": episode, "id": number})
        return call.ended

    def _check(self, label: str, frame: Frame) -> Frame:
        match frame["event"]:
            case "returned":
                return frame
            case "raised":
                raise EnvironmentRaised(f"{label}: {frame['reason']}")
            case "timeout":
                limit = f"environment.timeout_s = {self._settings.timeout_s:g} s"
                raise StepTimedOut(f"{label}: took longer than {limit}")
            case _:
                text = f"{label}: its worker was lost: {frame['reason']}"
                raise WorkerLost(text, frame["in_call"])

    async def _free_worker(self) -> _Worker:
        """Return the ready worker with the fewest calls, then episodes; wait until there is one."""
        while True:
            if self._unusable:
                raise EnvironmentUnusable(self._unusable)
            if ready := [w for w in self._workers if w.is_ready]:
                return min(ready, key=lambda w: (len(w.calls), len(w.episodes)))
            await self._changed.wait()

    async def _serve(self, w: _Worker) -> None:
        """Receive from a worker, and start it again when it dies."""
        idle_deaths, clock = CrashCounter(RESTARTS), asyncio.get_running_loop().time
        began = clock()
        while True:
            try:
                while True:
                    await w.receive()
                    idle_deaths.progressed()
            except (ChildDied, ProtocolError) as e:
                why, lived_s = str(e), clock() - began
            had_begun = w.lose(why)
            await w.end()
            try:
                if not had_begun:
                    if idle_deaths.crashed(lived_s) is None:
                        raise EnvironmentUnusable(f"{self._named}: {w.name} keeps dying: {why}")
                    self._report(f"{why}; starting it again")
                await self._start(w)
                began = clock()
            except EnvironmentUnusable as e:
                self._report(str(e))
                w.child = None
                self._notify("" if any(each.child for each in self._workers) else str(e))
                return

    async def _start(self, w: _Worker) -> None:
        """Raises EnvironmentUnusable if the worker cannot serve."""
        deaths = CrashCounter(RESTARTS)
        start = partial(_start_child, w, self._settings.command or (sys.executable,))
        while True:
            w.child = await retry_on_resource_limit(start, w.name, self._report)
            w.child.send({"setup": self._setup})
            frame: Frame | None = None
            try:
                async with asyncio.timeout(START_LIMIT_S):
                    frame = await w.child.receive()
            except TimeoutError:
                frame = {"failed": f"{self._named}: no start within {START_LIMIT_S:g} s"}
            except (ChildDied, ProtocolError) as e:
                if deaths.crashed() is None:
                    frame = {"failed": f"{self._named}: died {deaths.in_a_row} times at start: {e}"}
            if frame is not None and "failed" not in frame:
                self.tools, self.is_stateless = frame["tools"], frame["is_stateless"]
                w.is_ready = True
                self._notify()
                return
            await w.end()
            if frame is not None:
                raise EnvironmentUnusable(frame["failed"])

    def _notify(self, unusable: str = "") -> None:
        self._unusable = self._unusable or unusable
        self._changed.set()
        self._changed = asyncio.Event()


async def _start_child(w: _Worker, interpreter: tuple[str, ...]) -> Child[Frame, Frame]:
    return await Child.start_program(
        [*interpreter, "-c", BOOT, str(PACKAGE)],
        w.name,
        FRAMES,
        FRAMES,
        env={"PYTHONHASHSEED": "0"},  # a replay iterates over a set in the same order
        inherited={k: v for k, v in os.environ.items() if not k.startswith("LIGHTRL_")},  # keys
        log=w.log,
    )


def _returned(frame: Frame) -> Returned:
    fields = {name: frame[name] for name in Returned.__slots__}
    return Returned(**{**fields, "state": base64.b64decode(frame["state"])})
