"""The processes of one run: found by a mark in their environment, signalled by their ids.

Owns who is who. A process without the mark is never touched, whatever it is called.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.trainer.protocol import EMULATED_TARGET, RANK_TARGET

MARK = "CHAOS_RUN"
WORKER = "lightrl.environments.worker.main"
END_S = 20.0  # for all to be gone once the run is over
LOOK_S = 0.05
# of child
KINDS = {RANK_TARGET: "rank", EMULATED_TARGET: "rank", "lightrl.rewards.worker:main": "reward"}


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    words: tuple[str, ...]

    @property
    def daemon(self) -> str:
        """The name of the daemon that this is; "" for its children and for `lightrl up`."""
        joined = "--name" in self.words and ({"daemon", "--join"} & {*self.words})
        return self.words[self.words.index("--name") + 1] if joined else ""

    @property
    def child(self) -> str:
        """What kind of child: "engine", "rank", "reward", "worker" of environments, or ""."""
        if self.words[1:2] == ("-c",) and WORKER in self.words[2]:
            return "worker"
        # a reaper has it further on
        if self.words[3:4] != ("from lightrl.system.child import run; run()",):
            return ""
        target = self.words[-3]
        return KINDS.get(target, "engine")


class Processes:
    """All processes below what was started with `environment`."""

    def __init__(self, mark: str) -> None:
        self._entry = f"{MARK}={mark}".encode()
        self.environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}

    def all(self) -> list[Process]:
        found: list[Process] = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended
                    if self._entry in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(_read(folder))
        return [p for p in found if p.words]  # a zombie has none

    def daemon(self, name: str) -> Process | None:
        return next((p for p in self.all() if p.daemon == name), None)

    def child(self, name: str, kind: str) -> Process | None:
        """One child of the daemon `name`; a reward worker has a reaper between."""
        daemon = self.daemon(name)
        below = self.below(daemon.pid) if daemon is not None else []
        return next((p for p in below if p.child == kind), None)

    def below(self, pid: int) -> list[Process]:
        """The process and all that it has started."""
        alive = self.all()
        members = {pid}
        while more := {p.pid for p in alive if p.parent in members} - members:
            members |= more
        return [p for p in alive if p.pid in members]

    def await_gone(self, is_meant: Callable[[Process], bool], limit_s: float) -> list[Process]:
        """Those that are still there after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while left := [p for p in self.all() if is_meant(p)]:
            if time.monotonic() > deadline:
                return left
            time.sleep(LOOK_S)
        return []

    def end(self) -> list[Process]:
        """Waits until all have ended by themselves; kills and returns those that do not."""
        left = self.await_gone(lambda process: True, END_S)
        for process in left:
            send(process.pid, signal.SIGKILL)
        return left


def send(pid: int, number: signal.Signals) -> bool:
    """False if it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _read(folder: Path) -> Process:
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
    return Process(int(folder.name), int(parent), tuple(words))
