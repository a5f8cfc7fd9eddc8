"""The worker process of environments: loads the source, runs the episodes of the pool.

User code runs here and only here: it may raise, hang, fork, print or end the process. The pool
measures the time from "started" on and kills the process; only asynchronous calls are cancelled
here. Runs in the interpreter of `environment.command`, so standard library only.

Plain functions are called in the main thread while the event loop does not run, one at a time, so
that they can use `asyncio.run` and signals; coroutines overlap.
"""

import asyncio
import base64
import contextlib
import inspect
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable
from typing import Any

from lightrl.environments.worker import frames
from lightrl.environments.worker.base import Episode, Observation, UserError
from lightrl.environments.worker.load import add_tools, load_source

MAX_STATE_BYTES = 1 << 24  # what `save` returns; lightrl/messages/episodes.py has the same


def main(descriptor: int) -> None:
    """Serve until the pool closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A batch system sends them to every process, but the daemon decides when to stop. A handler
    # instead of SIG_IGN, which programs started by user code would inherit.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    # The pool has gone; or this is a process that user code has forked, and that came back here.
    with contextlib.suppress(OSError, EOFError):
        _Worker(socket.socket(fileno=descriptor)).serve()
    os._exit(0)  # threads of user code would keep the process


class _Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._home = os.getcwd()
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._episodes: dict[str, Episode] = {}
        self._blocked_s = 0.0  # in calls, while the loop did not run
        self._tasks: set[asyncio.Task[None]] = set()  # asynchronous calls, named as their episodes
        os.register_at_fork(after_in_child=self._forked)

    def serve(self) -> None:
        """Raises EOFError or OSError when the pool has closed the socket."""
        setup = frames.receive(self._sock)["setup"]
        self._limit_s: float = setup["timeout_s"]
        self._saves: bool = setup["resume"] == "snapshot"
        self._load(setup)
        while True:
            # a task that raises SystemExit raises it here, too
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.add_reader(self._sock, self._loop.stop)
                self._loop.run_forever()  # until something arrives
                self._loop.remove_reader(self._sock)  # user code may run the loop, too
                self._begin(frames.receive(self._sock))

    def _load(self, setup: dict[str, Any]) -> None:
        """Raises EOFError after a report of what cannot be used."""
        named = setup["named"]
        sys.argv = [named]
        sys.path.append(self._home)  # of the project that the files belong to
        try:
            make = load_source(setup["source"], setup["args"]) if setup["source"] else None
            self._make, tools = self._loop.run_until_complete(add_tools(make, setup))
        except BaseException as e:  # importing user code may raise anything, or exit
            reason = frames.one_line(e)
            if not isinstance(e, UserError):
                frames.log_traceback(e)
                reason = f"cannot be loaded: {reason}"
            self._send({"failed": reason if named in reason else f"{named}: {reason}"})
            raise EOFError from None
        self._send({"ready": True, "tools": tools, "is_stateless": make is None})

    def _begin(self, frame: dict[str, Any]) -> None:
        """Begin a call; it is over on return unless it is asynchronous."""
        self._send({"id": frame["id"], "event": "started"})
        os.chdir(self._home)  # user code may have changed it
        began = time.perf_counter()
        try:
            value = self._call(frame["episode"], frame)
            if inspect.isawaitable(value):
                later = self._later(frame, value, began)
                self._tasks.add(task := self._loop.create_task(later, name=frame["episode"]))
                task.add_done_callback(self._tasks.discard)
            else:
                self._returned(frame, value, began)
        except BaseException as e:  # user code may raise anything, or exit
            self._raised(frame, e)
        self._blocked_s += time.perf_counter() - began

    def _call(self, name: str, frame: dict[str, Any]) -> Any:
        match frame["call"]:
            case "step":
                return self._episodes[name].step(frame["message"])
            case "end":
                end = getattr(self._episodes[name], "end", None)
                return Observation([], done=True) if end is None else end(frame["message"])
            case "close":
                for task in self._tasks:
                    if task.get_name() == name:
                        task.cancel()
                return self._episodes.pop(name).close() if name in self._episodes else None
        episode: Any = self._make()
        self._episodes[name] = episode
        if frame["call"] == "reset":
            return episode.reset(frame["row"], frame["seed"])
        return episode.load(base64.b64decode(frame["state"]))

    async def _later(self, frame: dict[str, Any], value: Awaitable[Any], began: float) -> None:
        """Wait for an asynchronous call, and cancel it at the limit."""
        work = asyncio.ensure_future(value)
        try:
            blocked_s, left_s = self._blocked_s, self._limit_s
            while left_s > 0 and not work.done():
                await asyncio.wait({work}, timeout=left_s)
                blocked_s, left_s = self._blocked_s, self._blocked_s - blocked_s
            if work.done():
                self._returned(frame, work.result(), began)
            else:
                self._send({"id": frame["id"], "event": "timeout"})
        except BaseException as e:  # as above
            self._raised(frame, e)
        finally:
            work.cancel()

    def _returned(self, frame: dict[str, Any], value: Any, began: float) -> None:
        """Send what a call returned. Raises UserError if it cannot be used."""
        answer: dict[str, Any] = {"seconds": time.perf_counter() - began, "state": ""}
        if frame["call"] in ("reset", "step", "end"):
            answer |= frames.to_fields(value, frame["call"])
            answer["has_end"] = hasattr(self._episodes[frame["episode"]], "end")
            if self._saves and answer["tools"]:
                raise UserError('tools of an episode need environment.resume = "replay"')
            if self._saves and not answer["done"]:
                state = _saved(self._episodes[frame["episode"]])
                answer["state"] = base64.b64encode(state).decode()
        self._send({"id": frame["id"], "event": "returned", **answer})

    def _raised(self, frame: dict[str, Any], error: BaseException) -> None:
        reason = frames.one_line(error)
        if not isinstance(error, UserError):
            reason = f"{frame['call']} raised {reason}"
            frames.log_traceback(error)
        self._send({"id": frame["id"], "event": "raised", "reason": reason})

    def _send(self, frame: dict[str, Any]) -> None:
        self._sock.sendall(frames.pack(frame))

    def _forked(self) -> None:
        self._sock.close()  # `_send` then raises OSError: that process is not the worker
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is _ignore:
                signal.signal(number, signal.SIG_DFL)


def _saved(episode: Any) -> bytes:
    """Raises UserError."""
    if not hasattr(episode, "save"):
        raise UserError('environment.resume = "snapshot" needs the methods save and load')
    state = episode.save()
    if not isinstance(state, bytes) or len(state) > MAX_STATE_BYTES:
        raise UserError(
            f"save returned {frames.kind_of(state)}, not at most {MAX_STATE_BYTES} bytes"
        )
    return state


def _ignore(number: int, frame: object) -> None:
    pass
