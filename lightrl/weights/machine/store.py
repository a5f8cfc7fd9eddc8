"""The versions on this machine: the nodes of one run and one user share a folder of them.

Owns where a version is stored, which of the nodes pulls it while the others wait, and when it is
removed. A version is one file, named by its digest; it has that name once it is complete. Folders
are in shared memory where there is room, else on the disk. Methods block: call them in threads.

Locks are `flock`s, which the kernel releases when their process ends:

- a folder, shared, by each daemon that uses it: other runs remove the folder of a dead run;
- a version, shared, by each node that uses it: one that no node uses is removed;
- DIGEST.pull, exclusive, by the node that pulls this version.

Files were written by processes of the same user, and are verified all the same.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import ProtocolError, WeightsError
from lightrl.system.threads import in_thread
from lightrl.weights.machine import scratch
from lightrl.weights.machine.local import (
    LocalVersion,
    allocated_bytes,
    open_version,
    partial_path,
    verify_version,
)
from lightrl.weights.version.manifest import VersionFile, manifest_path
from lightrl.wire import from_json, to_json

logger = logging.getLogger(__name__)

PREFIX = "lightrl-run-"
STALE_S = 600.0  # how long the folder of a dead run is kept, for daemons that start again
POLL_S = 0.05  # for a lock
STOPPED_S = 120.0  # a process that pulls for this machine without progress is not awaited longer
_DIGEST = re.compile(r"[0-9a-f]{32,128}")


@dataclass(frozen=True, slots=True)
class Pointer:
    """A complete version elsewhere on this machine, as long as it can be locked."""

    pid: int  # of the trainer's daemon
    file: VersionFile


class Store:
    """Holds, finds and removes versions on this machine. `open` once, `close` at the end."""

    def __init__(self, identity: bytes) -> None:
        """`identity`: bytes that only this run has."""
        machine = Path("/proc/sys/kernel/random/boot_id")  # machines may share a disk
        boot = machine.read_bytes() if machine.exists() else os.uname().nodename.encode()
        digest = hashlib.blake2b(identity + boot, digest_size=12).hexdigest()
        self._name = f"{PREFIX}{os.geteuid()}-{digest}"
        self._folders: dict[Path, tuple[Path, int]] = {}  # by root: the folder, and its lock
        self._entering = threading.Lock()
        self._is_closed = False
        self._rejected: set[str] = set()  # copies outside of the folder that were wrong
        self._pointers: list[Path] = []  # of this process
        self._lasting_pointers: list[Path] = []
        self._is_on_disk = False  # as last logged

    def open(self) -> None:
        """Raises OSError."""
        for root in scratch.roots():
            _remove_dead(root, self._name)
        self._folder(scratch.roots()[0])

    def close(self) -> None:
        """The last process removes the folders. Threads that come later get a WeightsError."""
        for pointer in (*self._pointers, *self._lasting_pointers):
            pointer.unlink(missing_ok=True)
        with self._entering:
            self._is_closed = True
            for folder, lock in self._folders.values():
                if _try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
            self._folders.clear()

    @contextlib.asynccontextmanager
    async def lock(self, digest: str, num_bytes: int) -> AsyncIterator[Path]:
        """Wait until no other node pulls this version; the path is where to pull it to. Look with
        `find` first: the node before may have pulled it. Raises WeightsError, OSError."""
        _require_digest(digest)
        grown, grown_at = -1, time.monotonic()
        while (lock := self.try_lock(digest)) is None:
            parts = (partial_path(folder / f"{digest}.bin") for folder in self.folders())
            size = sum(map(allocated_bytes, parts))
            if size != grown:
                grown, grown_at = size, time.monotonic()
            elif time.monotonic() - grown_at > STOPPED_S:
                raise WeightsError(
                    f"another process of this machine pulls version {digest[:12]} and has received "
                    f"nothing for {STOPPED_S:g} s"
                )
            await asyncio.sleep(POLL_S)
        with lock:  # without an await at its end: a cancellation would lose the partial download
            yield await in_thread(self._place, f"{digest}.bin", num_bytes)

    def try_lock(self, digest: str) -> contextlib.ExitStack | None:
        """Return the lock of the one node of this machine that pulls a version, None if another
        node has it."""
        path = self.control / f"{digest}.pull"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not (_try_lock(descriptor) and _is_at(descriptor, path)):
            os.close(descriptor)
            return None
        lock = contextlib.ExitStack()
        lock.callback(os.close, descriptor)
        lock.callback(path.unlink, missing_ok=True)
        return lock

    def find(
        self, digest: str, num_bytes: int, is_ended: threading.Event
    ) -> tuple[LocalVersion, bool] | None:
        """Return a copy on this machine that is right, and whether the trainer in this very process
        serves it already. None if there is none, or `is_ended` is set. Wrong copies are
        rejected. Raises WeightsError, OSError."""
        _require_digest(digest)
        for file, is_own in self._candidates(digest, num_bytes):
            if file.path in self._rejected or (version := open_version(file)) is None:
                continue
            try:
                verify_version(version, is_ended)
            except WeightsError as e:
                version.close()
                if is_ended.is_set():
                    return None
                logger.warning("%s", e)
                self._reject(Path(file.path))
            else:
                return version, is_own
        return None

    def _candidates(self, digest: str, num_bytes: int) -> Iterator[tuple[VersionFile, bool]]:
        with contextlib.suppress(OSError, ProtocolError):
            pointer = from_json((self.control / f"{digest}.json").read_bytes(), Pointer)
            if (pointer.file.digest, pointer.file.num_bytes) == (digest, num_bytes):
                yield pointer.file, pointer.pid == os.getpid()
        for path in (folder / f"{digest}.bin" for folder in self.folders()):
            yield VersionFile(0, digest, num_bytes, str(path), str(manifest_path(path))), False

    def _reject(self, path: Path) -> None:
        if path.parent in self.folders():
            path.unlink(missing_ok=True)
        else:
            self._rejected.add(str(path))

    def own_path(self, digest: str) -> Path:
        """Return a path at which only this caller writes a manifest."""
        return self.control / f"{digest}.{os.getpid()}-{secrets.token_hex(4)}.bin"

    def point(self, file: VersionFile, kept: int = 2, *, stays: bool = False) -> None:
        """Offer other nodes a version where this process has it. The newest `kept` pointers remain,
        and those that stay until the end."""
        path = self.control / f"{file.digest}.json"
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(to_json(Pointer(os.getpid(), file)))
        draft.replace(path)
        if stays:
            self._lasting_pointers.append(path)
            return
        self._pointers = [*(p for p in self._pointers if p != path), path]
        while len(self._pointers) > kept:
            self._pointers.pop(0).unlink(missing_ok=True)

    def sweep(self, wanted: Collection[str] = ()) -> None:
        """Remove the versions and partial downloads that no node of this machine uses, but those
        with the digests `wanted`; and manifests without a version. Those at an `own_path` are
        removed by their owners, or after STALE_S."""
        for folder in self.folders():
            for digest in {path.name.partition(".")[0] for path in folder.glob("*.*")} - {*wanted}:
                if not _DIGEST.fullmatch(digest) or (lock := self.try_lock(digest)) is None:
                    continue  # a node pulls it
                with lock:
                    for path in folder.glob(f"{digest}.bin*"):
                        _remove_unused(path)
                    if not list(folder.glob(f"{digest}.bin*")):
                        (folder / f"{digest}.manifest").unlink(missing_ok=True)
            for path in folder.glob("*.*.manifest"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > STALE_S:
                        path.unlink()

    def _place(self, name: str, num_bytes: int) -> Path:
        """Return a path at which a version, maybe begun before, can grow. Raises WeightsError if
        there is no room."""
        lacking: list[str] = []
        for i, root in enumerate(scratch.roots()):
            folder = self._folder(root)
            part = partial_path(folder / name)
            begun, free = allocated_bytes(part), scratch.free_bytes(root)
            is_shared = i == 0 and len(scratch.roots()) > 1
            needed = scratch.growing_bytes(num_bytes - begun)
            if is_shared:
                held = sum(allocated_bytes(p) for p in folder.glob("*.bin*"))
                needed = scratch.needed_bytes(num_bytes, held, begun)
            if free >= needed:
                if not is_shared and lacking and not self._is_on_disk:
                    size, why = f"{num_bytes / 1e9:.3g} GB each", "; ".join(lacking)
                    logger.warning(
                        "versions of the weights (%s) are on disk, in %s: %s", size, root, why
                    )
                self._is_on_disk = not is_shared
                return folder / name
            part.unlink(missing_ok=True)
            lacking.append(f"{free / 1e9:.3g} GB free in {root}")
        raise WeightsError(f"no room for {num_bytes / 1e9:.3g} GB: {', '.join(lacking)}")

    @property
    def control(self) -> Path:
        """The folder of the locks, wherever the versions are."""
        return self._folder(scratch.roots()[0])

    def folders(self) -> list[Path]:
        return [folder for folder, _ in list(self._folders.values())]

    def _folder(self, root: Path) -> Path:
        with self._entering:
            if self._is_closed:
                raise WeightsError("the folder of versions is closed")
            if root not in self._folders:
                self._folders[root] = _enter_folder(root, self._name)
            return self._folders[root][0]


def _enter_folder(root: Path, name: str) -> tuple[Path, int]:
    """Create or enter a folder that only this user can read, with a shared lock on it. A path of
    this name that belongs to another user is left alone."""
    path = root / name
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # removed just now
        except OSError:  # a link, a file, or unreadable
            lock = -1
        if lock >= 0:
            found = os.fstat(lock)
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if _is_at(lock, path):
                    return path, lock
                os.close(lock)
                continue
            os.close(lock)
        logger.warning("%s: belongs to another user; weights are not shared there", path)
        path = root / f"{name}-{secrets.token_hex(8)}"


def _remove_dead(root: Path, name: str) -> None:
    """Remove the folders of other runs of this user that no process has used for a while."""
    for path in root.glob(f"{PREFIX}{os.geteuid()}-*"):
        if path.name == name:
            continue
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(lock)
                is_old = time.time() - found.st_mtime > STALE_S
                if is_old and found.st_uid == os.geteuid() and _try_lock(lock):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _require_digest(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise WeightsError(f"not a version's digest: {digest[:80]!r}")


def _remove_unused(path: Path) -> None:
    """Every user of a version has a shared lock on it."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _try_lock(file):
                path.unlink(missing_ok=True)
        finally:
            os.close(file)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False
