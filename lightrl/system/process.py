"""This process: its memory, heavy imports and stop signals."""

import contextlib
import ctypes
import gc
import resource
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

_TUNABLES = "GLIBC_TUNABLES"
_HUGE = "glibc.malloc.hugetlb"
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of this process or of `pid`; 0 if it is unknown (not Linux)."""
    try:
        fields = Path(f"/proc/{pid or 'self'}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that gives a process huge pages, if the kernel grants them on request
    ("madvise", the default). Keeps a setting of the user.

    For processes that free hundreds of MB: faulting in pages of 4 KiB takes longer than filling
    them, and freeing them half as long as copying them. The allocator of the GNU C library (2.35
    and newer) can ask for pages of 2 MiB, if the process starts with that setting; asking later for
    single tensors fails, since small pages are in between.
    """
    set_already = environ.get(_TUNABLES, "")
    if _HUGE in set_already:
        return {}
    return {_TUNABLES: ":".join(filter(None, (set_already, f"{_HUGE}=1")))}


def trim() -> None:
    """Return freed memory to the kernel, where the C library can."""
    if _TRIM is not None:
        _TRIM(0)


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
