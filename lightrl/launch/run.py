"""`lightrl up CONFIG` and `lightrl resume RUN`: a whole run on this machine, watched until it is
over.

Ties processes, signals and view together; what each of them does is decided elsewhere.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from lightrl.client.address import relative
from lightrl.client.find_run import final_snapshot
from lightrl.config.schema import Config
from lightrl.core.state import RunState
from lightrl.errors import ConfigError
from lightrl.launch.checks import Finding, Setup, judge
from lightrl.launch.daemons import RunFailed
from lightrl.launch.initial import begins_with
from lightrl.launch.local import LocalRun, join_lines
from lightrl.launch.report import print_progress, repeated_warnings, result_lines, stop_reason
from lightrl.launch.resume import has_journal
from lightrl.log import LogSettings, configure_file
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.output import never_fail, print_lines
from lightrl.system.signals import stop_signals
from lightrl.system.threads import in_thread

logger = logging.getLogger(__name__)


async def run_here(config: Config, tui: bool, resume: bool = False) -> int:
    """The exit status: 0 only if the run finished. Raises LightRLError, one line, if it failed.

    With `resume`, which launch/resume.py has prepared, the run in the directory goes on.
    """
    never_fail()
    if config.eval.checkpoint:
        raise ConfigError("eval.checkpoint: is for lightrl eval CHECKPOINT CONFIG; leave it out")
    setup = Setup(config, starts=True, is_resumed=resume)
    notes = [finding.text for finding in await judged(setup, print_lines) if finding.is_note]
    assert setup.config is not None
    config = setup.config
    configure_log(config)
    for note in notes:
        print_lines(note)
    if not resume and (lines := list(begins_with(config))):
        print_lines("; ".join([f"begins with {lines[0]}", *lines[1:]]))
    later: list[str] = []  # lines that would tear the screen
    local = LocalRun(config, resume, later.append if tui else print_lines, setup.gpus)
    try:
        interrupted = await to_its_end(local, _live(local, tui), print_lines)
    finally:
        for line in (*later, *repeated_warnings(local.run_dir)):
            print_lines(line)
    for line in local.lost:
        print_lines(f"failed during the run: {line}")
    return _conclude(local.run_dir, interrupted)


async def to_its_end(
    local: LocalRun, live: Coroutine[Any, Any, None], tell: Callable[[str], None]
) -> bool:
    """Has `live` start the daemons and wait for their end, or for a signal; then ends those that
    are left. Whether it was interrupted. Raises RunFailed."""
    stopped = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    living = asyncio.create_task(live, name="run")
    stopping = asyncio.create_task(stopped.wait(), name="signal")
    reason = "the run is over"
    try:
        await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not living.done():
            reason = "interrupted"
            await cancel(living)  # gives the terminal back first
            tell("stopping ...")
        else:
            living.result()
    except RunFailed as e:
        logger.error("%s", e)
        reason = "the run failed"
        raise
    finally:
        await cancel(living, stopping)
        await local.stop(reason)
    return reason == "interrupted"


async def judged(setup: Setup, tell: Callable[[str], None]) -> list[Finding]:
    """The findings before a start. Raises LightRLError, one line, if it is refused."""
    return await retry_on_resource_limit(
        lambda: in_thread(lambda: list(judge(setup, "up"))), "the checks before the start", tell
    )


def configure_log(config: Config) -> None:
    """What a person sees here stays plain; the log tells machines which daemons were started."""
    level, as_json = config.logging.level, config.logging.json_
    file = config.run_dir.resolve() / "logs" / "launcher.log"
    configure_file(LogSettings("launcher", socket.gethostname(), level, as_json), file)


async def _live(local: LocalRun, tui: bool) -> None:
    """Starts the daemons and shows the run until it is over."""
    print_lines(f"run {local.config.run.name} in {local.run_dir}")
    await local.start()
    for line in await local.what_was_found():
        print_lines(line)
    for line in join_lines(local.address, local.config.run.bind, local.run_dir):
        print_lines(line)
    watching = asyncio.create_task(_watch(local, tui), name="view")
    try:
        await local.until_over()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # the view shows the end by itself, if it saw it
                await watching
    finally:
        await cancel(watching)


async def _watch(local: LocalRun, tui: bool) -> None:
    """The screen until q, plain lines after that or without a screen."""
    if tui:
        from lightrl.tui.app import watch_live

        if await watch_live(local.address, local.key, stay=False):
            return
        print_lines("the run goes on; ctrl-C stops it")
    await print_progress(local.address, local.key, print_lines)


def _conclude(run_dir: Path, interrupted: bool) -> int:
    last = final_snapshot(run_dir)
    if last is not None and last.state != RunState.FINISHED:
        where = f"{last.state} at step {last.step} of {last.num_steps} ({stop_reason(run_dir)})"
        print_lines(f"{where}; the run is in {run_dir}{_how_to_go_on(run_dir)}")
        return 1
    if last is None and interrupted:
        there = run_dir.exists()
        print_lines(
            f"interrupted; the run is in {run_dir}{_how_to_go_on(run_dir)}"
            if there
            else "interrupted"
        )
        return 1
    print_lines("\n".join(result_lines(run_dir)))
    return 0


def _how_to_go_on(run_dir: Path) -> str:
    return f"; continue it with: lightrl resume {relative(run_dir)}" if has_journal(run_dir) else ""


async def cancel(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
