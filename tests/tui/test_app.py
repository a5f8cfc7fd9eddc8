"""Keys and the terminal: a real pseudo-terminal, because that is what can be left broken."""

import os
import pty
import select
import socket
import struct
import subprocess
import sys
import time

from lightrl.tui.app import keys, turn
from lightrl.tui.render import ScreenView
from tests.support.cli import read_until, started
from tests.support.journals import left_behind

DEADLINE_S = 90.0
SHOW = """
import asyncio
from lightrl.messages.snapshot import Snapshot
from lightrl.tui.app import show_finished
asyncio.run(show_finished(Snapshot("quick", "/r", "finished", 3, 3, 3, 9.0)))
print("BACK")
"""
GONE = """
import asyncio, os, pty, sys
from lightrl.tui.app import _open_screen

ours, theirs = pty.openpty()
sys.stdin = os.fdopen(theirs)

async def lose():
    async with _open_screen() as screen:
        os.close(ours)
        await asyncio.wait_for(screen.left.wait(), 30)
        assert not asyncio.get_running_loop().remove_reader(theirs)

asyncio.run(lose())
"""


def test_keys_of_a_terminal():
    assert list(keys(b"q\x1b[A?\x1bOB\t1")) == ["q", "up", "?", "down", "tab", "1"]
    assert len(list(keys(b"\xff"))) == 1


def test_keys_turn_the_view():
    view = ScreenView()
    assert turn(view, "q") is None
    assert turn(view, "2") == ScreenView("samples")
    assert turn(ScreenView("events", selected=3), "tab") == ScreenView("overview")
    assert turn(ScreenView(help=True), "?") == ScreenView()
    assert turn(ScreenView(help=True), "x") == ScreenView()
    assert turn(ScreenView("samples"), "up") == ScreenView("samples")
    assert turn(ScreenView("samples"), "j") == ScreenView("samples", selected=1)


def test_screen_on_a_terminal_is_left_as_it_was():
    import fcntl
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-c", SHOW], stdin=theirs, stdout=theirs, env=environment
    ) as process:
        said = b""

        def until(text: bytes) -> None:
            nonlocal said
            deadline = time.monotonic() + DEADLINE_S
            while text not in said:
                assert select.select([ours], [], [], deadline - time.monotonic())[0], said
                said += os.read(ours, 65536)

        until(b"between rounds")
        assert not termios.tcgetattr(theirs)[3] & termios.ECHO
        os.write(ours, b"?")
        until(b"leave the screen")
        os.write(ours, b"3")
        until(b"nothing has happened yet")
        os.write(ours, b"q")
        until(b"BACK")
        assert process.wait(DEADLINE_S) == 0
    assert b"\x1b[?1049h" in said  # the alternate screen was opened
    assert b"\x1b[?1049l" in said  # and closed
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_a_terminal_that_is_gone_is_not_read_again():
    done = subprocess.run(
        [sys.executable, "-c", GONE], capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_top_shows_a_run_that_was_killed_where_its_journal_ends(tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one")
    with socket.create_server(("127.0.0.1", 0)) as was:
        (run_dir / "address").write_text(f"tcp://127.0.0.1:{was.getsockname()[1]}\n")
    ours, theirs = pty.openpty()
    with started(tmp_path, "top", "one", terminal=theirs) as top:
        said = read_until(ours, b"interrupted")
        said += read_until(ours, b"trying again")
        assert b"step 1/" in said
        os.write(ours, b"q")
        assert top.wait(DEADLINE_S) == 0
    os.close(ours)
    os.close(theirs)
