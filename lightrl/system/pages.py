"""Huge pages, and memory returned to the system, for processes that free hundreds of MB.

Faulting in pages of 4 KiB takes longer than filling them, and freeing them half as long as copying
them. The allocator of the GNU C library (2.35 and newer) can ask for pages of 2 MiB, if the process
starts with that setting; asking later for single tensors fails, since small pages are in between.
"""

import ctypes
from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
_HUGE = "glibc.malloc.hugetlb"

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that gives a process huge pages, if the kernel grants them on request
    ("madvise", the default). Keeps a setting of the user."""
    set_already = environ.get(TUNABLES, "")
    if _HUGE in set_already:
        return {}
    return {TUNABLES: ":".join(filter(None, (set_already, f"{_HUGE}=1")))}


def trim() -> None:
    """Return freed memory to the kernel, where the C library can."""
    if _TRIM is not None:
        _TRIM(0)
