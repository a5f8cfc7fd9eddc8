"""Lines for whoever reads the output of a process. They are never worth more than the process itself."""

import contextlib
import io
import sys
from typing import Any


def say(text: str) -> None:
    """Prints a line at once; it is lost if it cannot be, as on a full disk."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    with contextlib.suppress(OSError):
        if raw is None:
            print(text, flush=True)
        else:  # a buffer would keep what it cannot write, and fail with it when the process ends
            sys.stdout.flush()
            raw.write(f"{text}\n".encode(errors="backslashreplace"))


def never_fail() -> None:
    """From now on whatever prints in this process, others' code too, loses what it cannot print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            raw = _Lossy(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", write_through=True)  # pyright: ignore[reportArgumentType]
            setattr(sys, name, text)


class _Lossy(io.FileIO):
    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)
