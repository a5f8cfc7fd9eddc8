"""Draw snapshots on the live screen as they arrive, and read single keys. Owns the terminal while
the screen is open.

`render.py` creates the content of the screen; `client/ask.py` receives the snapshots.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lightrl.client import ask
from lightrl.client.find_run import OVER, final_snapshot, require_same
from lightrl.errors import PeerUnreachable
from lightrl.messages.snapshot import Snapshot
from lightrl.system.output import flush, is_behind, never_fail
from lightrl.system.threads import cancel
from lightrl.tui.render import PAGES, ScreenView, render

EVERY_S = 0.5  # interval between snapshots
RETRY_S = 1.0  # delay before the next attempt to connect
ESCAPES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}


def keys(data: bytes) -> Iterator[str]:
    """Yield the keys in bytes that a terminal sent. Example: keys(b"q\\x1b[A?") yields "q", "up",
    "?"."""
    while data:
        for escape, name in ESCAPES.items():
            if data.startswith(escape):
                yield name
                data = data[len(escape) :]
                break
        else:
            yield "tab" if data[:1] == b"\t" else data[:1].decode("ascii", errors="replace")
            data = data[1:]


def turn(view: ScreenView, key: str) -> ScreenView | None:
    """Return the view after `key` was pressed, or None if the key closes the screen."""
    match key:
        case "q":
            return None
        case "?":
            return replace(view, help=not view.help)
        case "1" | "2" | "3":
            return replace(view, page=PAGES[int(key) - 1], help=False, selected=0)
        case "tab":
            following = PAGES[(PAGES.index(view.page) + 1) % len(PAGES)]
            return replace(view, page=following, help=False, selected=0)
        case "up" | "k":
            return replace(view, selected=max(0, view.selected - 1))
        case "down" | "j":
            return replace(view, selected=view.selected + 1)
        case _:
            return replace(view, help=False)


@dataclass
class Screen:
    """The current content of the screen. `left` is set when the user presses q."""

    live: Live
    snapshot: Snapshot | None = None
    view: ScreenView = field(default_factory=ScreenView)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    # the last frame was skipped
    is_stale: bool = False

    def draw(self) -> None:
        """Draw the current view, or skip this frame if the terminal has not yet read the last
        one."""
        self.is_stale = is_behind()
        if self.is_stale:
            return
        width, height = self.live.console.size
        if self.snapshot is None:
            self.live.update(
                Text(self.view.notice or "waiting for the coordinator ..."), refresh=True
            )
        else:
            self.live.update(render(self.snapshot, self.view, width, height), refresh=True)

    def press(self, data: bytes) -> None:
        if not data:  # the terminal was closed
            self.left.set()
        for key in keys(data):
            following = turn(self.view, key)
            if following is None:
                self.left.set()
                return
            self.view = self._clamped(following)
        self.draw()

    def show(self, snapshot: Snapshot) -> None:
        moved = 0
        if self.snapshot is not None and self.view.page == "samples" and self.view.selected:
            # New samples are inserted at the head: keep the same sample selected.
            ids = [sample.response for sample in snapshot.samples]
            reading = (
                self.snapshot.samples[self.view.selected].response if self.snapshot.samples else ""
            )
            moved = ids.index(reading) - self.view.selected if reading in ids else 0
        self.snapshot = snapshot
        self.view = self._clamped(
            replace(self.view, notice="", selected=self.view.selected + moved)
        )
        self.draw()

    def notify(self, notice: str) -> None:
        self.view = replace(self.view, notice=notice)
        self.draw()

    def _clamped(self, view: ScreenView) -> ScreenView:
        length = 0
        if self.snapshot is not None:
            length = len(self.snapshot.samples if view.page == "samples" else self.snapshot.events)
        return replace(view, selected=max(0, min(view.selected, length - 1)))


async def watch_live(
    address: str, key: str, stay: bool, run_dir: Path | None = None, first: Snapshot | None = None
) -> bool:
    """Show the run at `address` until q is pressed or, unless `stay`, until the run is over.

    `first` is shown until the first snapshot arrives. Returns True if the run is over, False if the
    user pressed q. Raises LightRLError if another run than that in `run_dir` answers at `address`.
    """
    async with _open_screen() as screen:
        if first is not None:
            screen.show(first)
        following = asyncio.create_task(_follow(address, key, run_dir, screen))
        leaving = asyncio.create_task(screen.left.wait())
        try:
            await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                if stay:
                    screen.notify("the run is over; press q to quit")
                    await leaving
            return following.done()
        finally:
            await cancel(following, leaving)


async def show_finished(snapshot: Snapshot) -> None:
    """Show the last snapshot of a finished run until q is pressed."""
    async with _open_screen() as screen:
        screen.show(snapshot)
        await screen.left.wait()


async def _follow(address: str, key: str, run_dir: Path | None, screen: Screen) -> None:
    """Show snapshots until the run is over. Notify the user of a lost connection and reconnect."""
    while True:
        try:
            async with contextlib.aclosing(ask.watch(address, EVERY_S, key)) as snapshots:
                async for snapshot in snapshots:
                    require_same(snapshot, run_dir, address)
                    screen.show(snapshot)
                    if snapshot.state in OVER:
                        return
            screen.notify(f"{address} closed the connection; trying again ...")
        except PeerUnreachable:
            screen.notify(f"no answer from {address}; trying again ...")
        if run_dir is not None and (last := final_snapshot(run_dir)) is not None:
            screen.show(last)
            return
        await asyncio.sleep(RETRY_S)


@contextlib.asynccontextmanager
async def _open_screen() -> AsyncIterator[Screen]:
    """Open the alternate screen and read single keys; restore the terminal afterwards."""
    never_fail()
    console = Console()
    loop = asyncio.get_running_loop()
    with _single_keys() as terminal, Live(console=console, screen=True, auto_refresh=False) as live:
        screen = Screen(live)

        def on_input(terminal: int) -> None:
            if not (data := _read(terminal)):
                loop.remove_reader(terminal)  # a closed terminal would always be readable
            screen.press(data)

        if terminal is not None:
            loop.add_reader(terminal, on_input, terminal)
        redraw = asyncio.create_task(_redraw(screen))
        screen.draw()
        try:
            yield screen
        finally:
            if terminal is not None:
                loop.remove_reader(terminal)
            await cancel(redraw)


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """Switch stdin to single keys without echo; ctrl-C remains a signal. Yield the descriptor of
    the terminal, or None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        flush()
        with contextlib.suppress(termios.error):  # the terminal was closed
            # TCSADRAIN would wait until all output is read
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1024)
    except OSError:  # the terminal was closed
        return b""


async def _redraw(screen: Screen) -> None:
    """Redraw the screen between snapshots if the window was resized or a frame was skipped."""
    size = screen.live.console.size
    while True:
        await asyncio.sleep(0.25)
        if screen.is_stale or screen.live.console.size != size:
            size = screen.live.console.size
            screen.draw()
