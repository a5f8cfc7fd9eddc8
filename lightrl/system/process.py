"""This process: its memory, heavy imports and stop signals."""

import contextlib
import gc
import resource
import signal
from collections.abc import Iterator
from pathlib import Path


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of this process or of `pid`; 0 if it is unknown (not Linux)."""
    try:
        fields = Path(f"/proc/{pid or 'self'}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection around imports of heavy libraries, and freeze what they create.

    The collector takes a quarter of the time to import torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a daemon to stop: SIGTERM, ctrl-C, the warning of a batch system
    (SIGUSR1), and SIGHUP unless it is ignored (nohup)."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    return tuple(n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
