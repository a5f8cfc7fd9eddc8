"""This job as Slurm sees it: its notice to leave, Slurm's decision about it, and its return to the
queue.

Owns what is peculiar to Slurm; the daemon that runs in the job is started in job.py.

What Slurm does, as tried with 22.05. When the GraceTime of a partition begins, it sends SIGTERM to
the *steps* of a job alone; its batch shell gets nothing or, if the cluster sets
preempt_send_user_signal, only what --signal=B: names. When that time is over, all get SIGTERM, and
KillWait later SIGKILL. So a small step listens in this process's place. SIGTERM to an srun ends its
step: the daemon is no step. And a job that ends within the grace time has completed: it comes back
only if it returns to the queue by itself.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from functools import partial

from lightrl.system.process import stop_signals
from lightrl.system.threads import in_thread

logger = logging.getLogger(__name__)

ASKS = 5  # Slurm ends all processes of a job, its own commands as well
# States of a job that is not over; SIGNALING: Slurm signals its steps, RESIZING: it loses nodes.
RUNS = {"RUNNING", "SIGNALING", "RESIZING"}
SLURM_S = 20.0  # for an answer of Slurm's commands
# A step on this node gets the signal that this process lacks, and passes it on to process $0.
# Each process of the step gets the signal: cat may end before the shell. Ends with its stdin.
SENTINEL = "trap 'kill -USR1 $0; kill $!; exit' TERM; exec 3<&0; cat <&3 & wait $! || kill -USR1 $0"
STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gres=none", "--quiet")


@contextlib.contextmanager
def noticing() -> Iterator[asyncio.Event]:
    """An event that is set when this job has to leave, however Slurm announces it."""
    leaving = asyncio.Event()

    def on_signal(name: str) -> None:
        if not leaving.is_set():
            logger.info("%s: this job has to leave", name)
        leaving.set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, on_signal, number.name)
    sentinel = None
    if job_id():
        where = [f"--nodelist={node}"] if (node := os.environ.get("SLURMD_NODENAME")) else []
        command = ("srun", *STEP, *where, "sh", "-c", SENTINEL, str(os.getpid()))
        try:
            sentinel = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError as e:
            logger.warning("srun: %s: this job learns of a preemption when its time is over", e)
    try:
        yield leaving
    finally:
        if sentinel is not None and sentinel.stdin is not None:
            sentinel.stdin.close()


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
    """The exit status of a job that has to leave. One that was cancelled stays cancelled."""
    if await decision() == "runs":
        code, text = await _ask_slurm("scontrol", "requeue", job_id())
        if code == 0:
            logger.info("back to the queue")
        else:
            logger.error("cannot return to the queue: %s", text)
    return 0


async def decision() -> str:
    """Slurm's: "runs" (nothing yet), "returns" (it is requeued already) or "leaves"."""
    if not job_id():
        return "leaves"
    code, text = await _ask_slurm("scontrol", "show", "job", "--oneliner", job_id())
    if code != 0:
        logger.warning("scontrol: %s", text)
        return "leaves"
    facts = dict(part.split("=", 1) for part in text.split() if "=" in part)
    return decided(facts, int(os.environ.get("SLURM_RESTART_COUNT") or 0))


def decided(facts: dict[str, str], num_restarts: int) -> str:
    """As `decision`, from the output of `scontrol show job`. `num_restarts`: at this start of the
    job."""
    if facts.get("Requeue") != "1":
        return "leaves"
    if int(facts.get("Restarts", 0)) > num_restarts:
        return "returns"
    return "runs" if facts.get("JobState") in RUNS else "leaves"


async def _ask_slurm(*command: str) -> tuple[int, str]:
    """Exit status and output."""
    run = partial(
        subprocess.run, command, capture_output=True, text=True, timeout=SLURM_S, check=False
    )
    code, text = -1, ""
    for _ in range(ASKS):
        try:
            done = await in_thread(run)
        except (OSError, subprocess.TimeoutExpired) as e:
            return 127, str(e)
        code, text = done.returncode, (done.stdout + done.stderr).strip()
        if code >= 0:  # else it was killed
            break
    return code, text
