"""Checksums of the files of a checkpoint: neither a disk nor the format of the tensors reports bits
that have changed.

Must not import torch: the daemon checks them, not its ranks.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from lightrl.errors import ProtocolError
from lightrl.trainer.checkpoint.on_disk import EXPORT, STEP_FILE, SavedStep
from lightrl.wire import from_json, to_json

GONE = {errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR}  # of a bad disk or a lost file
PIECE_BYTES = 8 << 20  # of a file, for one thread
READ_BYTES = 1 << 20
MAX_THREADS = 8  # each takes about a second for a gigabyte


class _Unwanted(Exception):
    """The result is not wanted any more."""


def with_checksums(saved: SavedStep, checkpoint: Path) -> SavedStep:
    """Add the digests of all files in the checkpoint but its export. Raises OSError."""
    exported = checkpoint / EXPORT
    found = [p for p in sorted(checkpoint.rglob("*")) if p.is_file()]
    paths = [p for p in found if not p.is_relative_to(exported)]
    names = [str(p.relative_to(checkpoint)) for p in paths]
    return with_seal(replace(saved, files=dict(zip(names, _digests(paths), strict=True))))


def with_seal(saved: SavedStep) -> SavedStep:
    """Replace the digest of all other fields."""
    return replace(saved, seal=_seal(to_json(replace(saved, seal=""))))


def find_corruption(checkpoint: Path, is_wanted: Callable[[], bool] = lambda: True) -> str:
    """Return what of a checkpoint is not as it was saved, in one line, or "".

    A checkpoint without digests passes. Blocks for about as long as reading it takes, while
    `is_wanted`. Raises OSError if it cannot be read for a reason that may pass.
    """
    try:
        data = (checkpoint / STEP_FILE).read_bytes()
        saved = from_json(data, SavedStep)
        if not saved.seal and not saved.files:
            return ""
        if saved.seal != _seal(data.replace(saved.seal.encode(), b"", 1)):
            return f"{STEP_FILE}: damaged"
        known = saved.files
        found = _digests([checkpoint / name for name in known], is_wanted)
    except ProtocolError:
        return f"{STEP_FILE}: damaged"
    except _Unwanted:
        return ""
    except OSError as e:
        # a missing right, an unreachable file server: the files may be sound
        if e.errno not in GONE:
            raise
        return f"{Path(e.filename).name}: {e.strerror}" if e.filename else e.strerror or str(e)
    pairs = zip(known.items(), found, strict=True)
    other = [name for (name, digest), now in pairs if now != digest]
    return f"{', '.join(other)}: damaged" if other else ""


def _seal(data: bytes) -> str:
    """Digest of STEP_FILE without its seal, whatever fields another release has."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digests(paths: Iterable[Path], is_wanted: Callable[[], bool] = lambda: True) -> list[str]:
    """Digest each file by the digests of its pieces: many threads share a large file. Raises
    OSError."""
    threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    try:
        pieces = [
            [
                threads.submit(_digest, path, start, is_wanted)
                for start in range(0, size, PIECE_BYTES)
            ]
            for path, size in [(path, path.stat().st_size) for path in paths]
        ]
        return [
            hashlib.blake2b(b"".join(piece.result() for piece in file), digest_size=16).hexdigest()
            for file in pieces
        ]
    except RuntimeError as e:  # no thread can be started
        raise OSError(errno.EAGAIN, str(e)) from e
    finally:
        threads.shutdown(cancel_futures=True)


def _digest(path: Path, start: int, is_wanted: Callable[[], bool]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for _ in range(PIECE_BYTES // READ_BYTES):
            if not is_wanted():
                raise _Unwanted
            if not (data := file.read(READ_BYTES)):
                break
            digest.update(data)
    return digest.digest()
