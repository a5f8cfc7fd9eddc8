"""`lightrl up CONFIG` and `lightrl resume RUN`: a whole run on this machine, watched until it is
over. Connects processes, signals and view.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from lightrl.client.address import relative
from lightrl.client.find_run import final_snapshot
from lightrl.config.schema import Config
from lightrl.core.state import RunState
from lightrl.errors import ConfigError
from lightrl.launch.checks.checklist import Finding, Launch, judge
from lightrl.launch.checks.initial import begins_with
from lightrl.launch.daemons import RunFailed
from lightrl.launch.local import LocalRun, join_lines
from lightrl.launch.report import print_progress, repeated_warnings, result_lines, stop_reason
from lightrl.launch.resume import has_journal
from lightrl.log import LogSettings, configure_file
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.output import never_fail, print_lines
from lightrl.system.process import stop_signals
from lightrl.system.threads import cancel, in_thread

logger = logging.getLogger(__name__)


async def run_here(config: Config, tui: bool, resume: bool = False) -> int:
    """Return the exit status: 0 only if the run finished. Raises LightRLError, one line, if it
    failed. `resume`: the run in the directory, which launch/resume.py has prepared, continues.
    """
    if config.eval.checkpoint:
        raise ConfigError("eval.checkpoint: is for lightrl eval CHECKPOINT CONFIG; leave it out")
    launch = Launch(config, starts=True, is_resumed=resume)
    notes = [finding.text for finding in await run_checks(launch, print_lines) if finding.is_note]
    if not resume and (lines := list(begins_with(launch.require_config()))):
        notes.append("; ".join([f"begins with {lines[0]}", *lines[1:]]))
    run_dir, interrupted = await run_to_end(launch, notes, print_lines, tui)
    return _conclude(run_dir, interrupted)


async def run_checks(launch: Launch, report: Callable[[str], None]) -> list[Finding]:
    """Return the findings before a start. Raises LightRLError, one line, for a refusal."""
    never_fail()
    return await retry_on_resource_limit(
        lambda: in_thread(lambda: list(judge(launch, "up"))), "the checks before the start", report
    )


async def run_to_end(
    launch: Launch, notes: Sequence[str], report: Callable[[str], None], tui: bool = False
) -> tuple[Path, bool]:
    """Start a run that was checked, and watch it until it is over, or until a signal. Return its
    directory, and whether it was interrupted. Raises RunFailed."""
    config = launch.require_config()
    _configure_log(config)
    for note in notes:
        report(note)
    later: list[str] = []  # lines that would tear the screen
    local = LocalRun(config, launch.is_resumed, later.append if tui else report, launch.gpus)
    try:
        interrupted = await _to_its_end(local, _live(local, tui, report), report)
    finally:
        for line in (*later, *repeated_warnings(local.run_dir)):
            report(line)
    for line in local.lost:
        report(f"failed during the run: {line}")
    return local.run_dir, interrupted


async def _to_its_end(
    local: LocalRun, live: Coroutine[Any, Any, None], report: Callable[[str], None]
) -> bool:
    """Await `live`, or a signal; then end the daemons that are left. Return whether it was
    interrupted. Raises RunFailed."""
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
            report("stopping ...")
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


def _configure_log(config: Config) -> None:
    """Log the starts of daemons to a file. The user sees plain lines instead."""
    level, as_json = config.logging.level, config.logging.json_
    file = config.run_dir.resolve() / "logs" / "launcher.log"
    configure_file(LogSettings("launcher", socket.gethostname(), level, as_json), file)


async def _live(local: LocalRun, tui: bool, report: Callable[[str], None]) -> None:
    """Start the daemons and show the run until it is over."""
    report(f"run {local.config.run.name} in {local.run_dir}")
    await local.start()
    for line in await local.resumed_line():
        report(line)
    if not local.config.eval.checkpoint:
        for line in join_lines(local.address, local.config.run.bind, local.run_dir):
            report(line)
    watching = asyncio.create_task(_watch(local, tui, report), name="view")
    try:
        await local.until_over()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # the view shows the end
                await watching
    finally:
        await cancel(watching)


async def _watch(local: LocalRun, tui: bool, report: Callable[[str], None]) -> None:
    """The screen until q, plain lines after that or without a screen."""
    if tui:
        from lightrl.tui.app import watch_live

        if await watch_live(local.address, local.key, stay=False):
            return
        report("the run continues; ctrl-C stops it")
    await print_progress(local.address, local.key, report)


def _conclude(run_dir: Path, interrupted: bool) -> int:
    last = final_snapshot(run_dir)
    where = f"; the run is in {run_dir}" if run_dir.exists() else ""
    if where and has_journal(run_dir):
        where += f"; continue it with: lightrl resume {relative(run_dir)}"
    if last is not None and last.state != RunState.FINISHED:
        reason = stop_reason(run_dir)
        print_lines(f"{last.state} at step {last.step} of {last.num_steps} ({reason}){where}")
        return 1
    if last is None and interrupted:
        print_lines(f"interrupted{where}")
        return 1
    print_lines("\n".join(result_lines(run_dir)))
    return 0
