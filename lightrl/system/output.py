"""Lines for whoever reads the output of a process. They are never worth more than the process
itself.

Owns that a reader who is slow, has stopped the terminal or has gone holds nothing up: a thread
writes to whatever may block, and drops the oldest lines when too much waits. A file is written at
once, and nothing of it is lost but by a full disk. Also owns that no text can command the terminal
that it is printed on. How a line of a log looks is said in ../log.py.
"""

import atexit
import codecs
import contextlib
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TextIO

MAX_WAITING_BYTES = 256 << 10  # for each descriptor that is not read
LAST_WORDS_S = 1.0  # how long a process that ends waits for whoever reads it

_WHITE = "\t\n\r"
SPELLED = "lightrl.spelled"  # what encoders do with characters that they lack


def plain(text: str) -> str:
    """`text` on one line, without what could move the cursor, colour the terminal or reverse the
    reading.

    White space becomes blanks; every other character that is not printable is spelled as JSON does
    it, so that JSON stays the same JSON. Example: plain("a\\x1b[31m") is "a\\\\u001b[31m".
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _spelled(c) for c in text)


def print_lines(text: str) -> None:
    """The lines of `text`, at once or as soon as they are read; they are lost if they cannot be."""
    print_to(sys.stdout, text)


def print_error(text: str, style: str = "") -> None:
    """The same on stderr, after all that was printed before. `style` is an escape sequence for a
    terminal."""
    flush()
    styled = bool(style) and sys.stderr is not None and sys.stderr.isatty()
    print_to(sys.stderr, text, *((style, "\x1b[0m") if styled else ()))


def show(lines: Iterable[str]) -> None:
    """What a command was asked for: all of it, however long its reader takes."""
    print("\n".join(map(plain, lines)))


def flush(limit_s: float = LAST_WORDS_S) -> bool:
    """Waits up to `limit_s` for what was printed to be written; whether it was."""
    deadline = time.monotonic() + limit_s
    return all(writer.flush(deadline - time.monotonic()) for writer in tuple(_writers.values()))


def is_behind() -> bool:
    """Whether something that was printed waits to be read."""
    return not flush(0.0)


def spell_what_cannot_be_printed() -> None:
    """From now on no character fails to be printed: one that the encoding of stdout or stderr lacks
    is spelled as JSON does it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it has been put onto a pipe behind Python's back
                stream.reconfigure(errors=SPELLED)


def never_fail() -> None:
    """From now on whatever prints in this process, others' code too, loses what it cannot print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if (descriptor := _descriptor(stream)) is not None:
            raw = _Lossy(descriptor, "w", closefd=False)
            raw.label = name
            atexit.register(raw.end)
            text = io.TextIOWrapper(raw, stream.encoding, SPELLED, write_through=True)  # pyright: ignore[reportArgumentType]
            setattr(sys, name, text)


def capture_lines(take: Callable[[str, str], None] | None) -> None:
    """Once nothing fails: what is printed goes line by line to `take` instead, which is told of
    which stream ("stdout", "stderr") it is. None: as before."""
    global _take
    _take = take


class _Lossy(io.FileIO):
    """Below sys.stdout or sys.stderr."""

    label = ""
    _begun = b""  # of a line that is captured

    def write(self, data: Any) -> int:
        if _take is None:
            _write(self.fileno(), bytes(data))
        else:
            *lines, self._begun = (self._begun + bytes(data)).split(b"\n")
            if len(self._begun) > MAX_WAITING_BYTES:
                lines.append(self._begun)
                self._begun = b""
            for line in lines:
                _take(self.label, line.decode(errors="backslashreplace"))
        return len(data)

    def end(self) -> None:
        """The line that nobody will end any more."""
        if self._begun:
            self.write(b"\n")


def _spelled(character: str) -> str:
    if character in _WHITE:
        return " "
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def print_to(stream: TextIO | None, text: str, before: str = "", after: str = "") -> None:
    """The lines of `text`, as `print_lines` does; never captured."""
    lines = before + "\n".join(map(plain, text.split("\n"))) + after + "\n"
    descriptor = _descriptor(stream)
    with contextlib.suppress(OSError):
        if descriptor is None:
            print(lines, end="", file=stream, flush=True)
        else:  # a buffer would keep what it cannot write, and fail with it when the process ends
            assert stream is not None
            stream.flush()
            _write(descriptor, lines.encode())


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):  # it is none of the operating system's, or closed
        return None


def _write(descriptor: int, data: bytes) -> None:
    """Loses what cannot be written. Does not wait for a reader."""
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _write_all(descriptor, data)
        else:
            _writers.setdefault(descriptor, _Writer(descriptor)).put(data)
    except OSError:
        pass


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody who shares the terminal has made it so
            select.select([], [descriptor], [])


class _Writer:
    """What waits to be written to one descriptor, oldest first, and the thread that may block in
    it.

    The thread touches no stream of Python: whoever ends this process would wait for the lock of
    that.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._num_missing = 0  # lines between what was written last and what waits
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, data: bytes) -> None:
        with self._changed:
            self._waiting.append(data)
            self._size += len(data)
            while self._size > MAX_WAITING_BYTES and len(self._waiting) > 1:
                oldest = self._waiting.popleft()
                self._size -= len(oldest)
                self._num_missing += oldest.count(b"\n")
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="output", daemon=True)
                # no more threads here: the next line tries again
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def flush(self, limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._is_writing, max(0.0, limit_s)
            )

    def _run(self) -> None:
        while True:
            data = self._next()
            with contextlib.suppress(OSError):
                _write_all(self._descriptor, data)

    def _next(self) -> bytes:
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting)
            self._is_writing = True
            num_missing, self._num_missing = self._num_missing, 0
            if num_missing:
                return (
                    f"... {num_missing} lines dropped: they were not read in time ...\n"
                ).encode()
            data = self._waiting.popleft()
            self._size -= len(data)
            return data


codecs.register_error(
    SPELLED,
    lambda e: ("".join(map(_spelled, e.object[e.start : e.end])), e.end),  # pyright: ignore
)
_take: Callable[[str, str], None] | None = None
_writers: dict[int, _Writer] = {}  # by descriptor
os.register_at_fork(after_in_child=_writers.clear)  # threads stay behind, with what waits for them
atexit.register(flush)
