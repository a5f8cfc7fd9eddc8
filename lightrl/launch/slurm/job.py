"""Inside a Slurm job: runs the daemon, hears that the node is wanted back, returns the job to the
queue.

Owns what is peculiar to Slurm: how a job learns of its preemption and how it comes back. The daemon
below is an ordinary `lightrl up` or `lightrl resume`.

What Slurm does, as tried with 22.05. When the GraceTime of a partition begins, it sends SIGTERM to
the *steps* of a job alone; its batch shell gets nothing or, if the cluster says
preempt_send_user_signal, only what --signal=B: names. When that time is over, all get SIGTERM, and
KillWait later SIGKILL. So a small step listens in this process's place. SIGTERM to an srun ends its
step at once: the daemon is no step. And a job that ends within the grace time has completed: it
comes back only if it returns to the queue by itself.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from lightrl.client.address import accepts, listening, parse, reachable
from lightrl.client.find_run import ask, final_snapshot
from lightrl.config import Config
from lightrl.core.state import RunState
from lightrl.errors import ConfigError, LightRLError, PeerUnreachable
from lightrl.keys import JOIN_FILE, KEY_FILE, read_key
from lightrl.launch.folder import SLURM_FOLDER, remove_run_dir
from lightrl.launch.resume import has_journal
from lightrl.run_file import load_config
from lightrl.say import never_fail, say
from lightrl.system.signals import stop_signals
from lightrl.system.threads import in_thread

LOOK_S = 1.0  # between two looks at files that another machine writes
WAIT_S = 3600.0  # a node without a run gives its machine back after so long
ENDS_S = 120.0  # a run that stops has ended by then: it writes a checkpoint
MARKS_S = 10.0  # after its end it is known whether it returns
MAX_CRASHES = 5  # of a daemon, in a row
LASTED_S = 120.0  # what ran so long begins a new row
SLURM_S = 20.0  # for an answer of Slurm's commands
ASKS = 5  # Slurm ends all processes of a job, those that ask about it as well
RETURNS = "returns"  # a file that is there while the coordinator, stopped by Slurm, is to come back
HERE_ONLY = {"127.0.0.1", "localhost", "0.0.0.0", "*"}  # no address for other machines

# Says when it listens; tells process $0 that Slurm has begun to end the job. Ends with its stdin.
# The signal goes to each process of the step: cat may be gone before the shell has heard of it.
SENTINEL = """
trap 'kill -USR1 $0; kill $!; exit 0' TERM
echo
exec 3<&0
cat <&3 >/dev/null &
wait $! || kill -USR1 $0
"""


async def run_part(part: str, what: Sequence[str], slots: int = 0) -> int:
    """One job of a run, as scripts/slurm have it: "head" or "node"; the exit status."""
    never_fail()
    if part == "head":
        return await run_head(what)
    if part != "node" or not 1 <= len(what) <= 2:
        raise ConfigError(
            "slurm-job: head CONFIG [section.key=value ...], or node RUN_DIR|ADDRESS [KEY_FILE]"
        )
    return await run_node(what[0], Path(what[1]) if len(what) == 2 else None, slots)


async def run_head(arguments: Sequence[str]) -> int:
    """Coordinator and trainer of the run that a config file and overrides describe; the exit
    status."""
    files = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if len(files) != 1:
        raise ConfigError(f"one CONFIG is needed, not {len(files)}")
    config = load_config(Path(files[0]), overrides)
    run_dir = config.run_dir.resolve()
    mark = run_dir / SLURM_FOLDER / RETURNS
    row = CrashCounter()
    async with _noticing() as told:
        while True:
            if _is_finished(run_dir, config.train.steps):
                mark.unlink(missing_ok=True)
                _say(f"{run_dir}: this run is finished")
                return 0
            row.begin()
            command = _head_command(config, files[0], overrides)
            clearing = asyncio.create_task(_clear(mark, run_dir))
            code = await _daemon(command, _announce_return(told, mark))
            clearing.cancel()
            if told.is_set() and not _is_finished(run_dir, config.train.steps):
                return await _return_to_queue()
            if code >= 0:
                return code
            if not has_journal(run_dir) or row.is_too_long():
                return 1
            _say(f"the coordinator was killed by {signal.Signals(-code).name}; the run goes on")


async def run_node(target: str, key_file: Path | None, slots: int) -> int:
    """A rollout node of the run in the directory `target`, or at that address; the exit status."""
    run_dir = _directory(target)
    if run_dir is not None and key_file is None:
        key_file = run_dir / JOIN_FILE
    row = CrashCounter()
    async with _noticing() as told:
        while True:
            address = await _find_run(target, run_dir, told)
            if address is None:
                break
            row.begin()
            code = await _daemon(
                _join_command(address, key_file, slots), told.wait(), _moves_away(run_dir, address)
            )
            if told.is_set():
                break
            if code == 0 and (run_dir is None or await _is_dismissed(run_dir, address, told)):
                return 0
            if code != 0 and row.is_too_long():
                return 1
    if run_dir is not None and _is_over(run_dir):
        _say(f"{target}: this run is over")
        return 0
    return await _return_to_queue()


class CrashCounter:
    """How often in a row a daemon has ended soon after it was started."""

    def __init__(self) -> None:
        self._length = 0
        self._began = float("-inf")

    def begin(self) -> None:
        now = asyncio.get_running_loop().time()
        self._length = self._length + 1 if now - self._began < LASTED_S else 1
        self._began = now

    def is_too_long(self) -> bool:
        return self._length > MAX_CRASHES


def _head_command(config: Config, file: str, overrides: Sequence[str]) -> list[str]:
    """To begin the run, or to go on with it if a job was here before."""
    run_dir = config.run_dir.resolve()
    host, port = parse(config.run.bind)
    bind = config.run.bind
    if host in HERE_ONLY:  # others find this address in the run directory and must reach it
        bind = f"{reachable(f'tcp://0.0.0.0:{port}').rpartition(':')[0]}:{port or '*'}"
    options = [f"run.bind={bind}", "--role", "coordinator,trainer", "--name", _node_name("head")]
    if has_journal(run_dir):
        return ["resume", str(run_dir), *options]
    if os.environ.get("SLURM_RESTART_COUNT") and not (run_dir / "metrics.jsonl").exists():
        remove_run_dir(run_dir)  # the job was killed before there was anything to lose
    return ["up", file, *overrides, *options]


def _join_command(address: str, key_file: Path | None, slots: int) -> list[str]:
    options = ["--key", str(key_file)] if key_file is not None else []
    options += ["--slots", str(slots)] if slots else []
    return [
        "up",
        "--join",
        address,
        *options,
        "--name",
        _node_name(socket.gethostname().split(".")[0][:32]),
    ]


def _node_name(prefix: str) -> str:
    return f"{prefix}-{_job() or os.getpid()}"


async def _daemon(command: Sequence[str], *reasons: Coroutine[Any, Any, Any]) -> int:
    """The exit status of `lightrl COMMAND`, which is asked to leave when one of the reasons is
    there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "lightrl.cli", *command
    )
    ended = asyncio.create_task(process.wait())
    waiting = [asyncio.create_task(reason) for reason in reasons]
    try:
        await asyncio.wait({ended, *waiting}, return_when=asyncio.FIRST_COMPLETED)
        for reason in waiting:
            if reason.done():
                reason.result()
        if not ended.done():
            process.terminate()
        return await ended
    finally:
        for task in waiting:
            task.cancel()
        if process.returncode is None:
            process.kill()


