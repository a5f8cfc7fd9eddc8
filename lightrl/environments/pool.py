"""The pool of worker processes that run the environments of an environment node.

Owns where an episode lives, the time limit of a call, restarts. User code runs in the workers only
(worker/main.py), in an interpreter of its own, so that frames are JSON (worker/frames.py).

The limit of a call counts from when the worker begins it. A worker that exceeds it is killed, and
all episodes that it held are lost.
"""

import asyncio
import base64
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightrl.config.environment import Environment
from lightrl.environments.calls import (
    EnvironmentRaised,
    EnvironmentUnusable,
    Returned,
    StepTimedOut,
    TurnTokens,
    WorkerLost,
)
from lightrl.errors import LightRLError
from lightrl.system.child import Child, ChildDied, retry_on_resource_limit
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.system.threads import cancel

START_LIMIT_S = 300.0  # importing user code may load a model, a server may download itself
GRACE_S = 0.5  # an asynchronous call is cancelled inside its worker before the kill
RESTARTS = RestartPolicy(max_restarts=2)  # after deaths without a call between them
DEFAULT_WORKERS = 2  # of a node whose config starts none with `lightrl up`
SETUP = {"source", "args", "tools", "mcp", "resume", "timeout_s"}  # keys that a worker receives

PACKAGE = Path(__file__).parents[1]
# The interpreter may lack what `import lightrl` needs, and the option -P.
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
# in place of a wire.Codec
FRAMES: Any = SimpleNamespace(encode=lambda frame: json.dumps(frame).encode(), decode=json.loads)
# of a worker: a program that cannot be run, its end, or what user code has written to its socket
BROKEN = (OSError, ChildDied, LookupError, ValueError, TypeError)


@dataclass(slots=True, eq=False)
class _Call:
    label: str  # environment and row, for errors
    ended: asyncio.Future[Frame]
    timer: asyncio.TimerHandle | None = None  # None = it has not begun

    def end(self, result: Frame | LightRLError) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.ended.done():  # nobody waits for it any more
            return
        if isinstance(result, LightRLError):
            self.ended.set_exception(result)
            self.ended.exception()  # known to be read
        else:
            self.ended.set_result(result)

    def end_late(self, limit_s: float) -> None:
        limit = f"environment.timeout_s = {limit_s:g} s"
        self.end(StepTimedOut(f"{self.label}: took longer than {limit}"))


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    limit_s: float
    child: Child[Frame, Frame] | None = None
    is_ready: bool = False
    episodes: dict[str, str] = field(default_factory=dict[str, str])  # name -> label of its calls
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])  # by number
    overran: bool = False  # it was killed because of one of its calls

    async def receive(self) -> None:
        """Take an event. Raises one of BROKEN."""
        assert self.child is not None
        waiting = {*self.calls}
        try:
            async with asyncio.timeout(2 * self.limit_s + GRACE_S):
                frame = await self.child.receive()
        except TimeoutError:
            if waiting & self.calls.keys():
                raise ChildDied(f"{self.name} hangs outside of a call") from None
            return
        call = self.calls[frame["id"]]
        match frame["event"]:
            case "started":
                limit_s, loop = self.limit_s + GRACE_S, asyncio.get_running_loop()
                call.timer = loop.call_later(limit_s, self._overrun, call)
                return
            case "returned":
                call.end(frame)
            case "raised":
                call.end(EnvironmentRaised(f"{call.label}: {frame['reason']}"))
            case _:
                call.end_late(self.limit_s)
        del self.calls[frame["id"]]

    def _overrun(self, call: _Call) -> None:
        if call is not [c for c in self.calls.values() if c.timer is not None][-1]:
            return  # the newest call blocks it
        assert self.child is not None
        call.end_late(self.limit_s)
        self.overran, self.is_ready = True, False
        self.child.kill()  # `receive` then raises ChildDied

    async def end(self, why: str) -> None:
        """Kill the process. Its calls raise WorkerLost, and its episodes are forgotten. A call that
        took too long is to blame for the others; else each that had begun may be."""
        for call in self.calls.values():
            begun = call.timer is not None
            text = f"{call.label}: its worker was lost: {why}"
            call.end(WorkerLost(text, begun, begun and not self.overran))
        self.calls, self.episodes, self.overran, self.is_ready = {}, {}, False, False
        if self.child is not None:
            self.child.kill()  # it has nothing to save, and may hang
            await self.child.stop()


