"""A run of real parts, each daemon as if on a machine of its own: a network namespace with a line
that has a rate, a hostname, shared memory. Needs root on Linux."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.cli import QUICKSTART
from tests.support.lines import Star

DEADLINE_S = 120.0  # generous: the machine may be busy; nothing waits that long when all is well
# Names as on a cluster: where nobody answers for them, torch's store waits for a name server.
APART = (
    'mount -t tmpfs tmpfs /dev/shm && mount --bind hosts /etc/hosts && hostname "$0" && exec "$@"'
)
WATCH = """
import asyncio, sys
from lightrl.client import ask
from lightrl.errors import LightRLError
from lightrl.wire import to_json
async def watch():
    while True:
        try:
            async for snapshot in ask.watch(sys.argv[1], 0.05, sys.argv[2]):
                print(to_json(snapshot).decode(), flush=True)
        except LightRLError:
            await asyncio.sleep(0.1)
asyncio.run(watch())
"""
OVER = {"finished", "stopped", "failed"}
Snapshot = dict[str, Any]


class Machines:
    """Machine 0 has coordinator and trainer, the others a rollout node each."""

    def __init__(self, folder: Path, star: Star, *overrides: str) -> None:
        self.folder, self.star, self._overrides = folder, star, overrides
        self.run_dir = folder / "runs" / "one"
        self.address = f"tcp://{star.address(0)}:5600"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watcher: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._changed = threading.Condition()
        self._snapshot: Snapshot = {}

    def begin(self, *nodes: str) -> None:
        """Coordinator, trainer, and these nodes on the machines 1, 2, ..."""
        at = (f"run.dir={self.folder / 'runs'}", f"run.bind={self.address}")
        self.start_coordinator("up", str(QUICKSTART), "run.name=one", *at)
        self.start_trainer()
        for k, name in enumerate(nodes, 1):
            self.start_node(name, k)

    def start_coordinator(self, *words: str) -> None:
        self._start("head", 0, *words, *self._overrides, "--role", "coordinator", "--name", "head")
        self._until(lambda: (self.run_dir / "address").exists(), "the coordinator listens")
        if self._watcher is None:
            self._watch()

    def resume_coordinator(self) -> None:
        (self.run_dir / "address").unlink(missing_ok=True)  # of the one before
        self._overrides = ()
        self.start_coordinator("resume", "runs/one")

    def start_trainer(self) -> None:
        key = ("--key", str(self.run_dir / "key"))
        self._start("trainer", 0, *self._join(), *key, "--role", "trainer", "--name", "trainer")

    def start_node(self, name: str, machine: int, *more: str) -> None:
        key = ("--key", str(self.run_dir / "join"))
        self._start(name, machine, *self._join(), *key, "--name", name, *more)

    def child(self, name: str) -> int:
        """The process id of the engine of this node, or the first rank of the trainer."""
        pid = self.processes[name].pid
        found: list[int] = []

        def holds() -> bool:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found[:] = [int(c) for c in children if _is_worker(int(c))]
            return bool(found)

        self._until(holds, f"{name} has a child")
        return found[0]

    def until(self, holds: Callable[[Snapshot], bool], what: str) -> Snapshot:
        """The first snapshot for which this holds."""
        deadline = time.monotonic() + DEADLINE_S
        with self._changed:
            while not (self._snapshot and holds(self._snapshot)):
                left = deadline - time.monotonic()
                told = [self._snapshot.get(key) for key in ("state", "step", "nodes", "events")]
                assert left > 0, f"not within {DEADLINE_S:.0f} s: {what}; {told}"
                assert told[0] not in OVER, f"the run is over, not: {what}; {told}"
                self._changed.wait(min(left, 1.0))
                self._raise_if_ended()
                if self.processes["head"].poll() == 0:  # maybe before it was asked once
                    self._snapshot = {**self._snapshot, "state": "finished"}
            return self._snapshot

    def until_half(self, machine: int, num_bytes: int) -> None:
        """From now on half as much comes to this machine."""
        began = self._received(machine)
        self._until(lambda: self._received(machine) - began > num_bytes // 2, "half has come")

    def finish(self) -> dict[str, Any]:
        """The summary of the run, once all who take part have left."""
        for name in ("head", "trainer"):
            code = self.processes[name].wait(DEADLINE_S)
            assert code == 0, f"{name}: {code}\n{self.log(name)[-3000:]}"
        return json.loads((self.run_dir / "summary.json").read_bytes())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for process in (*self.processes.values(), self._watcher):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):  # children of one that was killed
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._watcher is not None and self._listener is not None:
            self._listener.join()
            assert self._watcher.stdout is not None
            self._watcher.stdout.close()

    def _join(self) -> tuple[str, ...]:
        return ("up", "--join", self.address)

    def _start(self, name: str, machine: int, *words: str) -> None:
        lightrl = (sys.executable, "-P", "-m", "lightrl.cli", *words)
        command = self._on(machine, f"machine-{machine}", lightrl)
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )

    def _on(self, machine: int, hostname: str, words: Sequence[str]) -> Sequence[str]:
        apart = ("unshare", "--mount", "--uts", "sh", "-c", APART, hostname)
        return self.star.command(machine, *apart, *words)

    def _watch(self) -> None:
        key = (self.run_dir / "key").read_text().strip()
        words = (sys.executable, "-c", WATCH, self.address, key)
        self._watcher = subprocess.Popen(
            self._on(0, "watcher", words),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, args=(self._watcher,))
        self._listener.start()

    def _listen(self, watcher: "subprocess.Popen[str]") -> None:
        assert watcher.stdout is not None
        for line in watcher.stdout:
            with self._changed:
                self._snapshot = json.loads(line)
                self._changed.notify_all()

    def _received(self, machine: int) -> int:
        words = ("ip", "-n", self.star.space(machine), "-s", "-j", "link", "show", "line")
        said = subprocess.run(words, check=True, capture_output=True).stdout
        return int(json.loads(said)[0]["stats64"]["rx"]["bytes"])

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
            self._raise_if_ended()
            time.sleep(0.01)

    def _raise_if_ended(self) -> None:
        """Nobody fails: who ends has left, or was killed."""
        assert self._watcher is None or self._watcher.poll() is None
        for name, process in self.processes.items():
            code = process.poll()
            assert code in {None, 0, -signal.SIGKILL}, f"{name}: {code}\n{self.log(name)[-3000:]}"


def _is_worker(pid: int) -> bool:
    """Not a reaper or something that is about to become another program."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"engine" in words or b"rank" in words
    return False


@contextlib.contextmanager
def machines(folder: Path, num: int, rate: float, *overrides: str) -> Iterator[Machines]:
    """`num` machines on lines of `rate` bytes/s in each direction."""
    star = Star(f"{os.getpid()}-run", num)
    names = [f"{p}{star.address(k)} machine-{k}" for k in range(num) for p in ("", "::ffff:")]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    with star.up():
        for k in range(num):
            star.set_rate(k, rate, rate)
        run = Machines(folder, star, *overrides)
        try:
            yield run
        finally:
            run.close()
