"""All daemons of a run as child processes of this one: starts them, notices their end, stops them.

Owns processes and the run directory's first files; knows no protocol but "drain, then signals".
The daemons are ordinary `lightrl daemon` processes that talk over sockets, as on a cluster.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.config import Config
from lightrl.core.state import RunState
from lightrl.errors import ConfigError, LightRLError, PeerUnreachable
from lightrl.launch.address import listening, reachable, shown
from lightrl.launch.running import ask, final_snapshot
from lightrl.messages import Role
from lightrl.node import client
from lightrl.run_file import to_toml

LISTENS_WITHIN_S = 60.0  # from its start to the coordinator's address; it imports and reads the data
FOLLOWS_WITHIN_S = 1.0  # other daemons may end for the same reason: wait so long for the first cause
DRAIN_ASKED_S = 3.0
TERM_S = 3.0  # from SIGTERM to SIGKILL, after the grace time


class RunFailed(LightRLError):
    """A daemon that the run needs has ended; the text says which, why, and where its log is."""


@dataclass(frozen=True)
class Daemon:
    """One child process. `ended` gives its exit status."""

    name: str
    role: Role
    process: asyncio.subprocess.Process
    log: Path
    ended: "asyncio.Task[int]"

    def failed(self) -> bool:
        return self.ended.done() and self.ended.result() != 0

    def obituary(self) -> str:
        code = self.ended.result()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        last = last_line(self.log).removeprefix("lightrl: ")
        return f"{self.name} {how}{': ' if last else ''}{last} (log: {shown(self.log)})"


class LocalRun:
    """The daemons of one run on this machine. Call `start`, then `until_over`; always `stop`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run_dir = config.run_dir.resolve()
        self.daemons: list[Daemon] = []
        self.address = ""
        self.lost: list[str] = []  # daemons that failed while the run went on

    async def start(self) -> None:
        """Returns when the coordinator listens and the other daemons are started.

        Raises RunFailed. A run whose coordinator refuses its input leaves no directory behind, so
        that the next attempt may use the same name.
        """
        create_run_dir(self.config)
        head = await self._spawn("head", "coordinator")
        try:
            self.address = await self._listening(head)
        except RunFailed:
            line = last_line(head.log)
            if head.ended.done() and line.startswith("lightrl: "):
                shutil.rmtree(self.run_dir)
                raise RunFailed(line.removeprefix("lightrl: ")) from None
            raise
        point_latest(self.run_dir)
        await self._spawn("trainer-0", "trainer")
        for k in range(self.config.rollout.nodes):
            await self._spawn(f"rollout-{k}", "rollout")

    async def until_over(self) -> None:
        """Returns when the run is over, finished or stopped. Raises RunFailed when it cannot go on."""
        head = self.daemons[0]
        known: set[str] = set()
        while not head.ended.done():
            alive = [d.ended for d in self.daemons if not d.ended.done()]
            await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)
            news = [d for d in self.daemons if d.failed() and d.name not in known]
            known |= {d.name for d in news}
            for daemon in news:
                if daemon.role != "rollout" or not await self._others_roll_out():
                    await self._give_up(daemon)
                if daemon is not head:
                    self.lost.append(daemon.obituary())
        if head.failed():
            await self._give_up(head)

    async def stop(self, reason: str) -> None:
        """Asks the run to stop, waits the grace time, then ends what is left by its process id."""
        head = self.daemons[0] if self.daemons else None
        if head is not None and not head.ended.done():
            await self._ask_to_drain(head, reason)
        await self._wait_all(self.config.node.grace_s)
        for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
            for daemon in self.daemons:
                if not daemon.ended.done():
                    _signal_session(daemon.process.pid, number)
            await self._wait_all(wait_s)

    async def _spawn(self, name: str, role: Role) -> Daemon:
        command = ["daemon", "--name", name, "--role", role, "--run-dir", str(self.run_dir), "--tied"]
        if self.address:
            command += ["--join", self.address]
        log = self.run_dir / "logs" / f"{name}.log"
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "lightrl.cli",
                *command,
                stdin=asyncio.subprocess.PIPE,  # closes when this process ends, however it does
                stdout=out,
                stderr=out,
                start_new_session=True,  # ctrl-C is for this process, which then asks the daemons to drain
            )
        daemon = Daemon(name, role, process, log, asyncio.create_task(process.wait(), name=f"{name} ends"))
        self.daemons.append(daemon)
        return daemon

    async def _listening(self, head: Daemon) -> str:
        """The address that the coordinator writes once it listens."""
        deadline = asyncio.get_running_loop().time() + LISTENS_WITHIN_S
        while (address := listening(self.run_dir)) is None:
            await asyncio.wait([head.ended], timeout=0.05)
            if head.ended.done():
                raise RunFailed(head.obituary())
            if asyncio.get_running_loop().time() > deadline:
                said = last_line(head.log) or "nothing in its log"
                raise RunFailed(
                    f"head does not listen after {LISTENS_WITHIN_S:.0f} s: {said} (log: {shown(head.log)})"
                )
        return reachable(address)  # the trainer learns from it under which address others see it

    async def _others_roll_out(self) -> bool:
        """Whether a rollout node is left, here or elsewhere."""
        here = {d.name for d in self.daemons}
        if any(d.role == "rollout" and not d.ended.done() for d in self.daemons):
            return True
        try:
            snapshot = await ask(self.address)
        except LightRLError:
            return False
        return any("rollout" in n.roles and n.state != "gone" and n.name not in here for n in snapshot.nodes)

    async def _give_up(self, daemon: Daemon) -> None:
        """Raises RunFailed with the first cause, unless the run is over or ending well at this moment.

        A coordinator that ends because its trainer failed, and the other way round, end within moments
        of each other: the one that is not the coordinator knows the reason.
        """
        head = self.daemons[0]
        await asyncio.wait([d.ended for d in self.daemons if d.role != "rollout"], timeout=FOLLOWS_WITHIN_S)
        if head.ended.done() and (self._was_stopped() or (daemon.role == "rollout" and not head.failed())):
            return
        trainers = [d for d in self.daemons if d.role == "trainer" and d.failed()]
        cause = trainers[0] if daemon is head and trainers and _speaks(trainers[0]) else daemon
        raise RunFailed(cause.obituary())

    def _was_stopped(self) -> bool:
        last = final_snapshot(self.run_dir)
        return last is not None and last.state == RunState.STOPPED

    async def _ask_to_drain(self, head: Daemon, reason: str) -> None:
        if self.address:
            with contextlib.suppress(PeerUnreachable, TimeoutError):
                async with asyncio.timeout(DRAIN_ASKED_S):
                    await client.drain(self.address, "*", reason)
                return
        _signal_session(head.process.pid, signal.SIGTERM)

    async def _wait_all(self, timeout_s: float) -> None:
        alive = [d.ended for d in self.daemons if not d.ended.done()]
        if alive:
            await asyncio.wait(alive, timeout=timeout_s)


