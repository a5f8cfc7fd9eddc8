"""The files in which a trainer publishes: reused, as new memory is expensive.

Owns the names in a trainer's folder of versions. A file has a version's name only while it holds
all of that version, and is renamed before a byte of it is overwritten:

    version_4.5f0c.bin, version_4.5f0c.manifest
    draft.5f0c.bin        is being written, or was when its writer died

A reader holds a shared lock (flock) on its file, and checks the name once it has the lock. A file
with a reader is not reused: another one is created, and removed when it is free. Must not import
torch.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightrl.weights.version.manifest import VersionFile, finish_version, manifest_path

SPARED = 4  # times in a row that a file is spare before it is removed: readers may be late


@dataclass(frozen=True, slots=True)
class Draft:
    """A file of the size asked for, locked for its writer. `key` names the file for good."""

    key: int
    path: Path
    # has the lock until it is closed; a mapping through it would keep the lock
    descriptor: int


def draft_path(folder: Path, key: int) -> Path:
    return folder / f"draft.{key:015x}.bin"


class Buffers:
    """The files of one writer, which takes over those of a dead one in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._newest: Path | None = None  # published last: its readers may still come
        self._num_spared = 0  # times in a row that there was a spare file

    def take(self, size: int) -> Draft:
        """Return a file of `size` bytes without readers. Raises OSError, with its name, if there is
        no room for another one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        taken: Draft | None = None
        spare: list[Path] = []
        for path, descriptor in self._unread():
            fits = os.fstat(descriptor).st_size == size
            if taken is None and fits:
                taken = self._as_draft(path, descriptor)
                continue
            os.close(descriptor)
            if fits:
                spare.append(path)
            else:
                _remove(path)
        self._num_spared = self._num_spared + 1 if spare else 0
        if self._num_spared > SPARED:
            for path in spare:
                _remove(path)
        return taken or self._new(size)

    def keys(self) -> set[int]:
        """The keys of all files."""
        return {_key(path) for path in self.folder.glob("*.bin")}

    def lacks_a_second(self) -> bool:
        """Return whether there is no file but the one that was published last."""
        return not [path for path in self.folder.glob("*.bin") if path != self._newest]

    def give_back(self, draft: Draft) -> None:
        """The draft has not become a version."""
        os.close(draft.descriptor)

    def finish(self, draft: Draft, policy_version: int, encoded: bytes) -> VersionFile:
        """Publish a complete draft; `encoded` is its manifest."""
        size = os.fstat(draft.descriptor).st_size
        path = self.folder / f"version_{policy_version}.{draft.key:015x}.bin"
        file = finish_version(path, policy_version, size, encoded)
        draft.path.rename(path)
        self._newest = path
        os.close(draft.descriptor)
        return file

    def _unread(self) -> Iterator[tuple[Path, int]]:
        """Yield the files without readers, locked, the oldest first."""
        paths = sorted(self.folder.glob("draft.*.bin"))
        paths += sorted(self.folder.glob("version_*.bin"), key=lambda p: p.stat().st_ctime_ns)
        for path in paths:
            if path != self._newest and (descriptor := _lock(path)) is not None:
                yield path, descriptor

    def _as_draft(self, path: Path, descriptor: int) -> Draft:
        key = _key(path)
        draft = draft_path(self.folder, key)
        path.rename(draft)
        manifest_path(path).unlink(missing_ok=True)
        return Draft(key, draft, descriptor)

    def _new(self, size: int) -> Draft:
        key = secrets.randbits(60)
        path = draft_path(self.folder, key)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Not by `truncate`: a page without memory kills the process that touches it.
            os.posix_fallocate(descriptor, 0, size)
        except OSError as e:
            os.close(descriptor)
            path.unlink()
            raise OSError(e.errno, f"{e.strerror} for {size} bytes", str(path)) from e
        return Draft(key, path, descriptor)


def _key(path: Path) -> int:
    return int(path.name.split(".")[1], 16)


def _lock(path: Path) -> int | None:
    """The open file, if it has no reader and no writer."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        os.close(descriptor)
    return None


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    manifest_path(path).unlink(missing_ok=True)