class WorkerPool:
    """`await start()`, calls at any time, `await stop()` in any case. An episode, any unique
    string, belongs to one worker from `reset` or `load` to `close`; its calls must not overlap."""

    def __init__(
        self,
        settings: Environment,
        log_dir: Path,
        report: Callable[[str], None],
        prompt_key: str = "prompt",
    ) -> None:
        """`report` gets a line about each worker that has ended. `prompt_key`: of the data, for
        runs with tools and without a class."""
        self.tools: list[dict[str, Any]] = []
        self.is_stateless = False
        self._command = settings.command or (sys.executable,)
        self._named = settings.named
        self._log_dir = log_dir
        self._report = report
        self._setup = {
            **settings.model_dump(mode="json", include=SETUP),
            "named": self._named,
            "prompt_key": prompt_key,
        }
        self._workers = [
            _Worker(f"environment-{k}", settings.timeout_s)
            for k in range(settings.workers or DEFAULT_WORKERS)
        ]
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # replaced at each change of a worker
        self._unusable = ""  # why there is no worker left

    async def start(self) -> None:
        """Start all workers. Raises EnvironmentUnusable, one line, if the source, a tool or the
        interpreter cannot be used."""
        if shutil.which(self._command[0]) is None:
            raise EnvironmentUnusable(f"environment.command: {self._command[0]}: no such program")
        self._tasks = [asyncio.create_task(self._serve(w), name=w.name) for w in self._workers]
        while not all(w.is_ready for w in self._workers):
            await self._changed.wait()
        await self._free_worker()

    async def stop(self) -> None:
        """Kill the workers. Open calls raise WorkerLost or EnvironmentUnusable."""
        await cancel(*self._tasks)
        self._unusable = self._unusable or "the environments have stopped"
        self._notify()
        await asyncio.gather(*(w.end("it was stopped") for w in self._workers))

    async def reset(
        self, episode: str, row: dict[str, Any], seed: int, expected: str = ""
    ) -> Returned:
        """Raises EnvironmentRaised, StepTimedOut, WorkerLost, EnvironmentUnusable."""
        return _returned(await self._begin(episode, row, {"call": "reset", "seed": seed}))

    async def load(self, episode: str, row: dict[str, Any], state: bytes) -> None:
        """Begin an episode from what `save` returned. Raises as `reset`."""
        encoded = base64.b64encode(state).decode()
        await self._begin(episode, row, {"call": "load", "state": encoded})

    async def step(
        self,
        episode: str,
        message: dict[str, Any],
        tokens: TurnTokens | None = None,
        expected: str = "",
    ) -> Returned:
        """Raises as `reset`; WorkerLost(in_call=False) if the episode was lost before."""
        return _returned(await self._ask(episode, {"call": "step", "message": message}))

    async def end(
        self, episode: str, cut: dict[str, Any] | None, tokens: TurnTokens | None = None
    ) -> Returned:
        """A limit ended an episode: return the reward that the environment gives now, if it does.
        `cut`: the turn that was cut. Raises as `step`."""
        return _returned(await self._ask(episode, {"call": "end", "message": cut}))

    def answers(self, message: dict[str, Any]) -> bool:
        """Return whether tools of the run answer a message, as `WithTools` decides."""
        ours = {tool["function"]["name"] for tool in self.tools}
        return any(call["function"]["name"] in ours for call in message.get("tool_calls", ()))

    @property
    def has_user_turns(self) -> bool:
        return not self.is_stateless

    def close(self, episode: str, why: str = "") -> None:
        """Forget an episode, whatever it is doing."""
        if (w := self._home(episode)) is not None:
            self._post(w, episode, {"call": "close"})
            del w.episodes[episode]

    async def _begin(self, episode: str, row: dict[str, Any], fields: Frame) -> Frame:
        self.close(episode)
        which = f"row {row['index']}" if "index" in row else f"episode {episode}"
        while True:
            w = await self._free_worker()
            w.episodes[episode] = f"{self._named}: {which}"
            try:
                return await self._post(w, episode, {**fields, "row": row})
            except WorkerLost as lost:
                if lost.in_call:
                    raise

    async def _ask(self, episode: str, fields: Frame) -> Frame:
        if (w := self._home(episode)) is None:
            raise WorkerLost(f"{self._named}: episode {episode}: its worker was lost")
        return await self._post(w, episode, fields)

    def _home(self, episode: str) -> _Worker | None:
        return next((w for w in self._workers if episode in w.episodes), None)

    def _post(self, w: _Worker, episode: str, fields: Frame) -> asyncio.Future[Frame]:
        assert w.child is not None
        number, ended = next(self._numbers), asyncio.get_running_loop().create_future()
        w.calls[number] = _Call(w.episodes[episode], ended)
        w.child.send({**fields, "episode": episode, "id": number})
        return ended

    async def _free_worker(self) -> _Worker:
        """Return the ready worker with the fewest calls, then episodes; wait until there is one."""
        while not self._unusable:
            if ready := [w for w in self._workers if w.is_ready]:
                return min(ready, key=lambda w: (len(w.calls), len(w.episodes)))
            await self._changed.wait()
        raise EnvironmentUnusable(self._unusable)

    async def _serve(self, w: _Worker) -> None:
        """Receive from a worker, and start it again when it dies. One that cannot be started again
        is given up; without workers, the environment is unusable."""
        deaths, is_over = CrashCounter(RESTARTS), False
        while not is_over:
            how = "died {} times at start"
            try:
                await self._start(w)
                how = f"{w.name} keeps dying"
                while True:
                    await w.receive()
                    deaths.progressed()
            except EnvironmentUnusable as e:
                why, is_over = str(e), True
            except BROKEN as e:
                why, is_over = str(e), deaths.crashed() is None
                if is_over:
                    why = f"{self._named}: {how.format(deaths.in_a_row)}: {why}"
            await w.end(why)
            self._report(why if is_over else f"{why}; starting it again")
        self._workers.remove(w)
        self._unusable = "" if self._workers else why  # pyright: ignore[reportPossiblyUnboundVariable]
        self._notify()

    async def _start(self, w: _Worker) -> None:
        """Raises EnvironmentUnusable if the worker cannot serve, or one of BROKEN."""
        start = partial(
            Child[Frame, Frame].start_program,
            [*self._command, "-c", BOOT, str(PACKAGE)],
            w.name,
            FRAMES,
            FRAMES,
            env={"PYTHONHASHSEED": "0"},  # a replay iterates over a set in the same order
            inherited={k: v for k, v in os.environ.items() if not k.startswith("LIGHTRL_")},  # keys
            log=self._log_dir / f"{w.name}.log",
        )
        w.child = await retry_on_resource_limit(start, w.name, self._report)
        w.child.send({"setup": self._setup})
        try:
            async with asyncio.timeout(START_LIMIT_S):
                frame = await w.child.receive()
        except TimeoutError:
            why = f"{self._named}: no start within {START_LIMIT_S:g} s"
            raise EnvironmentUnusable(why) from None
        if "failed" in frame:
            raise EnvironmentUnusable(frame["failed"])
        self.tools, self.is_stateless = frame["tools"], frame["is_stateless"]
        w.is_ready = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _returned(frame: Frame) -> Returned:
    fields = {name: frame[name] for name in Returned.__slots__ if name in frame}
    return Returned(**{**fields, "state": base64.b64decode(frame["state"])})
