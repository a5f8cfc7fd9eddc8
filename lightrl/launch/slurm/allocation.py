"""This job as Slurm sees it: that it is told to leave, what is decided about it, and its return to
the queue.

Owns what is peculiar to Slurm; knows nothing of the daemon that runs in the job.

What Slurm does, as tried with 22.05. When the GraceTime of a partition begins, it sends SIGTERM to
the *steps* of a job alone; its batch shell gets nothing or, if the cluster says
preempt_send_user_signal, only what --signal=B: names. When that time is over, all get SIGTERM, and
KillWait later SIGKILL. So a small step listens in this process's place. SIGTERM to an srun ends its
step at once: the daemon is no step. And a job that ends within the grace time has completed: it
comes back only if it returns to the queue by itself.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable

from lightrl.system.process import stop_signals

logger = logging.getLogger(__name__)

ASKS = 5  # Slurm ends all processes of a job, those that ask about it as well
# States of a job that is not over. It is signaling for the moment in which Slurm tells its steps of
# a preemption, which is just when it asks; resizing while nodes are taken from it.
RUNS = {"RUNNING", "SIGNALING", "RESIZING"}
SLURM_S = 20.0  # for an answer of Slurm's commands
LATE = "this job will notice a preemption only when its grace time is over"

# Says when it listens; tells process $0 that Slurm has begun to end the job. Ends with its stdin.
# The signal goes to each process of the step: cat may be gone before the shell has heard of it.
SENTINEL = """
trap 'kill -USR1 $0; kill $!; exit 0' TERM
echo
exec 3<&0
cat <&3 >/dev/null &
wait $! || kill -USR1 $0
"""


@contextlib.asynccontextmanager
async def noticing() -> AsyncIterator[asyncio.Event]:
    """An event that is set when this job is told to leave, by whatever way."""
    told = asyncio.Event()

    def tell(name: str) -> None:
        if not told.is_set():
            logger.info("%s: this job is told to leave", name)
        told.set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, tell, number.name)
    sentinel = await _sentinel() if job_id() else None
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
        logger.warning("srun not found: %s", LATE)
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
        logger.warning("srun ended with %s: %s", code, LATE)


def job_id() -> str:
    """The id of this job; of an array only this task. Empty outside Slurm.

    SLURM_JOB_ID would not do: for the last task of an array that is the id of the whole array.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def task_number() -> int:
    """Of this job within its array; 1 if there is none."""
    return int(os.environ.get("SLURM_ARRAY_TASK_ID") or 1)


async def return_to_queue() -> int:
    """The exit status of a job that was told to leave. One that was cancelled stays cancelled."""
    if await decision() == "runs":
        code, said = await _ask_slurm("scontrol", "requeue", job_id())
        if code == 0:
            logger.info("back to the queue")
        else:
            logger.error("cannot return to the queue: %s", said)
    return 0


async def decision() -> str:
    """What Slurm has decided: "runs" (nothing yet), "returns" (it is requeued already) or
    "leaves"."""
    if not job_id():
        return "leaves"
    error, facts = await _facts()
    if error:
        logger.warning("scontrol: %s", error)
    return decided(facts, int(os.environ.get("SLURM_RESTART_COUNT") or 0))


def decided(facts: dict[str, str], num_restarts: int) -> str:
    """As `decision`, by what `scontrol show job` says of a job in its life after so many
    restarts."""
    if facts.get("Requeue") != "1":
        return "leaves"
    if int(facts.get("Restarts", 0)) > num_restarts:
        return "returns"
    return "runs" if facts.get("JobState") in RUNS else "leaves"


async def _facts() -> tuple[str, dict[str, str]]:
    """What Slurm knows of this job: Restarts, JobState, PreemptTime, ...; or why it does not
    answer."""
    code, text = await _ask_slurm("scontrol", "show", "job", "--oneliner", job_id())
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
