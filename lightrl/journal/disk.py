"""The format of a journal on disk: names of segments, their header, writes and locks.

Shared by the writer and the reader. Independent of the meaning of records.

    journal/00000007_step_3.log   the 7th segment; 3 optimizer steps were done when it was begun
    header                        magic, format, number and bytes of its first records (base), crc32
    record                        length, crc32, payload: see system/framing.py

A segment gets its name once its base is durable. The base alone restores the run as of then.
"""

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from lightrl.errors import JournalError
from lightrl.system import files, framing

FOLDER = "journal"  # in the run directory
MAGIC = b"lightrl\n"
FORMAT = 4
HEADER = struct.Struct("<8sIIQ")  # magic, format, records of the base, bytes of the base
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CHECKSUM.size
PIECE_BYTES = 4 << 20  # of one write
# written before they are synced: one sync of a gigabyte takes a slow disk minutes
SYNC_BYTES = 16 << 20

# Errors of file systems without locks.
CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

DAMAGED, REWOUND = "damaged", "rewound"  # suffixes of segments that a resume ignores

_NAME = re.compile(r"(\d{8,})_step_(\d+)\.log")
_SET_ASIDE = re.compile(rf"(\d{{8,}})_step_(\d+)\.log\.(?:{DAMAGED}|{REWOUND})")
_ANY_NAME = re.compile(r"(\d{8,})_step_\d+\.log.*")  # moved aside ones too


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Example: Segment(7, 3, Path("journal/00000007_step_3.log"))."""

    number: int
    # optimizer steps done when it was begun
    step: int
    path: Path


def segment_at(folder: Path, number: int, step: int) -> Segment:
    return Segment(number, step, folder / f"{number:08d}_step_{step}.log")


def segments(folder: Path) -> list[Segment]:
    """Return the segments, oldest first; [] if there is no such folder."""
    return _found(folder, _NAME)


def set_aside(folder: Path) -> list[Segment]:
    """Return the segments that a resume ignores, oldest first."""
    return _found(folder, _SET_ASIDE)


def _found(folder: Path, wanted: re.Pattern[str]) -> list[Segment]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = ((m, name) for name in names if (m := wanted.fullmatch(name)))
    return sorted(Segment(int(m[1]), int(m[2]), folder / name) for m, name in found)


def last_number(folder: Path) -> int:
    """Return the highest number in the name of any segment, also one set aside; 0 if none."""
    return max(
        (int(m[1]) for name in os.listdir(folder) if (m := _ANY_NAME.fullmatch(name))), default=0
    )


def header(num_records: int, num_bytes: int) -> bytes:
    """Return the header of a segment whose base has `num_records` of `num_bytes` on disk."""
    data = HEADER.pack(MAGIC, FORMAT, num_records, num_bytes)
    return data + CHECKSUM.pack(crc32(data))


def write_at(
    file: int, offset: int, parts: Iterable[bytes], progress: Callable[[], object] = bool
) -> int:
    """Write `parts` in large pieces, call `progress` after each, and return the end offset.

    The last SYNC_BYTES are not synced. Raises OSError with a part written.
    """
    waiting: list[bytes] = []
    num_waiting, synced = 0, offset
    for part in parts:
        waiting.append(part)
        num_waiting += len(part)
        if num_waiting >= PIECE_BYTES:
            offset = files.write_at(file, offset, b"".join(waiting))
            waiting, num_waiting = [], 0
            progress()
        if offset - synced >= SYNC_BYTES:
            sync_data(file)
            synced = offset
            progress()
    return files.write_at(file, offset, b"".join(waiting))


def create(
    segment: Segment, base: Iterable[bytes], progress: Callable[[], object] = bool
) -> tuple[int, int]:
    """Write a segment with this base, atomically and durably; return its open file and its size.

    `base` is never in memory as a whole. Raises OSError, and JournalError if `base` does.
    """
    counted = _Counted(base)
    with files.replacing(segment.path, keep_open=True) as file:
        end = write_at(file, HEADER_BYTES, framing.framed(counted), progress)
        files.write_at(file, 0, header(counted.num_frames, end - HEADER_BYTES))
    return file, end


def remove_drafts(folder: Path) -> None:
    """Remove unfinished segments of a killed writer. Call only while no writer is active."""
    # earlier versions used the second name
    for draft in (*folder.glob(".*.log.draft"), *folder.glob("*.log.tmp")):
        with contextlib.suppress(OSError):
            draft.unlink()


class _Counted:
    """Counts frames while it is iterated over."""

    def __init__(self, frames: Iterable[bytes]) -> None:
        self.num_frames = 0
        self._frames = frames

    def __iter__(self) -> Iterator[bytes]:
        for frame in self._frames:
            self.num_frames += 1
            yield frame


def sync_data(file: int) -> None:
    """Make written data durable; macOS has no fdatasync."""
    getattr(os, "fdatasync", os.fsync)(file)


def lock(folder: Path) -> int:
    """Lock the folder for this process until the returned descriptor is closed.

    Raises BlockingIOError if another process holds it, OSError if it cannot be locked at all.
    """
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError as e:
        if e.errno not in CANNOT_LOCK:
            os.close(file)
            raise
    return file


def hold(folder: Path) -> int:
    """Lock the folder. Raises JournalError, one line."""
    try:
        return lock(folder)
    except BlockingIOError:
        raise JournalError(f"{folder}: another process of this run uses this journal") from None
    except OSError as e:
        raise JournalError(f"{folder}: {e.strerror}") from None


def is_in_use(folder: Path) -> bool:
    """Return whether a process has this journal open."""
    if not (folder / "lock").exists():
        return False
    try:
        os.close(lock(folder))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
