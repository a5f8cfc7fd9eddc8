"""Huge pages, and memory returned to the system, for processes that free hundreds of MB.

Faulting in pages of 4 KiB takes longer than filling them, and freeing them half as long as copying
them. The allocator of the GNU C library (2.35 and newer) can ask for pages of 2 MiB, if the process
starts with that setting; asking later for single tensors fails, since small pages are in between.
"""

import ctypes
import mmap
import os
from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
_HUGE = "glibc.malloc.hugetlb"

_LIBC = ctypes.CDLL(None, use_errno=True)
_TRIM = getattr(_LIBC, "malloc_trim", None)  # of the GNU C library
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that gives a process huge pages, if the kernel grants them on request
    ("madvise", the default). Keeps a setting of the user."""
    set_already = environ.get(TUNABLES, "")
    if _HUGE in set_already:
        return {}
    return {TUNABLES: ":".join(filter(None, (set_already, f"{_HUGE}=1")))}


def forget(address: int, num_bytes: int) -> str:
    """Return the whole pages of a range, whose content is lost, to the kernel.

    Returns an error message, or "". Freeing is not enough: the allocator keeps the end of an arena.
    """
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + num_bytes) // page * page
    if first < end and _LIBC.madvise(first, end - first, mmap.MADV_DONTNEED):
        return os.strerror(ctypes.get_errno())
    return ""


def trim() -> None:
    """Return freed memory to the kernel, where the C library can."""
    if _TRIM is not None:
        _TRIM(0)
