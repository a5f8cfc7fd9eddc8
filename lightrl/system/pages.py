"""Memory of a process that comes and goes by hundreds of MB: in huge pages, and handed back.

Owns what the kernel and the allocator of C are told; systems that know nothing of it go on without.
Must not know what lies in the memory, nor import torch.

A fault for each page of 4 KiB takes longer than filling it, and handing it back half as long as
copying it. The allocator of the GNU C library (2.35 and newer) can ask for pages of 2 MiB instead,
but must be told so before the process begins. Asking for single tensors later is no use: what the
allocator keeps between them takes small pages first, and no huge one fits any more.
"""

import ctypes
from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
_HUGE = "glibc.malloc.hugetlb"

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """What is added to the environment of a process whose memory is to be of huge pages, where the
    kernel gives them to who asks ("madvise", the default). What the user has set there stays."""
    set_already = environ.get(TUNABLES, "")
    if _HUGE in set_already:
        return {}
    return {TUNABLES: ":".join(filter(None, (set_already, f"{_HUGE}=1")))}


def trim() -> None:
    """What was freed goes back to the kernel, as far as the allocator of C can tell."""
    if _TRIM is not None:
        _TRIM(0)