def create_run_dir(config: Config) -> Path:
    """The run directory with its resolved config, made now. The caller has checked that it is new.

    Raises ConfigError if it cannot be made.
    """
    run_dir = config.run_dir.resolve()
    try:
        run_dir.mkdir(parents=True)
        (run_dir / "logs").mkdir()
        (run_dir / "config.toml").write_text(to_toml(config), encoding="utf-8")
    except OSError as e:
        where = f"run.dir = {config.run.dir!r}, run.name = {config.run.name!r}"
        raise ConfigError(f"{where}: cannot make this directory: {e.strerror}: {e.filename}") from None
    return run_dir


def point_latest(run_dir: Path) -> None:
    """Makes `latest` beside the run directory point at it, in one step. Raises ConfigError."""
    latest, fresh = run_dir.parent / "latest", run_dir.parent / f".latest-{os.getpid()}"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run_dir.name)
        fresh.replace(latest)
    except OSError as e:
        fresh.unlink(missing_ok=True)
        raise ConfigError(f"run.dir: cannot make the link {latest}: {e.strerror}") from None


def in_foreground(config: Config, daemon: Callable[[Path], int]) -> int:
    """Runs a coordinator's `daemon` in this process with a new run directory; returns its exit status.

    As with LocalRun, a run that never listened leaves nothing behind and `latest` alone.
    """
    run_dir = create_run_dir(config)
    over = threading.Event()
    threading.Thread(target=_announce, args=(run_dir, over), name="announce", daemon=True).start()
    try:
        return daemon(run_dir)
    except (LightRLError, KeyboardInterrupt):
        if listening(run_dir) is None and final_snapshot(run_dir) is None:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    finally:
        over.set()


def _announce(run_dir: Path, over: threading.Event) -> None:
    """Says so and moves `latest` once the coordinator listens, which comes after reading its input."""
    while (address := listening(run_dir)) is None:
        if over.wait(0.1):
            return
    print(f"join it from elsewhere: lightrl up --join {reachable(address)}", flush=True)
    with contextlib.suppress(ConfigError):  # looked at before the start; the run is worth more than the link
        point_latest(run_dir)


def last_line(log: Path) -> str:
    """The last line that says something."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:400] if lines else ""


def _speaks(daemon: Daemon) -> bool:
    return last_line(daemon.log).startswith("lightrl: ")


def _signal_session(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
