"""Print lines without blocking or ending the process.

A slow reader, a stopped terminal or a closed pipe delays nothing: a thread writes to descriptors
that may block, and drops the oldest lines when too many are pending. Files are written directly;
only a full disk loses lines. Control characters are escaped, so that no text can control the
terminal. ../log.py formats the lines of a log.
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

MAX_WAITING_BYTES = 256 << 10  # pending for each descriptor
FLUSH_S = 1.0  # most seconds to flush when the process ends

_WHITE = "\t\n\r"
ESCAPE = "lightrl.escape"  # error handler of encoders


def plain(text: str) -> str:
    """`text` on one line, without what could move the cursor, colour the terminal or reverse the
    reading.

    White space becomes blanks; every other character that is not printable is escaped as JSON does
    it, so that JSON stays the same JSON. Example: plain("a\\x1b[31m") is "a\\\\u001b[31m".
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def print_lines(text: str) -> None:
    """Print the lines of `text` on stdout without waiting for a reader."""
    print_to(sys.stdout, text)


def print_error(text: str, style: str = "") -> None:
    """Print on stderr, after earlier output. `style`: an escape sequence for a terminal."""
    flush()
    styled = bool(style) and sys.stderr is not None and sys.stderr.isatty()
    print_to(sys.stderr, text, *((style, "\x1b[0m") if styled else ()))


def show(lines: Iterable[str]) -> None:
    """Print the result of a command; waits for its reader."""
    print("\n".join(map(plain, lines)))


def flush(limit_s: float = FLUSH_S) -> bool:
    """Wait up to `limit_s` until all output is written; return whether it is."""
    deadline = time.monotonic() + limit_s
    return all(writer.flush(deadline - time.monotonic()) for writer in tuple(_writers.values()))


def is_behind() -> bool:
    """Return whether output is pending."""
    return not flush(0.0)


def escape_unencodable() -> None:
    """Escape characters that the encoding of stdout or stderr lacks, as JSON does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it has been put onto a pipe behind Python's back
                stream.reconfigure(errors=ESCAPE)


def never_fail() -> None:
    """Make every print of this process, also of user code, drop what cannot be written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if (descriptor := _descriptor(stream)) is not None:
            raw = _Lossy(descriptor, "w", closefd=False)
            raw.label = name
            atexit.register(raw.end)
            text = io.TextIOWrapper(raw, stream.encoding, ESCAPE, write_through=True)  # pyright: ignore[reportArgumentType]
            setattr(sys, name, text)


def capture_lines(take: Callable[[str, str], None] | None) -> None:
    """After `never_fail`: pass ("stdout" or "stderr", line) to `take` instead of printing; None
    prints again."""
    global _take
    _take = take


class _Lossy(io.FileIO):
    """The raw file of sys.stdout or sys.stderr."""

    label = ""
    _begun = b""  # the start of a captured line

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
        """Pass on an unfinished last line."""
        if self._begun:
            self.write(b"\n")


def _escaped(character: str) -> str:
    if character in _WHITE:
        return " "
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def print_to(stream: TextIO | None, text: str, before: str = "", after: str = "") -> None:
    """Print the lines of `text` to `stream` without waiting for a reader; never captured."""
    lines = before + "\n".join(map(plain, text.split("\n"))) + after + "\n"
    descriptor = _descriptor(stream)
    with contextlib.suppress(OSError):
        if descriptor is None:
            print(lines, end="", file=stream, flush=True)
        else:  # a buffer would fail at the end of the process with what it could not write
            assert stream is not None
            stream.flush()
            _write(descriptor, lines.encode())


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):  # it is none of the operating system's, or closed
        return None


def _write(descriptor: int, data: bytes) -> None:
    """Write without waiting for a reader; drop what cannot be written."""
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
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [descriptor], [])


class _Writer:
    """Pending output of one descriptor, oldest first, and the thread that writes it.

    The thread uses no Python stream, whose lock could block the end of the process.
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
                # no thread can be started: the next line tries again
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
    ESCAPE,
    lambda e: ("".join(map(_escaped, e.object[e.start : e.end])), e.end),  # pyright: ignore
)
_take: Callable[[str, str], None] | None = None
_writers: dict[int, _Writer] = {}  # by descriptor
os.register_at_fork(after_in_child=_writers.clear)  # a forked process has no such threads
atexit.register(flush)
