"""All daemons of a run as child processes of this one.

Decides which of them are restarted and when the run cannot continue. The daemons are ordinary
`lightrl daemon` processes that connect by sockets, as on a cluster.
"""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightrl.client.address import accepts, left_at, listening, listening_since, relative
from lightrl.client.ask import drain
from lightrl.client.find_run import ask, final_snapshot
from lightrl.config.schema import Config
from lightrl.core.state import RunState
from lightrl.devices.assign import NO_GPUS, Assignment
from lightrl.devices.plan import part_with, shared_with
from lightrl.devices.sizes import sized_options
from lightrl.errors import ConfigError, LightRLError, PeerUnreachable
from lightrl.keys import JOIN_FILE, KEY_FILE, join_command, reachable, read_key, why_here_only
from lightrl.launch.daemons import RESTARTS, Daemon, Daemons, RunFailed
from lightrl.launch.folder import create_run_dir, point_latest, remove_run_dir
from lightrl.messages.nodes import Role
from lightrl.messages.snapshot import Snapshot
from lightrl.metrics import sinks

logger = logging.getLogger(__name__)

RESUMED = "resumed at step "  # the beginning of the coordinator's event
LISTENS_WITHIN_S = 180.0  # a coordinator after its start: it imports, and reads the data
FOLLOWS_WITHIN_S = 1.0  # daemons that end for the same reason
# A daemon that fails so soon after the restart of the coordinator may fail for that.
AWAY_S = 20.0
REPLACEABLE = {"rollout", "environment"}  # roles of which the run needs one node, no matter which
DRAIN_S = 3.0
TERM_S = 3.0  # from SIGTERM to SIGKILL, after the grace time
POLL_S = 0.1  # of the address of the coordinator


