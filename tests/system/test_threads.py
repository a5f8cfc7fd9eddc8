"""Calls in a thread, on a machine that may have none to spare."""

import asyncio
import errno
import threading

import pytest

from lightrl.system.threads import in_thread


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