async def _announce_return(told: asyncio.Event, mark: Path) -> None:
    """Returns when this job is told to leave. Nodes must know before the run stops whether it goes
    on."""
    await told.wait()
    if await _fate() != "leaves":
        _leave_mark(mark)


async def _clear(mark: Path, run_dir: Path) -> None:
    """Takes the mark away once the run is there again; earlier, nodes would take it for over."""
    while True:
        if listening(run_dir) is not None and final_snapshot(run_dir) is None:
            mark.unlink(missing_ok=True)  # noqa: ASYNC240, one small file
            return
        await asyncio.sleep(LOOK_S)


async def _find_run(target: str, run_dir: Path | None, told: asyncio.Event) -> str | None:
    """Where the run listens. None: it is over, or this job has been told to leave."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not told.is_set() and not (run_dir is not None and _is_over(run_dir)):
        address = listening(run_dir) if run_dir is not None else target
        if address is not None and await _answers(address):
            return address
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await told.wait()
        if asyncio.get_running_loop().time() > deadline:
            raise PeerUnreachable(f"{target}: no run listens there for {WAIT_S / 60:.0f} minutes")
    return None


async def _is_dismissed(run_dir: Path, address: str, told: asyncio.Event) -> bool:
    """Whether a node that was sent away is not needed again: the run is over, or goes on without
    it.

    Slurm stops coordinator and trainer directly, too, so that nodes may be sent away before the
    mark says that both return.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + ENDS_S
    while clock() < deadline and not told.is_set() and not _returns(run_dir):
        last = final_snapshot(run_dir)
        if last is None:
            with contextlib.suppress(LightRLError):
                if (await ask(address, read_key(run_dir / KEY_FILE))).state != RunState.FINISHING:
                    return True
        elif last.state == RunState.FINISHED:
            return True
        else:
            deadline = min(deadline, clock() + MARKS_S)
        await asyncio.sleep(LOOK_S)
    return _is_over(run_dir)


async def _moves_away(run_dir: Path | None, address: str) -> None:
    """Returns when the run goes on elsewhere: its coordinator was requeued and got another
    machine."""
    while True:
        await asyncio.sleep(LOOK_S)
        now = listening(run_dir) if run_dir is not None else None
        if now not in {None, address} and await _answers(str(now)):
            _say(f"the run has moved to {now}")
            return


