"""One run of `lightrl up` with events: started, hit, started again where nobody else does, cleaned
up.

Starts and ends processes by their ids. plan.py chooses the events, watch.py follows the run.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_lib.machines import Machines
from chaos_lib.plan import Event
from chaos_lib.processes import Process, Processes, send
from chaos_lib.sharing_plan import SIDES
from chaos_lib.watch import Mark, Watch
from lightrl.client import ask
from lightrl.client.address import listening
from lightrl.errors import LightRLError
from lightrl.keys import JOIN_FILE, KEY_FILE, reachable, read_key

VICTIM_S = 60.0  # for the victim to be there: it may just be starting
DOWN_S = 40.0  # after `lightrl up` was killed, for its daemons to leave
MAX_STEPS = 5  # done while the phase of an event does not come: then the next one gets its turn
HOLD_S = 4.0  # a group is held up so long from when its step was trained; less than anybody waits
LOOK_S = 0.05
NOBODY = "nobody was there"
LIGHTRL = (sys.executable, "-m", "lightrl.cli")


class ChaosFailed(Exception):
    """The run failed; the text holds its output."""


@dataclass
class Felt:
    """An event that came."""

    event: Event
    # since the start
    at_s: float
    step: int
    phase: str
    mark: Mark
    # the process id, or why nothing came of it
    note: str = ""


@dataclass
class Outcome:
    wall_s: float
    summary: dict[str, Any]
    felt: list[Felt] = field(default_factory=list)
    # whose moment did not come, or who found nobody
    missed: list[Event] = field(default_factory=list)
    # processes that outlived the run
    left_over: list[Process] = field(default_factory=list)


class World:
    """Use: `await World(folder, command, say).run(plan, limit_s)`."""

    def __init__(
        self,
        folder: Path,
        command: tuple[str, ...],
        say: Callable[[str], None],
        machines: Machines | None = None,
    ) -> None:
        """`command` begins the run in `folder`/run; what it prints goes to `folder`/out.
        `machines`: its nodes are on those, which are up."""
        self._folder = folder
        self._run_dir = folder / "run"
        self._command = command
        self._say = say
        self._processes = Processes(uuid.uuid4().hex)
        self._machines = machines
        self._up: subprocess.Popen[bytes] | None = None
        self._watch = Watch(self._run_dir)
        self._began = time.monotonic()
        self._felt: list[Felt] = []
        self._asleep: set[asyncio.Task[None]] = set()  # stopped processes, until they continue
        self._held: Process | None = None  # stopped so that a group does not form yet
        self._is_changing = False  # `lightrl up` was killed and is not there again

    async def run(self, plan: list[Event], limit_s: float) -> Outcome:
        """Raises ChaosFailed if the run does not finish within `limit_s`. Leaves no process
        behind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begin(*self._command)
        watching = asyncio.create_task(self._watch.run())
        keeping = asyncio.create_task(self._keep())
        hitting = asyncio.create_task(self._hit(plan))
        left: list[Process] = []
        try:
            async with asyncio.timeout(limit_s):
                await self._until_over(hitting, watching, keeping)
            wall_s = time.monotonic() - self._began
        except TimeoutError:
            raise ChaosFailed(self._account(f"not finished after {limit_s:.0f} s")) from None
        finally:
            for task in (tasks := (hitting, watching, keeping, *self._asleep)):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            left = await asyncio.to_thread(self._clean_up)
        if self._up is None or self._up.wait() != 0 or self._state() != "finished":
            raise ChaosFailed(self._account("the run did not finish"))
        came = [f.event for f in self._felt if f.note != NOBODY]
        missed = [event for event in plan if event not in came]
        return Outcome(wall_s, self._summary(), self._felt, missed, left)

    async def _keep(self) -> None:
        if self._machines is not None:
            await self._machines.keep(self._run_dir, self._processes.environment)

    def _begin(self, *command: str) -> None:
        with (self._folder / "out").open("ab") as out:
            self._up = self._start(command, out)

    def _start(self, command: tuple[str, ...], out: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*(self._machines.here if self._machines else ()), *LIGHTRL, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=self._processes.environment,
            start_new_session=True,
        )

    async def _until_over(self, *ours: "asyncio.Task[None]") -> None:
        while self._is_changing or (self._up is not None and self._up.poll() is None):
            for task in ours:
                if task.done():
                    task.result()  # raises what went wrong here
            await asyncio.sleep(LOOK_S)

    def _clean_up(self) -> list[Process]:
        """Continue stopped processes, so that they can end; kill and return those that do not."""
        if self._up is not None and self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
        for process in self._processes.all():
            send(process.pid, signal.SIGCONT)
        return self._processes.end()

    def _account(self, what: str) -> str:
        reported = [(self._folder / "out").read_text(errors="replace").strip()]
        for log in sorted(self._run_dir.glob("logs/*.log")):
            reported += [f"-- {log.name}", *log.read_text(errors="replace").splitlines()[-8:]]
        events = [
            f"{f.at_s:.1f} s, step {f.step}, {f.phase}: {f.event} {f.note}" for f in self._felt
        ]
        return "\n".join([what, "-- events", *events, "-- lightrl up", *reported])

    # Events

    async def _hit(self, plan: list[Event]) -> None:
        for event in plan:
            act = await self._when(event)
            if act is None:
                self._say(f"{'-':>6}    step {event.step:<3} {event.phase:<10} {event}  MISSED")
                continue
            felt = self._feel(event)
            felt.note = await act()
            self._let_go()
            self._say(
                f"{felt.at_s:6.1f} s  step {felt.step:<3} {felt.phase:<10} {event}  {felt.note}"
            )

    async def _when(self, event: Event) -> Callable[[], Awaitable[str]] | None:
        """Returns at the moment at which this event is to come, what makes it come; None if that
        moment does not come."""
        watch = self._watch
        if self._machines is not None and event.phase == "patching":
            await watch.until_at(event.step, "any", event.target)
            act = await self._ready(event)
            if not await self._comes(event, self._machines.until_patching(event.target)):
                return None
            await asyncio.sleep(event.delay_s)
            return act
        if self._is_exact(event):
            if event.phase == "forming":
                moment = self._until_forming(event)
            else:
                moment = watch.until_at(event.step, event.phase, event.target)
            if not await self._comes(event, moment):
                self._let_go()
                return None
        elif not event.together:
            await self._watch.until(event.step, event.phase)
        await asyncio.sleep(event.delay_s)
        return await self._ready(event)

    def _is_exact(self, event: Event) -> bool:
        """Whether it comes in that phase or not at all."""
        return self._machines is not None or event.phase in SIDES

    async def _comes(self, event: Event, moment: Coroutine[Any, Any, None]) -> bool:
        """Whether it does before MAX_STEPS more are done."""
        last = self._watch.last
        since = max(event.step, last.step if last is not None else 0)
        waiting = asyncio.create_task(moment)
        passing = asyncio.create_task(self._watch.until(since + MAX_STEPS, "any"))
        try:
            await asyncio.wait((waiting, passing), return_when=asyncio.FIRST_COMPLETED)
            if has_come := waiting.done():
                waiting.result()  # raises what went wrong
            return has_come
        finally:
            for task in (waiting, passing):
                task.cancel()

    async def _until_forming(self, event: Event) -> None:
        """Return while a group forms and cannot finish, since an engine that must join it is
        stopped. Nobody needs that one: it is stopped when its responses are there."""
        while True:
            other = await self._watch.until_trained(event.step, event.target)
            self._held = self._processes.child(other, "engine")
            if self._held is not None:
                send(self._held.pid, signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    await self._watch.until_published()
            if self._held is not None and self._watch.phase_of(event.target) == "forming":
                return
            self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            send(self._held.pid, signal.SIGCONT)
            self._held = None

    def _feel(self, event: Event) -> Felt:
        step = self._watch.last.step if self._watch.last is not None else 0
        at_s = time.monotonic() - self._began
        phase = self._watch.phase
        if self._is_exact(event):  # that of the event may be over by now
            at = self._watch.phase_of(event.target)
            phase = event.phase if event.phase == "patching" else at
        self._felt.append(Felt(event, at_s, step, phase, self._watch.mark()))
        return self._felt[-1]

    async def _ready(self, event: Event) -> Callable[[], Awaitable[str]]:
        """Waits until the event can come; returns what makes it come."""
        verb, what = event.kind.split()[0], event.kind.split()[-1]
        if event.kind == "kill up":
            return self._kill_up
        if verb in ("join", "drain"):
            await self._watch.until_live()
            return lambda: self._join(event.target) if verb == "join" else self._drain(event.target)
        if verb == "cut":
            return lambda: self._cut(event.target, event.hold_s)
        victim = await self._victim(event.target, what)
        if victim is None:
            return _nobody
        if verb in ("pause", "freeze"):
            return lambda: self._stop(victim, event.hold_s)
        number = signal.SIGTERM if verb == "term" else signal.SIGKILL

        async def strike() -> str:
            return f"pid {victim.pid}" + (
                "" if send(victim.pid, number) else ", which has just ended"
            )

        return strike

    async def _victim(self, name: str, what: str) -> Process | None:
        """The daemon or its child of that kind; one that is being started again is waited for."""
        deadline = time.monotonic() + VICTIM_S
        while time.monotonic() < deadline:
            if what in ("engine", "rank", "reward", "worker"):
                found = self._processes.child(name, what)
            else:
                found = self._processes.daemon(name)
            if found is not None:
                return found
            await asyncio.sleep(LOOK_S)
        return None

    async def _stop(self, victim: Process, hold_s: float) -> str:
        """The process alone: its children go on without it."""
        send(victim.pid, signal.SIGSTOP)
        self._later(hold_s, lambda: send(victim.pid, signal.SIGCONT))
        return f"pid {victim.pid}"

    async def _cut(self, target: str, hold_s: float) -> str:
        assert self._machines is not None
        self._later(hold_s, self._machines.cut(target))
        return ""

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        """Also when this is over before."""

        async def wait() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                act()

        task = asyncio.create_task(wait())
        self._asleep.add(task)
        task.add_done_callback(self._asleep.discard)

    async def _join(self, name: str) -> str:
        address = reachable(listening(self._run_dir) or "")
        command = ("up", "--join", address, "--key", str(self._run_dir / JOIN_FILE), "--name", name)
        with (self._folder / f"{name}.log").open("ab") as out:
            return f"pid {self._start(command, out).pid}"

    async def _drain(self, name: str) -> str:
        address = reachable(listening(self._run_dir) or "")
        try:
            await ask.drain(address, name, "chaos", read_key(self._run_dir / KEY_FILE))
        except LightRLError as e:
            return str(e)
        return ""

    async def _kill_up(self) -> str:
        """Its daemons notice, stop the run in order and leave; then it is resumed."""
        assert self._up is not None
        self._is_changing = True
        try:
            self._up.kill()
            self._up.wait()
            own = {p.pid for p in self._processes.all() if "daemon" in p.words}
            left = await asyncio.to_thread(
                self._processes.await_gone, lambda p: p.pid in own, DOWN_S
            )
            if self._state() == "finished":
                return "the run had finished"
            self._begin("resume", str(self._run_dir), "--no-tui")
            return f"resumed as pid {self._up.pid}" + (
                f", {len(left)} daemons did not leave" if left else ""
            )
        finally:
            self._is_changing = False

    def _summary(self) -> dict[str, Any]:
        file = self._run_dir / "summary.json"
        return json.loads(file.read_bytes()) if file.exists() else {}

    def _state(self) -> str:
        """How the run has ended; "" if it has not."""
        return self._summary().get("state", "")


async def _nobody() -> str:
    return NOBODY
