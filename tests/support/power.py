"""A machine that loses its power: what is on its disk then, at any moment of a recorded piece of
work.

Owns the model of a disk, after ALICE (OSDI '14): what a program wrote may be missing until the file
was synced, and a name that it made, changed or removed until its directory was. Any subset of what
is not yet synced may have reached the disk. The work itself is done by the product on a real disk;
what it asks the system for is seen at the level of `os`.
"""

import contextlib
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.errors import LightRLError

SYNCS = ("fsync", "fdatasync")
CHANGES = (
    *("write", "pwrite", "rename", "replace", "unlink", "remove", "rmdir", "mkdir"),
    *("symlink", "link", "ftruncate", "truncate"),
)
Names = dict[str, int]  # in a directory -> inode


@dataclass
class Live:
    """What a program sees: every directory and file below the root, by inode."""

    folders: dict[int, Names] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    where: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """One of: a sync of an inode, names that changed in one directory, new contents of a file, a
    promise."""

    # "sync" "names" "data" "promise"
    kind: str
    inode: int = 0
    # None: it is gone
    names: tuple[tuple[str, int | None], ...] = ()
    data: bytes = b""
    promise: Any = None
    # of a sync: who asked for it, and for which file
    site: str = ""


class Recorder:
    """Records what happens below `root` while it is entered; what was there before, lasts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self.first = _scan(root)
        self._last = self.first
        self._lock = threading.RLock()
        self.folders = set(self.first.folders)  # inodes, at any time
        self.store: dict[bytes, Path] = {}  # contents of files that were found
        self._held: dict[int, int] = {}  # inode -> descriptor, so that its number is not used again

    def __enter__(self) -> "Recorder":
        self._patches = contextlib.ExitStack()
        for name in (*SYNCS, *CHANGES):
            self._patches.callback(setattr, os, name, getattr(os, name))
            setattr(os, name, self._watched(name, getattr(os, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()
        self._look()
        for descriptor in self._held.values():
            os.close(descriptor)

    def promise(self, what: Any) -> None:
        """From here on the disk must hold this, whatever happens."""
        with self._lock:
            self._look()
            self.events.append(Event("promise", promise=what))

    def sites(self) -> list[str]:
        return sorted({e.site for e in self.events if e.kind == "sync"})

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._look()
                result = call(*args, **kwargs)
                if name in SYNCS:
                    inode = os.fstat(args[0]).st_ino
                    if inode in self._last.where:
                        self.events.append(Event("sync", inode, site=self._site(inode)))
                self._look()
                return result

        return watched

    def _site(self, inode: int) -> str:
        """Functions of the product that are called, and the file: "disk.create < write._start:
        N_step_N"."""
        frame, chain = sys._getframe(2), []
        while frame is not None:
            if (
                f"{os.sep}lightrl{os.sep}" in frame.f_code.co_filename
                and frame.f_code.co_name != "replacing"  # whose block it is says more
            ):
                chain.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            frame = frame.f_back
        name = re.sub(r"\d+", "N", self._last.where[inode]) or "."
        return f"{' < '.join(chain[:3])}: {name}"

    def _look(self) -> None:
        now = _scan(self.root, self._held)
        for inode, data in now.files.items():
            if data != self._last.files.get(inode, b""):
                self.events.append(Event("data", inode, data=data))
        for inode in sorted(now.folders.keys() | self._last.folders.keys()):
            names, before = now.folders.get(inode, {}), self._last.folders.get(inode, {})
            changed = [(n, names.get(n)) for n in sorted(names.keys() | before.keys())]
            changed = [(n, i) for n, i in changed if i != before.get(n)]
            gone = {i for n, i in before.items() if names.get(n) != i}
            renamed = any(i in gone for _, i in changed if i is not None)
            for some in [changed] if renamed else [[c] for c in changed]:
                if some and inode in now.folders:
                    self.events.append(Event("names", inode, names=tuple(some)))
        self.folders |= now.folders.keys()
        self._last = now


def _scan(root: Path, held: dict[int, int] | None = None) -> Live:
    live = Live()

    def enter(path: str, where: str) -> int:
        info = os.lstat(path)
        inode = info.st_ino
        live.where[inode] = where
        if held is not None and inode not in held and not stat.S_ISLNK(info.st_mode):
            held[inode] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if stat.S_ISDIR(info.st_mode):
            live.folders[inode] = {}
            for name in os.listdir(path):
                with contextlib.suppress(FileNotFoundError):
                    live.folders[inode][name] = enter(
                        f"{path}/{name}", f"{where}/{name}".lstrip("/")
                    )
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb") as file:
                live.files[inode] = file.read()
        return inode

    enter(str(root), "")
    return live


