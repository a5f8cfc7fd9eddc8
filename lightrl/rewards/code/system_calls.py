"""Which system calls a program in a sandbox may make: a filter for the kernel.

Owns what is refused, and why. Must not install it: a process does that to itself, in `inside.py`.
See seccomp(2) and linux/filter.h: a line is (code, jump if true, jump if false, value), and jumps
count the lines between.
"""

import platform
import socket
import struct
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from lightrl.errors import RewardError

Line: TypeAlias = tuple[int, int, int, int]

NAMESPACES = 0x7E020000  # CLONE_NEW*
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
SO_SNDBUF, SO_RCVBUF = 7, 8
CLONE3 = 435  # the same number everywhere
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)  # others have no namespace

JUMP_IF_EQUAL, JUMP_IF_GREATER_OR_EQUAL, JUMP_IF_ANY_BIT, AND = 0x15, 0x35, 0x45, 0x54
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050001, 0x00050000 | 38


@dataclass(frozen=True, slots=True)
class Processor:
    """Numbers of its system calls. `refused`: ptrace, process_vm_*, pidfd_getfd, kcmp, memfd_*,
    shmget, msgget, semget, io_uring, bpf, perf, userfaultfd, keys, unshare, setns, mount: ways into
    other processes, to memory that no limit counts, and into the kernel; and setsid, since each
    session may have a share of the processors like any other (sched_autogroup)."""

    audit: int
    pivot_root: int
    clone: int
    socket: int
    mmap: int
    setsockopt: int
    refused: tuple[int, ...]


PROCESSORS = {
    "x86_64": Processor(
        0xC000003E,
        *(155, 56, 41, 9, 54),
        (
            *(101, 310, 311, 438, 312, 319, 447, 29, 68, 64, 425, 321, 298, 323),
            *(248, 249, 250, 272, 308, 165, 112),
        ),
    ),
    "aarch64": Processor(
        0xC00000B7,
        *(41, 220, 198, 222, 208),
        (
            *(117, 270, 271, 438, 272, 279, 447, 194, 186, 190, 425, 280, 241, 282),
            *(217, 218, 219, 97, 268, 40, 157),
        ),
    ),
}


def processor() -> Processor:
    """Of this machine. Raises RewardError for one that is not known."""
    if platform.machine() not in PROCESSORS:
        raise RewardError(f"code: no sandbox on this processor ({platform.machine()})")
    return PROCESSORS[platform.machine()]


@cache  # each response has a sandbox
def filter_of(numbers: Processor) -> bytes:
    """Calls that a program does not need are answered with EPERM."""
    lines = [_load(4), (JUMP_IF_EQUAL, 1, 0, numbers.audit), _answer(KILL), _load(0)]
    # x32: other numbers for the same calls
    lines += [(JUMP_IF_GREATER_OR_EQUAL, 0, 1, 0x40000000), _answer(EPERM)]
    for number in numbers.refused:
        lines += _rule(number, _answer(EPERM))
    lines += _rule(CLONE3, _answer(ENOSYS))  # its flags lie in memory; C falls back to clone
    lines += _rule(
        numbers.clone,
        *(_argument(0), (JUMP_IF_ANY_BIT, 0, 1, NAMESPACES), _answer(EPERM), _answer(ALLOW)),
    )
    # Shared memory stays where it is when a process lets go of it: nobody's, as far as is counted.
    shared = MAP_SHARED | MAP_ANONYMOUS
    lines += _rule(
        numbers.mmap,
        *(_argument(3), (AND, 0, 0, shared), (JUMP_IF_EQUAL, 0, 1, shared)),
        *(_answer(EPERM), _answer(ALLOW)),
    )
    # Nor are the buffers of sockets, which are small unless they are asked to grow.
    lines += _rule(
        numbers.setsockopt,
        *(_argument(2), (JUMP_IF_EQUAL, 1, 0, SO_SNDBUF), (JUMP_IF_EQUAL, 0, 1, SO_RCVBUF)),
        *(_answer(EPERM), _answer(ALLOW)),
    )
    # Each comparison jumps over those after it and the refusal.
    known = [(JUMP_IF_EQUAL, len(FAMILIES) - k, 0, f) for k, f in enumerate(FAMILIES)]
    lines += _rule(numbers.socket, _argument(0), *known, _answer(EPERM), _answer(ALLOW))
    lines += [_answer(ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def _answer(what: int) -> Line:
    return (0x06, 0, 0, what)


def _load(offset: int) -> Line:
    """Of seccomp_data: the number at 0, the processor at 4."""
    return (0x20, 0, 0, offset)


def _argument(index: int) -> Line:
    """Its lower half, where all flags are."""
    return _load(16 + 8 * index)


def _rule(number: int, *lines: Line) -> list[Line]:
    """What is done for that call; it ends with an answer."""
    return [(JUMP_IF_EQUAL, 0, len(lines), number), *lines]
