"""Inside a Slurm job: run the daemon, an ordinary `lightrl up` or `lightrl resume`, and restart it
when it crashes, until the run is over or the job has to leave.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from lightrl.client.address import accepts, listening
from lightrl.client.find_run import ask, final_snapshot
from lightrl.config.run_file import CONFIG_FILE, load_config
from lightrl.config.schema import Config
from lightrl.core.state import RunState
from lightrl.errors import ConfigError, LightRLError, PeerUnreachable
from lightrl.keys import JOIN_FILE, KEY_FILE, read_key
from lightrl.launch.folder import SLURM_CONFIG, SLURM_FOLDER, remove_run_dir
from lightrl.launch.resume import has_journal
from lightrl.launch.slurm.allocation import (
    decision,
    job_id,
    noticing,
    return_to_queue,
    task_number,
)
from lightrl.launch.slurm.sharing import SharingNodes, sharing
from lightrl.log import LogSettings, configure, configure_again
from lightrl.log import environment as log_environment
from lightrl.metrics import sinks
from lightrl.system.addresses import ALL_HOSTS, host_and_port, is_loopback, own_host
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.system.threads import in_thread

logger = logging.getLogger(__name__)

POLL_S = 1.0  # of files that another machine writes
WAIT_S = 3600.0  # of a node for its run
ENDS_S = 120.0  # of a run that stops: it writes a checkpoint
MARKS_S = 10.0  # from the end of a run to the mark that it returns
# Crashes of a daemon in a row, each soon after its start.
RESTARTS = RestartPolicy(max_restarts=5, settled_s=120.0)


async def run_part(
    part: str, what: Sequence[str], slots: int = 0, preemptible: bool = False
) -> int:
    """Run one job of scripts/slurm, "head", "node" or "trainer", and return its exit status."""
    configure(LogSettings(node=_name_of(part)))
    if part == "head":
        return await run_head(what)
    if part == "trainer" and len(what) == 1:
        key = _directory(what[0]) or Path(what[0])
        return await run_node(what[0], key / KEY_FILE, ["--role", "trainer"], is_trainer=True)
    if part != "node" or not 1 <= len(what) <= 2:
        raise ConfigError(
            "slurm-job: head CONFIG [section.key=value ...], node RUN_DIR|ADDRESS [KEY_FILE], or "
            "trainer RUN_DIR"
        )
    options = ["--slots", str(slots)] if slots else []
    options += ["--preemptible"] if preemptible else []
    return await run_node(what[0], Path(what[1]) if len(what) == 2 else None, options)


async def run_head(arguments: Sequence[str]) -> int:
    """Run coordinator and trainer, and the rollout nodes that share the trainer's devices, by a
    config file and overrides; return the exit status."""
    files = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if len(files) != 1:
        raise ConfigError(f"one CONFIG is needed, not {len(files)}")
    config = load_config(Path(files[0]), overrides)
    configure_again(config.logging.level, config.logging.json_)
    run_dir = config.run_dir.resolve()
    mark = _mark(run_dir)
    crashes, clock = CrashCounter(RESTARTS), asyncio.get_running_loop().time
    with noticing() as leaving:
        while True:
            if _is_finished(run_dir, config.train.steps):
                mark.unlink(missing_ok=True)
                logger.info("%s: this run is finished", run_dir)
                return 0
            began = clock()
            command = _head_command(config, files[0], overrides)
            is_resumed = has_journal(run_dir)
            now = load_config(run_dir / CONFIG_FILE) if is_resumed else config
            beside = await sharing(now, run_dir, _name_of("head"), 0)
            clearing = asyncio.create_task(_clear(mark, run_dir))
            code = await _daemon(command, _announce_return(leaving, mark), beside=beside)
            clearing.cancel()
            if leaving.is_set() and not _is_finished(run_dir, config.train.steps):
                return await return_to_queue()
            if code >= 0:
                return code
            if not has_journal(run_dir) or crashes.crashed(clock() - began) is None:
                return 1
            name = signal.Signals(-code).name
            logger.warning("the coordinator was killed by %s; the run continues", name)


async def run_node(
    target: str, key_file: Path | None, options: Sequence[str], is_trainer: bool = False
) -> int:
    """Run a rollout node, or a trainer node and the nodes that share its devices, of the run in the
    directory `target` or at that address, with `options` of `lightrl up`; return the exit
    status."""
    run_dir = _directory(target)
    if run_dir is not None and key_file is None:
        key_file = run_dir / JOIN_FILE
    _log_as_run(run_dir)
    crashes, clock = CrashCounter(RESTARTS), asyncio.get_running_loop().time
    with noticing() as leaving:
        while True:
            began = clock()
            address = await _find_run(target, run_dir, leaving)
            if address is None:
                break
            _log_as_run(run_dir)
            beside = None
            if is_trainer and run_dir is not None:
                config = load_config(run_dir / CONFIG_FILE)
                number = task_number() % config.train.nodes  # the first job is number 0
                beside = await sharing(config, run_dir, _name_of("node"), number, address)
            code = await _daemon(
                _join_command(address, key_file, options),
                leaving.wait(),
                _moves_away(run_dir, address),
                beside=beside,
            )
            if leaving.is_set():
                break
            if code == 0 and (run_dir is None or await _is_dismissed(run_dir, address, leaving)):
                return 0
            if code != 0 and crashes.crashed(clock() - began) is None:
                return 1
    if run_dir is not None and _is_over(run_dir):
        logger.info("%s: this run is over", target)
        return 0
    return await return_to_queue()


def _log_as_run(run_dir: Path | None) -> None:
    """Log by the run's config, if there is one; `lightrl slurm` writes it before the run."""
    files = [run_dir / CONFIG_FILE, run_dir / SLURM_FOLDER / SLURM_CONFIG] if run_dir else []
    for file in files:
        with contextlib.suppress(ConfigError):
            logging_section = load_config(file).logging
            configure_again(logging_section.level, logging_section.json_)
            return


