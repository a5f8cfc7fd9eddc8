"""One run of real daemons under a trace: `lightrl up` with what is reserved, and a process for each
preemptible node, started when it comes and killed when it goes.

Owns the processes, by their ids, and when each node was there. Preemptible nodes have shared memory
of their own, where the system allows that (root on Linux): as on machines of their own, they pull
each version over TCP.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_lib.processes import Processes, send

from lightrl.client import ask
from lightrl.client.address import listening
from lightrl.emulation import SLOWNESS
from lightrl.errors import LightRLError
from lightrl.keys import JOIN_FILE, KEY_FILE, reachable, read_key
from lightrl.messages.snapshot import Snapshot
from lightrl.metrics import sinks
from lightrl.sim.inputs.traces import TraceEvent

LIGHTRL = (sys.executable, "-m", "lightrl.cli")
MOUNT = 'mount -t tmpfs -o size=2g lightrl-harvest /dev/shm && exec "$0" "$@"'
ALONE = ("unshare", "-m", "sh", "-c", MOUNT)
LOOK_S = 0.1
CPU_LOOK_S = 1.0
LISTENS_S = 60.0


class HarvestFailed(Exception):
    """The run failed; the text holds its output."""


@dataclass
class Ran:
    """What came of a run."""

    summary: dict[str, Any]
    # of each step, with "ended_at", by the clock of this process
    records: list[dict[str, float]]
    # of preemptible nodes: from their hello until they were killed or drained
    present: list[tuple[float, float]]
    kills: int
    terms: int
    # share of all cores of the machine while steps were counted, and of that what the run took
    cpu_busy: float
    cpu_own: float
    wall_s: float


@dataclass
class _Nodes:
    """Preemptible ones, by name."""

    folder: Path
    environment: dict[str, str]
    # how many times as long their engines take, by name; 1 of those that are not named
    slowness: Mapping[str, float] = field(default_factory=dict)
    # words before their command line
    words: Sequence[str] = ()
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    # that were drained or killed
    gone: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    since: dict[str, float] = field(default_factory=dict)
    present: list[tuple[float, float]] = field(default_factory=list)
    kills: int = 0
    terms: int = 0

    def come(self, name: str, address: str, key: Path) -> None:
        joins = ("--join", address, "--key", str(key), "--name", name, "--preemptible", "--no-tui")
        apart = ALONE if can_be_alone() else ()
        with (self.folder / f"{name}.log").open("ab") as out:
            self.running[name] = subprocess.Popen(
                [*self.words, *apart, *LIGHTRL, "up", *joins],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment | {SLOWNESS: str(self.slowness.get(name, 1.0))},
                start_new_session=True,
            )

    def go(self, name: str) -> None:
        """Every other one has a warning."""
        process = self.running.pop(name)
        is_warned = (self.kills + self.terms) % 2 == 1
        send(process.pid, signal.SIGTERM if is_warned else signal.SIGKILL)
        self.terms, self.kills = self.terms + is_warned, self.kills + (not is_warned)
        self._left(name, time.monotonic())
        self.gone.append(process)

    def look(self, snapshot: Snapshot, now: float) -> None:
        for node in snapshot.nodes:
            if node.name in self.running and node.state not in {"gone", "draining"}:
                self.since.setdefault(node.name, now)

    def end(self, now: float) -> None:
        for name in list(self.since):
            self._left(name, now)
        for process in (*self.running.values(), *self.gone):
            if process.poll() is None:
                send(process.pid, signal.SIGKILL)
            process.wait()

    def _left(self, name: str, now: float) -> None:
        if (since := self.since.pop(name, None)) is not None:
            self.present.append((since, now))


def can_be_alone() -> bool:
    return os.geteuid() == 0 and sys.platform == "linux"


def on_cores(cores: Sequence[int]) -> tuple[str, ...]:
    """Before the command line of what is to have these only."""
    return ("taskset", "-c", ",".join(map(str, cores)))


def run(
    folder: Path,
    settings: Sequence[str],
    trace: Sequence[TraceEvent],
    limit_s: float,
    cores: tuple[Sequence[int], Sequence[int]] | None = None,
    slowness: Mapping[str, float] | None = None,
) -> Ran:
    """`cores`: of what is reserved and of preemptible nodes; None = all. `slowness`: of preemptible
    nodes. Raises HarvestFailed if it does not finish within `limit_s`. Leaves no process behind."""
    here, there = ((), ()) if cores is None else map(on_cores, cores)
    folder.mkdir(parents=True)
    processes = Processes(uuid.uuid4().hex)
    nodes = _Nodes(folder, processes.environment, slowness or {}, there)
    began = time.monotonic()
    with (folder / "out").open("wb") as out:
        up = subprocess.Popen(
            [*here, *LIGHTRL, "up", *settings, f"run.dir={folder}", "run.name=run", "--no-tui"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=processes.environment,
            start_new_session=True,
        )
    try:
        cpu = _Cpu(processes)
        attended = _attend(folder / "run", up, nodes, trace, cpu, began + limit_s)
        records = asyncio.run(attended)
    finally:
        nodes.end(time.monotonic())
        if up.poll() is None:
            send(up.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.wait(30.0)
        left = processes.end()
    output = (folder / "out").read_text(errors="replace")[-1500:]
    if up.wait() != 0:
        raise HarvestFailed(f"`lightrl up` ended with {up.returncode}:\n{output}")
    if left:
        raise HarvestFailed(f"outlived the run: {[' '.join(p.words)[:150] for p in left]}")
    summary = json.loads((folder / "run" / "summary.json").read_bytes())
    wall_s = time.monotonic() - began
    return Ran(summary, records, nodes.present, nodes.kills, nodes.terms, *cpu.shares, wall_s)


async def _attend(
    run_dir: Path,
    up: "subprocess.Popen[bytes]",
    nodes: _Nodes,
    trace: Sequence[TraceEvent],
    cpu: "_Cpu",
    deadline: float,
) -> list[dict[str, float]]:
    """Until the run is over: nodes come and go. Returns what was noted of its steps."""
    address = await _address(run_dir, up)
    began = time.monotonic()
    due = list(trace)[::-1]
    records: list[dict[str, float]] = []
    watching = asyncio.create_task(_watch(address, run_dir, nodes))
    try:
        while up.poll() is None:
            now = time.monotonic()
            if now > deadline:
                raise HarvestFailed(f"not finished in time, after {len(records)} steps")
            while due and due[-1].at_s <= now - began:
                event = due.pop()
                if event.added:
                    nodes.come(event.node, address, run_dir / JOIN_FILE)
                else:
                    nodes.go(event.node)
            records += [{**r, "ended_at": now} for r in _steps(run_dir)[len(records) :]]
            if records:
                cpu.look(now)
            if watching.done():
                watching.result()
            await asyncio.sleep(LOOK_S)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    now = time.monotonic()
    records += [{**r, "ended_at": now} for r in _steps(run_dir)[len(records) :]]
    return records


async def _address(run_dir: Path, up: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + LISTENS_S
    while (address := listening(run_dir)) is None:
        if up.poll() is not None or time.monotonic() > deadline:
            output = (run_dir.parent / "out").read_text(errors="replace")[-1500:]
            raise HarvestFailed(f"the coordinator did not come up:\n{output}")
        await asyncio.sleep(LOOK_S)
    return reachable(address)


async def _watch(address: str, run_dir: Path, nodes: _Nodes) -> None:
    """Sees nodes join, until the coordinator is gone."""
    with contextlib.suppress(LightRLError):
        key = read_key(run_dir / KEY_FILE)
        async with contextlib.aclosing(ask.watch(address, LOOK_S, key)) as snapshots:
            async for snapshot in snapshots:
                nodes.look(snapshot, time.monotonic())


def _steps(run_dir: Path) -> list[dict[str, float]]:
    return [record for record in sinks.read(run_dir) if "timing_s/step" in record]


class _Cpu:
    """Sampled now and then, since killed processes report nothing."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._looked_at = float("-inf")
        self._machine: list[tuple[int, int]] = []  # (busy, all), in ticks of all cores
        self._own: dict[int, tuple[int, int]] = {}  # by process: at first, and now

    def look(self, now: float) -> None:
        if now < self._looked_at + CPU_LOOK_S:
            return
        self._looked_at = now
        line, _ = Path("/proc/stat").read_text().split("\n", 1)
        ticks = [int(word) for word in line.split()[1:9]]
        self._machine.append((sum(ticks) - ticks[3] - ticks[4], sum(ticks)))
        for process in self._processes.all():
            with contextlib.suppress(OSError):  # it has ended
                stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                used = int(stat[11]) + int(stat[12])
                is_first = len(self._machine) == 1
                first, _ = self._own.get(process.pid, (used if is_first else 0, used))
                self._own[process.pid] = first, used

    @property
    def shares(self) -> tuple[float, float]:
        """Of all cores, what was busy, and what the run took of them."""
        if len(self._machine) < 2:
            return 0.0, 0.0
        (busy, total), (busy_then, total_then) = self._machine[-1], self._machine[0]
        own = sum(used - first for first, used in self._own.values())
        return (busy - busy_then) / (total - total_then), own / (total - total_then)


def losses(ran: Ran, tokens: float) -> Iterator[str]:
    """What of a run must not be, in lines: tokens that were lost, or sampled twice."""
    counted = ran.summary["rollout_tokens"] - ran.summary["aborted_tokens"]
    if round(tokens) != counted:
        yield f"{counted} tokens arrived, {tokens:.0f} were trained"
    if ran.summary["state"] != "finished":
        yield f"the run is {ran.summary['state']}: {ran.summary['reason']}"
