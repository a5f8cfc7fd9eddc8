"""A real Slurm cluster on this machine: munged, slurmctld and one slurmd for each node, all in one
folder.

Partitions: `reserved` (node r0), `spot` (s0 and s1, preempted by requeue after a grace time) and
`urgent` on the nodes of spot. Ends everything that it has started by its process id.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "scancel",
    "sinfo",
)
NODES = ("r0", "s0", "s1")
# of a node, as Slurm sees it: jobs here are small, and Slurm's own limits are not what is tested
CPUS = 8
DEADLINE_S = 60.0
_given: set[int] = set()
LOOK_S = 0.2

CONF = """
ClusterName=lightrl
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for cred_expire; less than 5 is refused.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
KillWait=10
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{extra}
{nodes}
PartitionName=reserved Nodes=r0 Default=YES PriorityTier=10 PreemptMode=off
PartitionName=spot Nodes=s0,s1 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=urgent Nodes=s0,s1 PriorityTier=10 PreemptMode=off
"""


def missing() -> str:
    """What keeps Slurm from running here; empty if nothing does."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [p for p in PROGRAMS if shutil.which(p, path=path) is None]
    return (
        f"no {', '.join(absent)} here (scripts/setup dev installs them as root)" if absent else ""
    )


class Cluster:
    """Commands to a running cluster. `environment` is for processes that talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path) -> str:
        """The id of the job."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd)

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job or one task of an array: JobState, Restarts, ExitCode,
        NodeList, ..."""
        text = self.run("scontrol", "show", "job", "--oneliner", job)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def until(self, holds: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Slurm tells nobody when something happens: looks again and again."""
        deadline = time.monotonic() + deadline_s
        while not holds():
            assert time.monotonic() < deadline, (
                f"{what}: not within {deadline_s:.0f} s\n{self.run('squeue')}"
            )
            time.sleep(LOOK_S)

    def cancel_all(self) -> None:
        self.run("scancel", "--user", getpass.getuser())
        self.until(lambda: not self.run("squeue", "--noheader"), "all jobs have ended")


@contextlib.contextmanager
def a_cluster(grace_s: int = 20, extra: str = "") -> Iterator[Cluster]:
    """A running cluster; `extra` are more lines of slurm.conf."""
    # sockets need a short path
    folder = Path(tempfile.mkdtemp(prefix="lightrl-slurm-", dir="/tmp"))
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(folder, grace_s, extra)
        daemons.append(_munged(cluster))
        cluster.until((folder / "munge" / "socket").exists, "munged listens")
        daemons.append(_start(cluster, "slurmctld", "-D", "-c"))
        daemons += [_start(cluster, "slurmd", "-D", "-N", node) for node in NODES]
        cluster.until(lambda: _idle(cluster) == len(NODES), "all nodes are idle")
        yield cluster
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.cancel_all()
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, grace_s: int, extra: str) -> None:
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(len(NODES) + 1)
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    text = CONF.format(
        host=host,
        user=getpass.getuser(),
        folder=folder,
        port=ports[0],
        nodes="\n".join(nodes),
        grace_s=grace_s,
        extra=extra,
    )
    (folder / "slurm.conf").write_text(text)


def _munged(cluster: Cluster) -> "subprocess.Popen[bytes]":
    here = cluster.folder / "munge"
    files = [
        f"--{name}={here / name.partition('-')[0]}" for name in ("socket", "key-file", "pid-file")
    ]
    return _start(
        cluster, "munged", "--foreground", "--force", *files, f"--seed-file={here / 'seed'}"
    )


def _start(cluster: Cluster, *command: str) -> "subprocess.Popen[bytes]":
    with (cluster.folder / f"{'-'.join(command[:1] + command[3:4])}.out".replace("/", "_")).open(
        "wb"
    ) as out:
        return subprocess.Popen(command, env=cluster.environment, stdout=out, stderr=out)


def _idle(cluster: Cluster) -> int:
    """slurmctld may not answer yet."""
    done = subprocess.run(
        ("sinfo", "--noheader", "--Node", "--format=%N %T"),
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return len({line for line in done.stdout.splitlines() if line.endswith(" idle")})


def _free_ports(count: int) -> list[int]:
    """None that another cluster of this process was given: it may not listen there yet."""
    while _given & set(ports := _look_for_ports(count)):
        pass
    _given.update(ports)
    return ports


def _look_for_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