async def _answers(address: str) -> bool:
    """Without a thread to ask in, nobody does: it is asked again soon."""
    try:
        return await in_thread(accepts, address)
    except OSError:
        return False


def _directory(target: str) -> Path | None:
    """None for an address."""
    return None if target.startswith("tcp://") else Path(target).resolve()


def _leave_mark(mark: Path) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _is_finished(run_dir: Path, steps: int) -> bool:
    last = final_snapshot(run_dir)
    return last is not None and last.state == RunState.FINISHED and last.step >= steps


def _is_over(run_dir: Path) -> bool:
    return final_snapshot(run_dir) is not None and not _returns(run_dir)


def _returns(run_dir: Path) -> bool:
    return (run_dir / SLURM_FOLDER / RETURNS).exists()


@contextlib.asynccontextmanager
async def _noticing() -> AsyncIterator[asyncio.Event]:
    """An event that is set when this job is told to leave, by whatever way."""
    told = asyncio.Event()

    def tell(name: str) -> None:
        if not told.is_set():
            _say(f"{name}: this job is told to leave")
        told.set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, tell, number.name)
    sentinel = await _sentinel() if _job() else None
    if sentinel is None:
        yield told
        return
    watching = asyncio.create_task(_watch(sentinel, told, tell))
    try:
        yield told
    finally:
        watching.cancel()
        assert sentinel.stdin is not None
        sentinel.stdin.close()


async def _sentinel() -> asyncio.subprocess.Process | None:
    """A step on this node that gets the signal which this process does not get."""
    node = os.environ.get("SLURMD_NODENAME", "")
    options = [
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--gres=none",
        "--quiet",
    ]
    options += [f"--nodelist={node}"] if node else []
    nothing = asyncio.subprocess.DEVNULL
    try:
        return await asyncio.create_subprocess_exec(
            *("srun", *options, "sh", "-c", SENTINEL, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,  # closes when this process ends, however it does
            stdout=asyncio.subprocess.PIPE,
            stderr=nothing,
        )
    except FileNotFoundError:
        _say("srun not found: this job will notice a preemption only when its grace time is over")
        return None


async def _watch(
    sentinel: asyncio.subprocess.Process, told: asyncio.Event, tell: Callable[[str], None]
) -> None:
    assert sentinel.stdout is not None
    for moment in (sentinel.stdout.readline(), sentinel.wait()):  # it listens, and it has ended
        await moment
        _, facts = await _facts()
        if facts.get("PreemptTime", "None") != "None":
            tell("preempted")  # while the step still started
    code = sentinel.returncode
    if not told.is_set():
        _say(
            f"srun ended with {code}: this job will notice a preemption only when its grace "
            "time is over"
        )


def _job() -> str:
    """The id of this job; of an array only this task. Empty outside Slurm.

    SLURM_JOB_ID would not do: for the last task of an array that is the id of the whole array.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


async def _return_to_queue() -> int:
    """The exit status of a job that was told to leave. One that was cancelled stays cancelled."""
    if await _fate() == "runs":
        code, said = await _ask_slurm("scontrol", "requeue", _job())
        _say("back to the queue" if code == 0 else f"cannot return to the queue: {said}")
    return 0


async def _fate() -> str:
    """What Slurm has decided: "runs" (nothing yet), "returns" (it is requeued already) or
    "leaves"."""
    if not _job():
        return "leaves"
    error, facts = await _facts()
    if error:
        _say(f"scontrol: {error}")
    if facts.get("Requeue") != "1":
        return "leaves"
    if int(facts.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return "returns"
    return "runs" if facts.get("JobState") == "RUNNING" else "leaves"


async def _facts() -> tuple[str, dict[str, str]]:
    """What Slurm knows of this job: Restarts, JobState, PreemptTime, ...; or why it does not
    answer."""
    code, text = await _ask_slurm("scontrol", "show", "job", "--oneliner", _job())
    if code != 0:
        return text or f"exit status {code}", {}
    return "", dict(part.split("=", 1) for part in text.split() if "=" in part)


async def _ask_slurm(*command: str) -> tuple[int, str]:
    """Exit status and what was said."""
    for _ in range(ASKS - 1):
        code, said = await _ask_slurm_once(*command)
        if code >= 0:
            return code, said
    return await _ask_slurm_once(*command)


async def _ask_slurm_once(*command: str) -> tuple[int, str]:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        return 127, f"there is no {command[0]} here"
    try:
        async with asyncio.timeout(SLURM_S):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return 124, f"no answer within {SLURM_S:.0f} s"
    return process.returncode or 0, said.decode(errors="replace").strip()


def _say(line: str) -> None:
    say(f"slurm: {line}")