class Disk:
    """What has lasted of a recording so far, and what may have."""

    def __init__(self, recorder: Recorder) -> None:
        self.root = os.stat(recorder.root).st_ino
        self.folders = {inode: dict(names) for inode, names in recorder.first.folders.items()}
        self.files = dict(recorder.first.files)
        self.pending: list[Event] = []

    def take(self, event: Event) -> None:
        if event.kind in {"data", "names"}:
            self.pending.append(event)
        elif event.kind == "sync":
            for done in [e for e in self.pending if e.inode == event.inode]:
                self._apply(done)
            self.pending = [e for e in self.pending if e.inode != event.inode]

    def _apply(self, event: Event) -> None:
        if event.kind == "data":
            self.files[event.inode] = event.data
            return
        names = self.folders.setdefault(event.inode, {})
        for name, inode in event.names:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode

    def outcomes(self) -> Iterator["Disk"]:
        """The worst that may be found: none of what is pending, all of it, all names with spoilt
        contents, all but one, only one."""
        names = [e for e in self.pending if e.kind == "names"]
        data = [e for e in self.pending if e.kind == "data"]
        yield self._with([])
        yield self._with(self.pending)
        yield self._with(data)
        for spoil in (_nothing, _zeros, _torn):
            yield self._with([*names, *(spoil(self, e) for e in data)])
        for one in self.pending:
            yield self._with([one])
            yield self._with([e for e in self.pending if e is not one])

    def _with(self, events: Iterable[Event]) -> "Disk":
        disk = object.__new__(Disk)
        disk.root, disk.pending = self.root, []
        disk.folders = {inode: dict(names) for inode, names in self.folders.items()}
        disk.files = dict(self.files)
        for event in events:
            disk._apply(event)
        return disk

    def key(self) -> Any:
        """Equal for disks on which the same is found."""

        def tree(inode: int) -> Any:
            names = self.folders.get(inode)
            return (
                tuple((n, tree(i)) for n, i in sorted(names.items()))
                if names is not None
                else inode
            )

        return tree(self.root), tuple(sorted((i, hash(d)) for i, d in self.files.items()))

    def lay_out(self, root: Path, folders: frozenset[int], store: dict[bytes, Path]) -> None:
        """The files as they are found, which must not be written to: they are links into `store`.

        `folders`: inodes of directories, also of those that are lost.
        """

        def enter(inode: int, path: Path) -> None:
            if inode in folders:
                path.mkdir()
                for name, below in self.folders.get(inode, {}).items():
                    enter(below, path / name)
            else:
                data = self.files.get(inode, b"")
                if data not in store:
                    store[data] = root.with_name(f"{root.name}-{len(store)}")
                    store[data].write_bytes(data)
                    store[data].chmod(0o600)
                os.link(store[data], path)

        enter(self.root, root)


def _nothing(disk: Disk, event: Event) -> Event:
    return Event("data", event.inode, data=disk.files.get(event.inode, b""))


def _zeros(disk: Disk, event: Event) -> Event:
    known = disk.files.get(event.inode, b"")[: len(event.data)]
    return Event("data", event.inode, data=known + bytes(len(event.data) - len(known)))


def _torn(disk: Disk, event: Event) -> Event:
    known = len(disk.files.get(event.inode, b""))
    return Event("data", event.inode, data=event.data[: (known + len(event.data)) // 2])


def power_losses(
    recorder: Recorder, place: Path, recovers: Callable[[Path, list[Any]], None], without: str = ""
) -> int:
    """Cuts a recording after every event, lays out at `place` whatever may be found then, and calls
    `recovers` with it and with what was promised so far. Returns how many there were.

    `without`: as if this call for a sync had not been made.
    """
    disk, promises, seen = Disk(recorder), [], set[Any]()
    folders = frozenset(recorder.folders)
    for event in (None, *recorder.events):
        if event is not None and event.kind == "promise":
            promises.append(event.promise)
        elif event is not None and not (event.kind == "sync" and event.site == without):
            disk.take(event)
        for found in disk.outcomes():
            key = (found.key(), len(promises))
            if key not in seen:
                seen.add(key)
                shutil.rmtree(place, ignore_errors=True)
                found.lay_out(place, folders, recorder.store)
                recovers(place, promises)
    return len(seen)


def require_every_sync(
    recorder: Recorder,
    place: Path,
    recovers: Callable[[Path, list[Any]], None],
    besides: Sequence[str] = (),
) -> None:
    """Whatever is lost with the power, all recovers; and each sync is needed for that, `besides`
    these."""
    assert power_losses(recorder, place, recovers) > len(recorder.events) // 2
    for site in recorder.sites():
        try:
            power_losses(recorder, place, recovers, without=site)
        except (AssertionError, LightRLError):
            assert site not in besides
        else:
            assert site in besides, f"nothing is lost without the sync in {site}"
    assert set(besides) <= set(recorder.sites())
