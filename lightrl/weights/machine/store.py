"""The versions on this machine: nodes of one run and one user share a folder of them.

Owns where a version lies, which of the nodes pulls it while the others wait, and when nobody needs
it any more. In shared memory where there is room for it, else on the disk; asked anew for each
version. Knows nothing of how bytes come here. Methods are for threads, but those that are async.

Locks are `flock`s, so that those of a process end with it, however it ends:

- a folder, shared, as long as a daemon uses it: that of a dead run is removed by another run;
- DIGEST.want, shared, by each node that wants this version: what nobody wants is removed;
- DIGEST.pull, by the node that pulls it, which touches that file to show that it is alive. One that
  was stopped is passed over, and the next in turn pulls to another file.

What is here was written by a process of the same user, and is proved all the same.
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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import ProtocolError, WeightsError
from lightrl.system.threads import in_thread, taken_in_thread
from lightrl.weights.machine import scratch
from lightrl.weights.machine.leftovers import allocated_bytes, partial_path
from lightrl.weights.machine.local import LocalVersion, open_version, prove
from lightrl.weights.version.manifest import VersionFile, manifest_path
from lightrl.wire import from_json, to_json

logger = logging.getLogger(__name__)

PREFIX = "lightrl-run-"
STALE_S = 600.0  # what a run left is kept for so long, for daemons that start again
POLL_S = 0.05  # for a lock
BEAT_S = 1.0  # who pulls shows so often that it is alive
STOPPED_S = 10.0  # after so long without it is passed over
MAX_PULLERS = 8  # of a version, all but one of them stopped
_DIGEST = re.compile(r"[0-9a-f]{32,128}")


@dataclass(frozen=True, slots=True)
class Pointer:
    """A complete version elsewhere on this machine. Its lock tells whether it is still that."""

    pid: int  # of the trainer's daemon
    file: VersionFile


class Store:
    """`open` once, `close` at the end."""

    def __init__(self, identity: bytes) -> None:
        """`identity`: something that only this run has."""
        machine = Path("/proc/sys/kernel/random/boot_id")  # a disk may be that of many machines
        boot = machine.read_bytes() if machine.exists() else os.uname().nodename.encode()
        digest = hashlib.blake2b(identity + boot, digest_size=12).hexdigest()
        self._name = f"{PREFIX}{os.geteuid()}-{digest}"
        self._folders: dict[Path, tuple[Path, int]] = {}  # by root: the folder, and its lock
        self._entering = threading.Lock()
        self._is_closed = False
        self._claims: list[Claim] = []
        self._pointers: list[Path] = []  # of this process
        self._lasting_pointers: list[Path] = []
        self._is_on_disk = False  # said last

    def open(self) -> None:
        """Raises OSError."""
        for root in scratch.roots():
            _remove_dead(root, self._name)
        self._folder(scratch.roots()[0])

    def close(self) -> None:
        """The last one removes everything. Threads that still are at something are refused."""
        for claim in list(self._claims):
            claim.release()
        for pointer in (*self._pointers, *self._lasting_pointers):
            pointer.unlink(missing_ok=True)
        with self._entering:
            self._is_closed = True
            for folder, lock in self._folders.values():
                if _try_lock(lock, fcntl.LOCK_EX):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
            self._folders.clear()

    def claim(self, digest: str, num_bytes: int) -> "Claim":
        """Says that this node wants a version, until `release`. Raises WeightsError, OSError."""
        if not _DIGEST.fullmatch(digest):
            raise WeightsError(f"not a version's digest: {digest[:80]!r}")
        lock = _open_locked(self._control / f"{digest}.want", fcntl.LOCK_SH)
        claim = Claim(self, digest, num_bytes, lock)
        self._claims.append(claim)
        return claim

    def point(self, file: VersionFile, kept: int = 2, *, stays: bool = False) -> None:
        """Other nodes find the version where this one has it; no more than `kept` at a time, those
        aside that stay until the end."""
        path = self._control / f"{file.digest}.json"
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(to_json(Pointer(os.getpid(), file)))
        draft.replace(path)
        if stays:
            self._lasting_pointers.append(path)
            return
        self._pointers = [*(p for p in self._pointers if p != path), path]
        while len(self._pointers) > kept:
            self._pointers.pop(0).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes what no node of this machine wants. Gives pages back: for a thread."""
        for folder, _ in list(self._folders.values()):
            for digest in {path.name.partition(".")[0] for path in folder.iterdir()}:
                if _DIGEST.fullmatch(digest):
                    self._remove_unwanted(digest)

    def _remove_unwanted(self, digest: str) -> None:
        want = self._control / f"{digest}.want"
        with contextlib.suppress(OSError):
            lock = os.open(want, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _try_lock(lock, fcntl.LOCK_EX):
                    for folder, _ in list(self._folders.values()):
                        for path in folder.glob(f"{digest}.*"):
                            if path.suffix not in {".json", ".want"}:
                                path.unlink(missing_ok=True)
                    want.unlink(missing_ok=True)
            finally:
                os.close(lock)

    def place(self, name: str, num_bytes: int) -> Path:
        """A path for a version to grow at, or go on growing. Raises WeightsError if there is no
        room for it anywhere."""
        lacking: list[str] = []
        for i, root in enumerate(scratch.roots()):
            folder = self._folder(root)
            path = folder / name
            part = partial_path(path)
            begun = allocated_bytes(part)
            held = sum(allocated_bytes(p) for p in folder.glob("*.bin*"))
            free = scratch.free_bytes(root)
            is_shared = i == 0 and len(scratch.roots()) > 1
            needed = scratch.growing_bytes(num_bytes - begun)
            if is_shared:
                needed = scratch.needed_bytes(num_bytes, held, begun)
            if free >= needed:
                self._say_where(root, num_bytes, on_disk=not is_shared, why="; ".join(lacking))
                return path
            part.unlink(missing_ok=True)
            lacking.append(f"{free / 1e9:.3g} GB free in {root}")
        raise WeightsError(f"no room for {num_bytes / 1e9:.3g} GB: {', '.join(lacking)}")

    def _say_where(self, root: Path, num_bytes: int, on_disk: bool, why: str) -> None:
        if on_disk and not self._is_on_disk and why:
            size = f"{num_bytes / 1e9:.3g} GB each"
            logger.warning("versions of the weights (%s) lie on disk, in %s: %s", size, root, why)
        self._is_on_disk = on_disk

    @property
    def _control(self) -> Path:
        """Where the locks are, wherever the versions."""
        return self._folder(scratch.roots()[0])

    def _folder(self, root: Path) -> Path:
        with self._entering:
            if self._is_closed:
                raise WeightsError("the folder of versions is closed")
            folder, lock = self._folders.get(root, (root, -1))
            if lock >= 0 and os.fstat(lock).st_nlink == 0:  # removed by whoever tidies up there
                del self._folders[root]
                os.close(lock)
                lock = -1
            if lock < 0:
                folder, _ = self._folders[root] = _enter_folder(root, self._name)
            return folder

    def _found(self, digest: str, num_bytes: int) -> Iterator[tuple[VersionFile, bool]]:
        """What may be this version, and whether it belongs to this process's trainer."""
        with contextlib.suppress(OSError, ProtocolError):
            pointer = from_json((self._control / f"{digest}.json").read_bytes(), Pointer)
            if (pointer.file.digest, pointer.file.num_bytes) == (digest, num_bytes):
                yield pointer.file, pointer.pid == os.getpid()
        for folder, _ in list(self._folders.values()):
            for path in sorted(folder.glob(f"{digest}*.bin")):
                yield VersionFile(0, digest, num_bytes, str(path), str(manifest_path(path))), False


class Claim:
    """That this node wants one version. `release` it in a thread."""

    def __init__(self, store: Store, digest: str, num_bytes: int, lock: int) -> None:
        self._store, self._lock = store, lock
        self.digest, self.num_bytes = digest, num_bytes
        self._rejected: set[str] = set()

    def release(self) -> None:
        """Twice does nothing."""
        try:
            self._store._claims.remove(self)  # of several threads one does so
        except ValueError:
            return
        os.close(self._lock)

    def found(self) -> Iterator[tuple[LocalVersion, bool]]:
        """What is said to be this version, locked, yet to be proved; and whether it is that of the
        trainer in this very process, which serves it already."""
        for file, is_own in self._store._found(self.digest, self.num_bytes):
            if file.path in self._rejected:
                continue
            if (version := open_version(file)) is not None:
                yield version, is_own

    def find_proved(self, is_ended: threading.Event) -> tuple[LocalVersion, bool] | None:
        """The first that is right, as `found` gives it; None if there is none, or at once when
        `is_ended` is set. What is wrong is rejected."""
        for version, is_own in self.found():
            try:
                prove(version, is_ended)
            except WeightsError as e:
                version.close()
                if is_ended.is_set():
                    return None
                logger.warning("%s", e)
                self.reject(version)
            else:
                return version, is_own
        return None

    def own_path(self) -> Path:
        """Where only this caller writes what belongs to the version; removed together with it."""
        return self._store._control / f"{self.digest}.{os.getpid()}-{secrets.token_hex(4)}.bin"

    def partials(self) -> list[Path]:
        """What pulls of this version have begun, of this machine: yet to be proved."""
        folders = [folder for folder, _ in list(self._store._folders.values())]
        return [p for f in folders for p in sorted(f.glob(f"{self.digest}*.bin.part"))]

    def reject(self, version: LocalVersion) -> None:
        """It is not what it is said to be: nobody shall find it again."""
        path = Path(version.file.path)
        if any(path.parent == folder for folder, _ in self._store._folders.values()):
            path.unlink(missing_ok=True)
        else:
            self._rejected.add(str(path))

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Path]:
        """When it is this node's turn to pull: where to. Look with `found` first: another may have
        pulled it meanwhile. Raises WeightsError, OSError."""
        number, lock = await self._take_turn()
        beating = asyncio.create_task(self._beat(self._turn_path(number)), name="pull lock")
        try:
            name = f"{self.digest}.bin" if number == 0 else f"{self.digest}.{number}.bin"
            yield await in_thread(self._store.place, name, self.num_bytes)
        finally:  # without a wait, in which a cancel would lose what has come
            beating.cancel()
            os.close(lock)

    def _turn_path(self, number: int) -> Path:
        return self._store._control / f"{self.digest}.pull{number}"

    async def _take_turn(self) -> tuple[int, int]:
        """Which of those who pull it this one is, and the lock that says so."""
        has_warned = False
        while True:
            turn, is_stopped = await taken_in_thread(_end_turn, self._try_turn)
            if is_stopped and not has_warned:
                logger.warning("what pulls the weights for this machine stands still")
                has_warned = True
            if turn is not None:
                return turn
            await asyncio.sleep(POLL_S)

    def _try_turn(self) -> tuple[tuple[int, int] | None, bool]:
        """None while somebody pulls; and whether somebody who should stands still."""
        is_stopped = False
        for number in range(MAX_PULLERS):
            lock = os.open(self._turn_path(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _try_lock(lock, fcntl.LOCK_EX):
                os.utime(lock)
                return (number, lock), is_stopped
            silent_s = time.time() - os.fstat(lock).st_mtime
            os.close(lock)
            if silent_s < STOPPED_S:
                break
            is_stopped = True
        return None, is_stopped

    async def _beat(self, path: Path) -> None:
        """By its name: a thread may be late, and the lock's descriptor another file's by then."""
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(OSError):
                await in_thread(os.utime, path)


def _end_turn(tried: tuple[tuple[int, int] | None, bool]) -> None:
    if tried[0] is not None:
        os.close(tried[0][1])


def _enter_folder(root: Path, name: str) -> tuple[Path, int]:
    """A folder that only this user can read, and its lock, shared. One under this name that is
    somebody else's is left alone."""
    path = root / name
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # removed just now
        except OSError:  # a link, or closed to us
            lock = None
        if lock is not None:
            found = os.fstat(lock)
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                fcntl.flock(lock, fcntl.LOCK_SH)  # who removes it does not take long
                if _is_at(lock, path):
                    return path, lock
                os.close(lock)
                continue
            os.close(lock)
        logger.warning("%s: belongs to somebody else; weights are not shared there", path)
        path = root / f"{name}-{secrets.token_hex(8)}"


def _remove_dead(root: Path, name: str) -> None:
    """Folders of other runs of this user in which nobody has been for a while."""
    for path in root.glob(f"{PREFIX}{os.geteuid()}-*"):
        if path.name == name:
            continue
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(lock)
                is_old = time.time() - found.st_mtime > STALE_S
                if is_old and found.st_uid == os.geteuid() and _try_lock(lock, fcntl.LOCK_EX):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _open_locked(path: Path, kind: int) -> int:
    """A lock on the file that has this name; waits while somebody removes it. Raises OSError."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, kind)
        if _is_at(lock, path):
            return lock
        os.close(lock)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False
