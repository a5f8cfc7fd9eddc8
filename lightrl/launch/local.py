"""All daemons of a run as child processes of this one: started, started again when they crash,
stopped.

Owns which daemon is replaced and when the run cannot go on; knows no protocol but "drain, then
signals". The daemons are ordinary `lightrl daemon` processes that talk over sockets, as on a
cluster.
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
from typing import Any

from lightrl.client.address import (
    accepts,
    left_at,
    listening,
    listening_since,
    relative,
)
from lightrl.client.ask import drain
from lightrl.client.find_run import ask, final_snapshot
from lightrl.config.schema import Config
from lightrl.core.state import RunState
from lightrl.devices.assign import NO_GPUS, Assignment
from lightrl.devices.plan import part_with, shared_with
from lightrl.devices.sizes import sized_options
from lightrl.errors import ConfigError, LightRLError, PeerUnreachable
from lightrl.joining import join_command, reachable, why_here_only
from lightrl.keys import JOIN_FILE, KEY_FILE, read_key
from lightrl.launch.daemons import Daemon, RunFailed
from lightrl.launch.folder import create_run_dir, point_latest, remove_run_dir
from lightrl.messages.nodes import Role
from lightrl.messages.snapshot import Snapshot
from lightrl.metrics import sinks
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.restart import CrashCounter, RestartPolicy

logger = logging.getLogger(__name__)

RESUMED = "resumed at step "  # how the event begins that tells so
# from its start to the coordinator's address; it imports and reads the data
LISTENS_WITHIN_S = 180.0  # reward workers may take 120 to import what they need
# other daemons may end for the same reason: wait so long for the first cause
FOLLOWS_WITHIN_S = 1.0
# a coordinator that was started again answers by then; who fails before may fail for that
AWAY_S = 20.0
DRAIN_ASKED_S = 3.0
TERM_S = 3.0  # from SIGTERM to SIGKILL, after the grace time
# In a row: without a step done. What would follow the last crash would end the same.
RESTARTS = RestartPolicy(max_restarts=5, first_pause_s=0.2, growth=2.0, longest_pause_s=5.0)
LOOK_S = 0.1  # between two looks at whether the coordinator listens again


class LocalRun:
    """The daemons of one run on this machine. Call `start`, then `until_over`; always `stop`."""

    def __init__(
        self,
        config: Config,
        resume: bool,
        report: Callable[[str], None],
        gpus: Assignment = NO_GPUS,
    ) -> None:
        """`resume`: the run directory is there, with a journal. `report` hears of daemons
        started again."""
        self.config = config
        self.run_dir = config.run_dir.resolve()
        self.daemons: dict[str, Daemon] = {}  # the head first
        self.address = ""
        self.key = ""
        self.lost: list[str] = []  # daemons that failed while the run went on
        self._gpus = gpus
        self._sized = sized_options(config, gpus)
        self._resume = resume
        self._report = report
        self._over = asyncio.Event()  # nothing is started again
        self._ended: set[str] = set()  # daemons that are not started again
        self._revived_at = float("-inf")  # when the head was started again

    @property
    def _head(self) -> Daemon:
        return self.daemons["head"]

    async def start(self) -> None:
        """Returns when the coordinator listens and the other daemons are started.

        Raises RunFailed. A new run whose coordinator refuses its input leaves no directory behind,
        so that the next attempt may use the same name.
        """
        if not self._resume:
            create_run_dir(self.config)
        self.key = read_key(self.run_dir / KEY_FILE)
        before = left_at(self.run_dir)
        await self._start("head", "coordinator", *(["--resume"] if self._resume else []))
        try:
            self.address = await self._listening(before)
        except RunFailed:
            if self._head.gave_a_reason:
                line = self._head.last_line()
                if not self._resume:
                    remove_run_dir(self.run_dir)
                raise RunFailed(line) from None
            raise
        point_latest(self.run_dir)
        for k in range(self.config.train.nodes):
            await self._start(f"trainer-{k}", "trainer")
        one_size = (f"rollout-{k}" for k in range(self.config.rollout.nodes))
        for name in self._sized or one_size:
            await self._start(name, "rollout")

    async def what_was_found(self) -> list[str]:
        """What the coordinator of a resumed run says of where it goes on."""
        if not self._resume or (snapshot := await self._snapshot()) is None:
            return []
        return [text for _, text in snapshot.events if text.startswith(RESUMED)][:1]

    def _tell(self, line: str) -> None:
        """To the person who looks on, and to the launcher's log."""
        self._report(line)
        logger.warning(line)

    async def until_over(self) -> None:
        """Returns when the run is over, finished or stopped. Raises RunFailed when it cannot go
        on."""
        keepers = {name: asyncio.create_task(self._keep(d)) for name, d in self.daemons.items()}
        pending = set(keepers.values())
        try:
            while not keepers["head"].done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                ended = [keeper.result() for keeper in done]
                self._ended |= {daemon.name for daemon in ended}
                for daemon in ended:
                    if daemon.has_failed and daemon.role != "coordinator":
                        await self._bury(daemon)
            if self._head.has_failed:
                await self._give_up(self._head)
        finally:
            self._over.set()
            # the first cause is known
            await asyncio.gather(*keepers.values(), return_exceptions=True)

    async def stop(self, reason: str) -> None:
        """Asks the run to stop, waits the grace time, then ends what is left by its process id."""
        self._over.set()
        head = self.daemons.get("head")
        if head is not None and not head.ended.done():
            await self._ask_to_drain(head, reason)
        elif head is not None and (head.has_crashed or head.gave_a_reason):
            for daemon in self.daemons.values():  # nobody else tells them; they would wait for it
                daemon.signal(signal.SIGTERM)
        await self._wait_all(self.config.node.grace_s)
        for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
            for daemon in self.daemons.values():
                daemon.signal(number)
            await self._wait_all(wait_s)

    async def _start(self, name: str, role: Role, *options: str) -> Daemon:
        """`lightrl daemon --name NAME --role ROLE`, as a process. Raises RunFailed if nothing is to
        be waited for that would make it possible."""
        if self.address and role != "coordinator":
            given = self._sized.get(name) or self._gpus.options(name)
            options = ("--join", self.address, *options, *given)
        if role == "rollout" and self.config.rollout.placement == "shared":
            k = int(name.rpartition("-")[2])
            options = (*options, "--shares", shared_with(self.config, self._gpus, k))
            part = part_with(self.config, self._gpus, k, self.config.train.nodes)
            options = (*options, *(("--part", str(part)) if part else ()))
        start = partial(Daemon.start, name, role, self.run_dir, *options)
        try:
            daemon = self.daemons[name] = await retry_on_resource_limit(start, name, self._tell)
        except OSError as e:
            raise RunFailed(f"{name} cannot be started: {e.strerror or e}") from None
        logger.info("%s started, pid %d", name, daemon.process.pid)
        return daemon

    async def _start_again(self, daemon: Daemon) -> Daemon | None:
        """None if the run was over before this machine had what a process needs. Raises
        RunFailed."""
        is_head = daemon.role == "coordinator"
        if is_head:
            self._revived_at = time.monotonic()
        options = ("--resume",) if is_head else ()
        starting = asyncio.create_task(self._start(daemon.name, daemon.role, *options))
        await self._wait_unless_over(starting)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        return None if starting.cancelled() else starting.result()

    async def _listening(self, before: float | None) -> str:
        """The address that the coordinator leaves once it listens; not the one of `before`."""
        head, deadline = self._head, time.monotonic() + LISTENS_WITHIN_S
        while (address := listening_since(self.run_dir, before)) is None:
            await asyncio.wait([head.ended], timeout=0.05)
            if head.ended.done():
                raise RunFailed(head.obituary())
            if time.monotonic() > deadline:
                said = head.last_line() or "nothing in its log"
                raise RunFailed(
                    f"the coordinator did not come up within {LISTENS_WITHIN_S:.0f} s: {said} "
                    f"(log: {relative(head.log)})"
                )
        return reachable(address)  # the trainer learns from it under which address others see it

    # Crashes

    async def _keep(self, daemon: Daemon) -> Daemon:
        """Starts a daemon again under its name whenever it crashes. Returns the last one, at its
        end."""
        crashes, steps = CrashCounter(RESTARTS), _record_of_steps(self.run_dir)
        while True:
            await self._wait_unless_over(daemon.ended)
            if self._over.is_set() or not (
                self._may_try_again(daemon) or await self._is_missed(daemon)
            ):
                return daemon
            before, steps = steps, _record_of_steps(self.run_dir)
            if steps != before:
                crashes.progressed()
            if (pause_s := crashes.crashed()) is None:
                return daemon
            self._tell(f"{daemon.obituary()}; starting it again")
            await self._wait_unless_over(timeout_s=pause_s)
            while (
                not self._over.is_set()
                and daemon.role != "coordinator"
                and not accepts(self.address)
            ):
                await self._wait_unless_over(timeout_s=LOOK_S)  # whoever keeps the head sees to it
            if self._over.is_set():
                return daemon
            fresh = await self._start_again(daemon)
            if fresh is None:
                return daemon
            daemon = fresh

    def _may_try_again(self, daemon: Daemon) -> bool:
        if daemon.role == "coordinator":
            return daemon.has_crashed and self.config.journal.enabled
        return daemon.has_crashed or (daemon.has_failed and self._head_is_away())

    async def _is_missed(self, daemon: Daemon) -> bool:
        """A trainer was sent away in order, but the run is not over: nothing is trained without
        one."""
        if daemon.role != "trainer" or daemon.has_failed or self._head.ended.done():
            return False
        snapshot = await self._snapshot()
        going_on = {RunState.STARTING, RunState.RUNNING, RunState.EVALUATING}
        return snapshot is not None and snapshot.state in going_on

    async def _snapshot(self) -> Snapshot | None:
        """None if the coordinator does not answer, or ends before it does: as it does after its
        trainer has left, and nobody waits out its silence."""
        asking = asyncio.create_task(ask(self.address, self.key), name="ask")
        try:
            await asyncio.wait({asking, self._head.ended}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        except LightRLError:
            return None
        finally:
            asking.cancel()

    def _head_is_away(self) -> bool:
        """Then what another daemon gives as its reason may be just that."""
        head = self._head
        if head.ended.done():
            return head.has_crashed
        return time.monotonic() - self._revived_at < AWAY_S

    async def _wait_unless_over(
        self, ended: "asyncio.Task[Any] | None" = None, timeout_s: float | None = None
    ) -> None:
        over = asyncio.create_task(self._over.wait())
        try:
            waited: set[asyncio.Task[Any]] = {over} if ended is None else {over, ended}
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()

    # Ends

    async def _bury(self, daemon: Daemon) -> None:
        """A daemon has failed for good. Raises RunFailed if the run cannot go on without it."""
        if daemon.role != "rollout" or not await self._others_roll_out():
            await self._give_up(daemon)
        self.lost.append(daemon.obituary())

    async def _others_roll_out(self) -> bool:
        """Whether a rollout node is left, here or elsewhere."""
        if any(d.role == "rollout" and d.name not in self._ended for d in self.daemons.values()):
            return True
        snapshot = await self._snapshot()
        return snapshot is not None and any(
            "rollout" in n.roles and n.state != "gone" and n.name not in self.daemons
            for n in snapshot.nodes
        )

    async def _give_up(self, daemon: Daemon) -> None:
        """Raises RunFailed with the first cause, unless the run is over or ending well at this
        moment.

        A coordinator that ends because its trainer failed, and the other way round, end within
        moments of each other: the one that is not the coordinator knows the reason.
        """
        head, daemons = self._head, self.daemons.values()
        await asyncio.wait(
            [d.ended for d in daemons if d.role != "rollout"], timeout=FOLLOWS_WITHIN_S
        )
        if head.ended.done() and (
            self._was_stopped() or (daemon.role == "rollout" and not head.has_failed)
        ):
            return
        trainers = [d for d in daemons if d.role == "trainer" and d.gave_a_reason]
        cause = trainers[0] if daemon is head and trainers else daemon
        was_revived = cause.role != "coordinator" or self.config.journal.enabled
        often = (
            f", {RESTARTS.max_restarts + 1} times without a step done"
            if cause.has_crashed and was_revived
            else ""
        )
        raise RunFailed(cause.obituary() + often)

    def _was_stopped(self) -> bool:
        last = final_snapshot(self.run_dir)
        return last is not None and last.state == RunState.STOPPED

    async def _ask_to_drain(self, head: Daemon, reason: str) -> None:
        if self.address:
            with contextlib.suppress(PeerUnreachable, TimeoutError):
                async with asyncio.timeout(DRAIN_ASKED_S):
                    await drain(self.address, "*", reason, self.key)
                return
        head.signal(signal.SIGTERM)

    async def _wait_all(self, timeout_s: float) -> None:
        alive = [d.ended for d in self.daemons.values() if not d.ended.done()]
        if alive:
            await asyncio.wait(alive, timeout=timeout_s)


def in_foreground(config: Config, daemon: Callable[[Path], int], resume: bool = False) -> int:
    """Runs a coordinator's `daemon` in this process; returns its exit status.

    As with LocalRun, a new run that never began leaves nothing behind and `latest` alone.
    """
    run_dir = config.run_dir.resolve() if resume else create_run_dir(config)
    over = threading.Event()
    before = left_at(run_dir)
    threading.Thread(
        target=_announce, args=(config, run_dir, before, over), name="announce", daemon=True
    ).start()
    try:
        return daemon(run_dir)
    except (LightRLError, KeyboardInterrupt):
        if not resume and listening(run_dir) is None and final_snapshot(run_dir) is None:
            remove_run_dir(run_dir)
        raise
    finally:
        over.set()


def _announce(config: Config, run_dir: Path, before: float | None, over: threading.Event) -> None:
    """Says so and moves `latest` once the coordinator listens, which comes after reading its
    input."""
    while (address := listening_since(run_dir, before)) is None:
        if over.wait(LOOK_S):
            return
    for line in join_lines(reachable(address), config.run.bind, run_dir):
        logger.info(line)
    # looked at before the start; the run is worth more than the link
    with contextlib.suppress(ConfigError):
        point_latest(run_dir)


def join_lines(address: str, bind: str, run_dir: Path) -> list[str]:
    """How a node elsewhere takes part, or why none can. `bind`: the run.bind of the run."""
    why = why_here_only(address, bind)
    where = "from this machine" if why else "from elsewhere"
    line = f"join it {where}: {join_command(address, relative(run_dir / JOIN_FILE))}"
    return [line, *filter(None, [why])]


def _record_of_steps(run_dir: Path) -> int:
    """Grows with every step that is done, one that was done before a resume, too."""
    try:
        return (run_dir / sinks.FILE_NAME).stat().st_size
    except FileNotFoundError:
        return 0
