"""The worker process of environments: loads the source, runs the episodes of the pool.

User code runs here and only here: it may raise, hang, fork, print or end the process. The pool
measures the time from "started" on and kills the process; only asynchronous calls are cancelled
here. Runs in the interpreter of `environment.command`, so standard library only.

Plain functions are called in the main thread while the event loop stands still, one at a time, so
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
import traceback
from typing import Any

from lightrl.environments.worker.base import Episode, UserError
from lightrl.environments.worker.frames import kind_of, one_line, pack, receive, to_fields
from lightrl.environments.worker.load import add_tools, load_source

MAX_STATE_BYTES = 1 << 24  # what `save` returns; lightrl/messages/episodes.py has the same
MAX_TRACEBACKS = 20  # in the log of a worker, for an environment that always fails


def main(descriptor: int) -> None:
    """Serve until the pool closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A batch system sends them to every process, but the daemon decides when to stop. A handler
    # instead of SIG_IGN, which programs started by user code would inherit.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.suppress(ConnectionError, EOFError):  # the pool has gone
        _Worker(socket.socket(fileno=descriptor)).serve()
    os._exit(0)  # threads of user code would keep the process


class _Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._home = os.getcwd()
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._episodes: dict[str, Episode] = {}
        self._running: dict[str, asyncio.Future[Any]] = {}  # asynchronous calls, by episode
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_tracebacks = 0
        os.register_at_fork(after_in_child=self._forked)

    def serve(self) -> None:
        """Raises EOFError or ConnectionError when the pool has closed the socket."""
        setup = receive(self._sock)["setup"]
        self._limit_s: float = setup["timeout_s"]
        self._saves: bool = setup["resume"] == "snapshot"
        self._load(setup)
        self._loop.add_reader(self._sock, self._loop.stop)
        while True:
            # a task that raises SystemExit raises it here, too
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()  # until something arrives
                self._check_process()
                self._begin(receive(self._sock))

    def _load(self, setup: dict[str, Any]) -> None:
        """Raises EOFError after a report of what cannot be used."""
        named = setup["named"]
        sys.argv = [named]
        sys.path.append(self._home)  # of the project that the files belong to
        try:
            make = load_source(setup["source"], setup["args"]) if setup["source"] else None
            self._make, tools = self._loop.run_until_complete(add_tools(make, setup))
        except BaseException as e:  # importing user code may raise anything, or exit
            reason = one_line(e)
            if not isinstance(e, UserError):
                traceback.print_exc()
                reason = f"cannot be loaded: {reason}"
            self._send({"failed": reason if named in reason else f"{named}: {reason}"})
            raise EOFError from None
        self._send({"ready": True, "tools": tools, "is_stateless": make is None})

    def _begin(self, frame: dict[str, Any]) -> None:
        """Begin a call; it is over on return unless it is asynchronous."""
        name = frame["episode"]
        self._send({"id": frame["id"], "event": "started"})
        os.chdir(self._home)  # user code may have changed it
        began = time.perf_counter()
        try:
            value = self._call(frame["call"], name, frame)
        except BaseException as e:  # user code may raise anything, or exit
            self._raised(frame, e)
            return
        episode = self._episodes.get(name)
        work = self._finish(frame, value, episode, began)
        if inspect.isawaitable(value) or inspect.iscoroutinefunction(getattr(episode, "save", 0)):
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            with contextlib.suppress(StopIteration):  # it waits for nothing
                work.send(None)

    def _call(self, call: str, name: str, frame: dict[str, Any]) -> Any:
        if call == "close":
            if name in self._running:
                self._running[name].cancel()
            return self._episodes.pop(name).close() if name in self._episodes else None
        if call == "step":
            return self._episodes[name].step(frame["message"])
        self._episodes[name] = episode = self._make()
        if call == "reset":
            return episode.reset(frame["row"], frame["seed"])
        return getattr(episode, "load")(base64.b64decode(frame["state"]))  # noqa: B009

    async def _finish(self, frame: dict[str, Any], value: Any, episode: Any, began: float) -> None:
        """Send what a call returned. Runs without an event loop where nothing is asynchronous."""
        try:
            if inspect.isawaitable(value):
                value = await self._within_limit(frame["episode"], value)
            seconds, fields, state = time.perf_counter() - began, dict[str, Any](), b""
            if frame["call"] in ("reset", "step"):
                fields = to_fields(value, frame["call"])
                if self._saves and not fields["done"]:
                    state = await _save(episode)
            fields.update(seconds=seconds, state=base64.b64encode(state).decode())
            self._send({"id": frame["id"], "event": "returned", **fields})
        except _TookTooLong:
            self._send({"id": frame["id"], "event": "timeout"})
        except BaseException as e:
            self._raised(frame, e)

    async def _within_limit(self, name: str, value: Any) -> Any:
        """Raises _TookTooLong after the limit of a call."""
        running = self._running[name] = asyncio.ensure_future(value)
        await asyncio.wait({running}, timeout=self._limit_s)
        if self._running.get(name) is running:
            del self._running[name]
        if not running.done():
            running.cancel()
            raise _TookTooLong
        return running.result()

    def _raised(self, frame: dict[str, Any], error: BaseException) -> None:
        reason = one_line(error)
        if not isinstance(error, UserError):
            reason = f"{frame['call']} raised {reason}"
            self._num_tracebacks += 1
            if self._num_tracebacks <= MAX_TRACEBACKS:
                traceback.print_exception(type(error), error, error.__traceback__)
        self._send({"id": frame["id"], "event": "raised", "reason": reason})

    def _send(self, frame: dict[str, Any]) -> None:
        self._check_process()
        self._sock.sendall(pack(frame))

    def _check_process(self) -> None:
        """End a process that user code forked and that has come back here: it is not the worker."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _forked(self) -> None:
        self._sock.close()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is _ignore:
                signal.signal(number, signal.SIG_DFL)


class _TookTooLong(Exception):
    """An asynchronous call was cancelled."""


async def _save(episode: Any) -> bytes:
    if not hasattr(episode, "save") or not hasattr(episode, "load"):
        raise UserError('environment.resume = "snapshot" needs the methods save and load')
    state = episode.save()
    state = await state if inspect.isawaitable(state) else state
    if not isinstance(state, bytes) or len(state) > MAX_STATE_BYTES:
        size = f" of {len(state)}" if isinstance(state, bytes) else ""
        raise UserError(
            f"save returned {kind_of(state)}{size}, not at most {MAX_STATE_BYTES} bytes"
        )
    return state


def _ignore(number: int, frame: object) -> None:
    pass