class LocalRun:
    """The daemons of one run on this machine. Call `start`, then `until_over`; always `stop`."""

    def __init__(
        self,
        config: Config,
        resume: bool,
        report: Callable[[str], None],
        gpus: Assignment = NO_GPUS,
    ) -> None:
        """`resume`: the run directory exists, with a journal. `report` gets a line for each
        restart."""
        self.config = config
        self.run_dir = config.run_dir.resolve()
        self.daemons = Daemons(self.run_dir, report)  # the head first
        self.address = ""
        self.key = ""
        self.lost: list[str] = []  # daemons that failed while the run continued
        self._gpus = gpus
        self._sized = sized_options(config, gpus)
        self._resume = resume
        self._ended: set[str] = set()  # daemons that are not restarted
        self._restarted_at = float("-inf")  # of the head

    @property
    def _head(self) -> Daemon:
        return self.daemons.by_name["head"]

    async def start(self) -> None:
        """Start the coordinator, wait until it listens, then start the other daemons.

        Raises RunFailed. A new run whose coordinator refuses its input leaves no directory.
        """
        if not self._resume:
            create_run_dir(self.config)
        self.key = read_key(self.run_dir / KEY_FILE)
        before = left_at(self.run_dir)
        await self._start("head", "coordinator", *(["--resume"] if self._resume else []))
        try:
            self.address = await self._listening(before)
        except RunFailed:
            if self._head.is_user_error:
                line = self._head.last_line()
                if not self._resume:
                    remove_run_dir(self.run_dir)
                raise RunFailed(line, line) from None
            raise
        point_latest(self.run_dir)
        for k in range(self.config.train.nodes):
            await self._start(f"trainer-{k}", "trainer")
        if self.config.environment.enabled and self.config.environment.workers:
            await self._start("environment-0", "environment")
        one_size = (f"rollout-{k}" for k in range(self.config.rollout.nodes))
        for name in self._sized or one_size:
            await self._start(name, "rollout")

    async def resumed_line(self) -> list[str]:
        """Return the coordinator's line on where a resumed run continues."""
        if not self._resume or (snapshot := await self._snapshot()) is None:
            return []
        return [text for _, text in snapshot.events if text.startswith(RESUMED)][:1]

    async def until_over(self) -> None:
        """Return when the run is finished or stopped. Raises RunFailed when it cannot continue."""
        daemons = self.daemons.by_name.values()
        keepers = {d.name: asyncio.create_task(self._keep(d)) for d in daemons}
        pending = set(keepers.values())
        try:
            while not keepers["head"].done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                ended = [keeper.result() for keeper in done]
                self._ended |= {daemon.name for daemon in ended}
                for daemon in ended:
                    if daemon.has_failed and daemon.role != "coordinator":
                        await self._on_failed(daemon)
            if self._head.has_failed:
                await self._give_up(self._head)
        finally:
            self.daemons.over.set()
            await asyncio.gather(*keepers.values(), return_exceptions=True)

    async def stop(self, reason: str) -> None:
        """Ask the run to stop, wait the grace time, then end what is left by its process id."""
        self.daemons.over.set()
        head = self.daemons.by_name.get("head")
        if head is not None and not head.ended.done():
            await self._ask_to_drain(head, reason)
        elif head is not None and (head.has_crashed or head.is_user_error):
            self.daemons.send(signal.SIGTERM)  # without a coordinator they would wait for it
        await self.daemons.wait(self.config.node.grace_s)
        await self.daemons.end((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S))

    async def _start(self, name: str, role: Role, *options: str) -> Daemon:
        """Raises RunFailed if this machine cannot start it."""
        config, gpus = self.config, self._gpus
        if self.address and role != "coordinator":
            options = ("--join", self.address, *(self._sized.get(name) or gpus.options(name)))
        if role == "rollout" and config.rollout.placement == "shared":
            k = int(name.rpartition("-")[2])
            options = (*options, "--shares", shared_with(config, gpus, k))
            if part := part_with(config, gpus, k, config.train.nodes):
                options = (*options, "--part", str(part))
        try:
            return await self.daemons.start(name, role, *options)
        except OSError as e:
            raise RunFailed(f"{name} cannot be started: {e.strerror or e}") from None

    async def _listening(self, before: float | None) -> str:
        """Return the address that the coordinator stores once it listens; not the one of
        `before`."""
        head, deadline = self._head, time.monotonic() + LISTENS_WITHIN_S
        while (address := listening_since(self.run_dir, before)) is None:
            await asyncio.wait([head.ended], timeout=0.05)
            if head.ended.done():
                raise head.failure()
            if time.monotonic() > deadline:
                line = head.last_line() or "nothing in its log"
                limit = f"{LISTENS_WITHIN_S:.0f} s"
                log = relative(head.log)
                raise RunFailed(f"the coordinator does not listen after {limit}: {line} ({log})")
        return reachable(address)

    async def _keep(self, daemon: Daemon) -> Daemon:
        steps = _record_of_steps(self.run_dir)

        def progressed() -> bool:
            nonlocal steps
            before, steps = steps, _record_of_steps(self.run_dir)
            return steps != before

        restart = partial(self._restart, daemon.name, daemon.role)
        return await self.daemons.keep(daemon, restart, self._may_restart, progressed)

    async def _restart(self, name: str, role: Role) -> Daemon:
        """Raises RunFailed."""
        if role == "coordinator":
            self._restarted_at = time.monotonic()
            return await self._start(name, role, "--resume")
        while not accepts(self.address):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(POLL_S)
        return await self._start(name, role)

    async def _may_restart(self, daemon: Daemon) -> bool:
        if daemon.role == "coordinator":
            return daemon.has_crashed and self.config.journal.enabled
        if daemon.has_crashed or (daemon.has_failed and self._head_is_away()):
            return True
        return daemon.role == "trainer" and not daemon.has_failed and await self._needs_trainer()

    async def _needs_trainer(self) -> bool:
        """Return whether the run continues after its trainer has left in order."""
        continues = {RunState.STARTING, RunState.RUNNING, RunState.EVALUATING}
        if self._head.ended.done() or (snapshot := await self._snapshot()) is None:
            return False
        return snapshot.state in continues

    async def _snapshot(self) -> Snapshot | None:
        """Return None if the coordinator does not answer, or ends before it does."""
        asking = asyncio.create_task(ask(self.address, self.key), name="ask")
        try:
            await asyncio.wait({asking, self._head.ended}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        except LightRLError:
            return None
        finally:
            asking.cancel()

    def _head_is_away(self) -> bool:
        """Return whether another daemon may have failed because the coordinator was gone."""
        head = self._head
        if head.ended.done():
            return head.has_crashed
        return time.monotonic() - self._restarted_at < AWAY_S

    async def _on_failed(self, daemon: Daemon) -> None:
        """Raise RunFailed if the run cannot continue without this daemon."""
        if daemon.role not in REPLACEABLE or not await self._has_nodes(daemon.role):
            await self._give_up(daemon)
        self.lost.append(daemon.exit_reason())

    async def _has_nodes(self, role: Role) -> bool:
        """Return whether a node of this role is left, here or elsewhere."""
        ours = self.daemons.by_name
        if any(d.role == role and d.name not in self._ended for d in ours.values()):
            return True
        snapshot = await self._snapshot()
        return snapshot is not None and any(
            role in n.roles and n.state != "gone" and n.name not in ours for n in snapshot.nodes
        )

    async def _give_up(self, daemon: Daemon) -> None:
        """Raise RunFailed with the first cause, unless the run is over or ends well at this moment.

        Coordinator and trainer end shortly after each other; the trainer has the reason.
        """
        head, daemons = self._head, self.daemons.by_name.values()
        await asyncio.wait(
            [d.ended for d in daemons if d.role not in REPLACEABLE], timeout=FOLLOWS_WITHIN_S
        )
        if head.ended.done():
            last = final_snapshot(self.run_dir)
            was_stopped = last is not None and last.state == RunState.STOPPED
            if was_stopped or (daemon.role in REPLACEABLE and not head.has_failed):
                return
        trainers = [d for d in daemons if d.role == "trainer" and d.is_user_error]
        cause = trainers[0] if daemon is head and trainers else daemon
        was_restarted = cause.role != "coordinator" or self.config.journal.enabled
        often = f", {RESTARTS.max_restarts + 1} times without a step done"
        raise cause.failure(often if cause.has_crashed and was_restarted else "")

    async def _ask_to_drain(self, head: Daemon, reason: str) -> None:
        if self.address:
            with contextlib.suppress(PeerUnreachable, TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await drain(self.address, "*", reason, self.key)
                return
        head.signal(signal.SIGTERM)


def in_foreground(config: Config, daemon: Callable[[Path], int], resume: bool = False) -> int:
    """Run a coordinator's `daemon` in this process and return its exit status.

    As with LocalRun, a new run that never began leaves no directory and does not change `latest`.
    """
    run_dir = config.run_dir.resolve() if resume else create_run_dir(config)
    over, before = threading.Event(), left_at(run_dir)

    def announce() -> None:
        while (address := listening_since(run_dir, before)) is None:
            if over.wait(POLL_S):
                return
        for line in join_lines(reachable(address), config.run.bind, run_dir):
            logger.info(line)
        with contextlib.suppress(ConfigError):  # the run continues without the link
            point_latest(run_dir)

    threading.Thread(target=announce, name="announce", daemon=True).start()
    try:
        return daemon(run_dir)
    except (LightRLError, KeyboardInterrupt):
        if not resume and listening(run_dir) is None and final_snapshot(run_dir) is None:
            remove_run_dir(run_dir)
        raise
    finally:
        over.set()


def join_lines(address: str, bind: str, run_dir: Path) -> list[str]:
    """Return how a node elsewhere joins, and why none can. `bind`: run.bind."""
    why = why_here_only(address, bind)
    where = "from this machine" if why else "from elsewhere"
    line = f"join it {where}: {join_command(address, relative(run_dir / JOIN_FILE))}"
    return [line, *filter(None, [why])]


def _record_of_steps(run_dir: Path) -> int:
    """Return a number that grows with every step that is done, also before a resume."""
    try:
        return (run_dir / sinks.FILE_NAME).stat().st_size
    except FileNotFoundError:
        return 0
