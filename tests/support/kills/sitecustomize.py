"""Kills processes of a run at given entries of its journal. Python imports this in each process of
a run that has this folder in PYTHONPATH; only the coordinator does anything.

$KILLS is a folder. `plan` has a line for each kill: "ObservationTaken 3", or "ObservationTaken 3
durable", is the third entry of that kind in a step, when it is recorded or when it is on the disk;
"RoundOpened 1 pass" kills nobody. At most one line comes in a step, and `done` has those that came.
Whom, `victim` says: one of VICTIMS. `seen` gets all entries of each step.
"""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

WORKERS = (b"lightrl.environments.worker.main", b"agent.py")
VICTIMS = ("rollout", "worker", "environment", "head", "all")


def install(folder: Path) -> None:
    from lightrl.coordinator import journaling
    from lightrl.core.coordinator import Coordinator
    from lightrl.core.log_entries import LogEntry

    plan = (folder / "plan").read_text().splitlines()
    num_seen: Counter[str] = Counter()
    is_armed = False
    record, begin = journaling.Journaling.record, journaling.Journaling.begin

    def see(journal: journaling.Journaling, kind: str) -> None:
        nonlocal is_armed
        # a coordinator that was killed may open the round of its step again
        waits = folder / "waits"
        if kind == "StepDone":
            waits.unlink(missing_ok=True)
        if kind == "RoundOpened":
            num_seen.clear()
            is_armed = not waits.exists()
        num_seen[kind] += 1
        name = f"{kind} {num_seen[kind]}"
        _add(folder / "seen", name)
        done = folder / "done"
        num_done = len(done.read_text().splitlines()) if done.exists() else 0
        due = plan[num_done] if num_done < len(plan) else ""
        if is_armed and due.split()[:2] == name.split():
            is_armed = False
            waits.touch()
            _add(done, due)
            victim = (folder / "victim").read_text()
            if due == name:
                kill(victim)
            elif due.endswith("durable"):
                journal.when_durable(lambda: kill(victim))

    def recorded(self: journaling.Journaling, entry: LogEntry) -> None:
        record(self, entry)
        see(self, type(entry).__name__)

    def began(self: journaling.Journaling, core: Coordinator, note: bytes) -> None:
        begin(self, core, note)
        see(self, "Segment")

    journaling.Journaling.record, journaling.Journaling.begin = recorded, began


def _add(file: Path, line: str) -> None:
    with file.open("a") as out:
        out.write(line + "\n")


def kill(victim: str) -> None:
    """The coordinator, if it is one of them, comes last."""
    daemons = {name: pid for pid in _children(os.getppid()) if (name := _name(pid))}
    if victim == "worker":
        for pid in _below(daemons.get("environment-0", 0)):
            words = _words(pid)
            is_worker = any(worker in word for word in words for worker in WORKERS)
            if is_worker and not any(b"reaper" in w for w in words):
                os.kill(pid, signal.SIGKILL)
        return
    everybody = victim == "all"
    for name, pid in daemons.items():
        if pid != os.getpid() and (everybody or name.startswith(victim)):
            os.kill(pid, signal.SIGKILL)
    if everybody or victim == "head":
        os.kill(os.getpid(), signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _below(pid: int) -> list[int]:
    return [p for child in _children(pid) for p in (child, *_below(child))]


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _name(pid: int) -> str:
    words = _words(pid)
    return words[words.index(b"--name") + 1].decode() if b"--name" in words else ""


if "KILLS" in os.environ and "daemon" in sys.orig_argv and "coordinator" in sys.orig_argv:
    install(Path(os.environ["KILLS"]))
