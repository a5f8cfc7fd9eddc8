"""This job in Slurm: its notice to leave, Slurm's decision about it, and its return to the queue.

Slurm 22.05 sends SIGTERM to the *steps* of a job when the GraceTime of a partition begins; the
batch shell gets nothing or, with preempt_send_user_signal, the signal of --signal=B:. After that
time all get SIGTERM, and KillWait later SIGKILL. So a small step waits for the signal on behalf of
this process. SIGTERM to an srun ends its step: the daemon is no step. A job that ends within the
grace time has completed, unless it returns to the queue by itself.
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

TRIES = 5  # Slurm may kill its own commands with a job
RUNS = {"RUNNING", "SIGNALING", "RESIZING"}  # states of a job that is not over
SLURM_S = 20.0  # limit of Slurm's commands
# The step signals process $0. Each of its processes gets SIGTERM, cat perhaps before the shell. It
# ends with its stdin.
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
            logger.warning("srun: %s: this job gets no notice of a preemption", e)
    try:
        yield leaving
    finally:
        if sentinel is not None and sentinel.stdin is not None:
            sentinel.stdin.close()


def job_id() -> str:
    """Return the id of this job, or of this task of an array; "" outside Slurm. For the last task
    SLURM_JOB_ID is that of the whole array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def task_number() -> int:
    """Return the number of this job in its array; 1 if there is none."""
    return int(os.environ.get("SLURM_ARRAY_TASK_ID") or 1)


async def return_to_queue() -> int:
    """Requeue a job that has to leave, unless it was cancelled; return its exit status."""
    if await decision() == "runs":
        code, text = await _ask_slurm("scontrol", "requeue", job_id())
        if code == 0:
            logger.info("back to the queue")
        else:
            logger.error("cannot return to the queue: %s", text)
    return 0


async def decision() -> str:
    """Return "returns" if Slurm has requeued the job, "leaves" if it ends, else "runs"."""
    if not job_id():
        return "leaves"
    code, text = await _ask_slurm("scontrol", "show", "job", "--oneliner", job_id())
    if code != 0:
        logger.warning("scontrol: %s", text)
        return "leaves"
    facts = dict(part.split("=", 1) for part in text.split() if "=" in part)
    return decided(facts, int(os.environ.get("SLURM_RESTART_COUNT") or 0))


def decided(facts: dict[str, str], num_restarts: int) -> str:
    """Return the decision in the output of `scontrol show job`. `num_restarts`: at job start."""
    if facts.get("Requeue") != "1":
        return "leaves"
    if int(facts.get("Restarts", 0)) > num_restarts:
        return "returns"
    return "runs" if facts.get("JobState") in RUNS else "leaves"


async def _ask_slurm(*command: str) -> tuple[int, str]:
    """Return exit status and output."""
    run = partial(
        subprocess.run, command, capture_output=True, text=True, timeout=SLURM_S, check=False
    )
    code, text = -1, ""
    for _ in range(TRIES):
        try:
            done = await in_thread(run)
        except (OSError, subprocess.TimeoutExpired) as e:
            return 127, str(e)
        code, text = done.returncode, (done.stdout + done.stderr).strip()
        if code >= 0:  # else it was killed
            break
    return code, text
