"""Lines for whoever reads the output of a process. They are never worth more than the process itself."""

import contextlib
import sys


def say(text: str) -> None:
    """Prints a line at once; it is lost if it cannot be, as on a full disk."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    with contextlib.suppress(OSError):
        if raw is None:
            print(text, flush=True)
        else:  # a buffer would keep what it cannot write, and fail with it when the process ends
            sys.stdout.flush()
            raw.write(f"{text}\n".encode(errors="backslashreplace"))