def _head_command(config: Config, file: str, overrides: Sequence[str]) -> list[str]:
    """Return the command that starts the run, or resumes that of an earlier job."""
    run_dir = config.run_dir.resolve()
    host, port = host_and_port(config.run.bind)
    bind = config.run.bind
    if is_loopback(host) or host in ALL_HOSTS:
        # other machines read the address in the run directory
        bind = f"tcp://{own_host()}:{port or '*'}"
    options = [f"run.bind={bind}", "--role", "coordinator,trainer", "--name", _name_of("head")]
    if has_journal(run_dir):
        return ["resume", str(run_dir), *options]
    if os.environ.get("SLURM_RESTART_COUNT") and not (run_dir / sinks.FILE_NAME).exists():
        remove_run_dir(run_dir)  # the job was killed before its first step
    return ["up", file, *overrides, *options]


def _join_command(address: str, key_file: Path | None, options: Sequence[str]) -> list[str]:
    key = ["--key", str(key_file)] if key_file is not None else []
    return ["up", "--join", address, *key, *options, "--name", _name_of("node")]


def _name_of(part: str) -> str:
    """Return the name of this job's node."""
    prefix = "head" if part == "head" else socket.gethostname().split(".")[0][:32]
    return f"{prefix}-{job_id() or os.getpid()}"


async def _daemon(
    command: Sequence[str],
    *reasons: Coroutine[Any, Any, Any],
    beside: SharingNodes | None = None,
) -> int:
    """Run `lightrl COMMAND`, stop it when one of the reasons returns, and return its exit status.
    `beside`: nodes that share its devices and leave with it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "lightrl.cli", *command),
        env={**os.environ, **log_environment("launcher")},
    )
    ended = asyncio.create_task(process.wait())
    waiting = [asyncio.create_task(reason) for reason in reasons]
    if beside is not None:
        beside.start()
    try:
        await asyncio.wait({ended, *waiting}, return_when=asyncio.FIRST_COMPLETED)
        for reason in waiting:
            if reason.done():
                reason.result()
        if not ended.done():
            process.terminate()
            if beside is not None:
                beside.leave()
        return await ended
    finally:
        for task in waiting:
            task.cancel()
        if process.returncode is None:
            process.kill()
        if beside is not None:
            await beside.end(is_heard=(process.returncode or 0) >= 0)


async def _announce_return(leaving: asyncio.Event, mark: Path) -> None:
    """Return when this job has to leave, and mark for other jobs that the run returns."""
    await leaving.wait()
    if await decision() != "leaves":
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()  # noqa: ASYNC240, one small file


async def _clear(mark: Path, run_dir: Path) -> None:
    """Remove the mark once the run listens again. Without it other jobs assume that it is over."""
    while listening(run_dir) is None or final_snapshot(run_dir) is not None:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    mark.unlink(missing_ok=True)  # noqa: ASYNC240, one small file


async def _find_run(target: str, run_dir: Path | None, leaving: asyncio.Event) -> str | None:
    """Return the address of the run; None if it is over, or this job has to leave."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not leaving.is_set() and not (run_dir is not None and _is_over(run_dir)):
        address = listening(run_dir) if run_dir is not None else target
        if address is not None and await _answers(address):
            return address
        await asyncio.sleep(POLL_S)
        if asyncio.get_running_loop().time() > deadline:
            raise PeerUnreachable(f"{target}: no run listens there for {WAIT_S / 60:.0f} minutes")
    return None


async def _is_dismissed(run_dir: Path, address: str, leaving: asyncio.Event) -> bool:
    """Return whether the run is over, or continues without a node that it has dismissed. Slurm may
    stop the coordinator before the mark is written."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + ENDS_S
    while clock() < deadline and not leaving.is_set() and not _mark(run_dir).exists():
        last = final_snapshot(run_dir)
        if last is None:
            with contextlib.suppress(LightRLError):
                if (await ask(address, read_key(run_dir / KEY_FILE))).state != RunState.FINISHING:
                    return True
        elif last.state == RunState.FINISHED:
            return True
        else:
            deadline = min(deadline, clock() + MARKS_S)
        await asyncio.sleep(POLL_S)
    return _is_over(run_dir)


async def _moves_away(run_dir: Path | None, address: str) -> None:
    """Return when the coordinator listens on another machine."""
    while True:
        await asyncio.sleep(POLL_S)
        now = listening(run_dir) if run_dir is not None else None
        if now not in {None, address} and await _answers(str(now)):
            logger.info("the run has moved to %s", now)
            return


async def _answers(address: str) -> bool:
    """Return False without a thread to ask in."""
    try:
        return await in_thread(accepts, address)
    except OSError:
        return False


def _directory(target: str) -> Path | None:
    """Return None for an address."""
    return None if target.startswith("tcp://") else Path(target).resolve()


def _is_finished(run_dir: Path, steps: int) -> bool:
    last = final_snapshot(run_dir)
    return last is not None and last.state == RunState.FINISHED and last.step >= steps


def _is_over(run_dir: Path) -> bool:
    return final_snapshot(run_dir) is not None and not _mark(run_dir).exists()


def _mark(run_dir: Path) -> Path:
    """Return the file that marks a coordinator which Slurm has stopped and will restart."""
    return run_dir / SLURM_FOLDER / "returns"
