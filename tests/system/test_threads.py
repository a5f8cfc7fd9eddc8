"""Calls in a thread, on a machine that may have none to spare."""

import asyncio
import errno
import threading
import time
from typing import Any

import pytest

from lightrl.system.threads import in_thread, taken_in_thread


def wait_for_a_callback(loop: Any) -> None:
    """In this very turn: one from another thread."""
    while not loop._ready:
        time.sleep(0.001)


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_call_is_made_in_another_thread():
    def who(name: str) -> tuple[str, int]:
        return name, threading.get_ident()

    name, thread = asyncio.run(in_thread(who, name="a"))
    assert name == "a"
    assert thread != threading.get_ident()


def test_a_call_that_no_thread_is_left_for_is_not_made_later(monkeypatch):
    calls: list[str] = []

    async def story() -> None:
        await asyncio.to_thread(calls.append, "a pool has a thread now")
        with monkeypatch.context() as lack:
            lack.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OSError, match="new thread") as raised:
                await in_thread(calls.append, "refused")
        assert raised.value.errno == errno.EAGAIN
        await in_thread(calls.append, "made")

    asyncio.run(story())
    assert calls == ["a pool has a thread now", "made"]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_cancelled_call_returns_is_given_back(is_late: bool):
    """Whether the cancel comes while it is made, or in the turn in which it is over."""
    begun, may_end, given = threading.Event(), threading.Event(), threading.Event()

    def act() -> str:
        begun.set()
        may_end.wait()
        return "claim"

    back: list[tuple[str, bool]] = []

    def give_back(what: str) -> None:
        back.append((what, threading.current_thread() is threading.main_thread()))
        given.set()

    async def story() -> None:
        taking = asyncio.ensure_future(taken_in_thread(give_back, act))
        await in_thread(begun.wait)
        if is_late:
            may_end.set()
            wait_for_a_callback(asyncio.get_running_loop())
            await asyncio.sleep(0)  # now the result is there, and the task does not know
        taking.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await in_thread(given.wait, 10)

    asyncio.run(story())
    assert back == [("claim", False)]
