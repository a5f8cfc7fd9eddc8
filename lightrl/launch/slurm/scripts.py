"""`lightrl slurm`: the batch scripts of a run on a Slurm cluster, also those of scripts/slurm/,
written and submitted."""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrl.client.address import relative
from lightrl.config.run_file import to_toml
from lightrl.config.schema import Config
from lightrl.devices.plan import engines_of
from lightrl.devices.sizes import sized_engines
from lightrl.errors import ConfigError, LightRLError
from lightrl.launch.checks.files import require_files, require_new
from lightrl.launch.checks.initial import settled
from lightrl.launch.folder import SLURM_CONFIG, SLURM_FOLDER
from lightrl.launch.resume import has_journal

SBATCH_S = 60.0

ABOUT_RESERVED = """\
# The coordinator and the trainer of a run, on one node that is not taken away every hour.
#
#   sbatch scripts/slurm/reserved.sbatch run.toml [section.key=value ...]
#
# Submitted again, or requeued by Slurm, the run continues where it was. USR1 comes so many seconds
# before the time limit: time for a checkpoint, after which the job returns to the queue.
# With rollout.placement = "shared" the run's rollout.nodes are processes of this job, too: they use
# the trainer's devices in turn with it. With rollout.parallel so are its engines of all sizes, on
# GPUs that no rank has.
"""
ABOUT_TRAINERS = """\
# The other trainer nodes of a run, train.nodes - 1 in all: each task of the array is one.
#
#   sbatch --array=1-3 scripts/slurm/trainers.sbatch RUN_DIR
#
# RUN_DIR, with its key, must be on a file system that all nodes see, and so must checkpoint.dir.
# One that leaves costs the run the steps since the newest checkpoint; it waits until all are there.
# With rollout.placement = "shared" rollout.nodes are divided among the first job and these, by the
# number of the task.
"""
ABOUT_SPOT = """\
# Rollout nodes that may be taken away at any moment: each task of the array is one.
#
#   sbatch --array=1-32 scripts/slurm/preemptible.sbatch RUN_DIR
#   sbatch --array=1-32 scripts/slurm/preemptible.sbatch tcp://HOST:PORT KEY_FILE
#
# RUN_DIR must be on a file system that all nodes see; KEY_FILE is a copy of RUN_DIR/join. Each uses
# devices of its own, with rollout.placement = "shared", too.
# A task waits for the run, works for it, leaves when Slurm wants the node back and returns to the
# queue. It ends with 0 when the run is over.
"""


@dataclass(frozen=True)
class SlurmOptions:
    """The user's options for the cluster; empty: Slurm's default."""

    nodes: int = 1
    partition_reserved: str = ""
    partition_spot: str = ""
    time: str = ""
    reserved_args: str = ""
    spot_args: str = ""


@dataclass(frozen=True)
class Script:
    """A batch script: the one that runs a `part` of `lightrl slurm-job`. `signal_s`: before the
    time limit of the job."""

    file: str
    name: str
    part: str
    signal_s: int
    about: str

    def text(
        self, arguments: Sequence[str] = (), options: Sequence[str] = (), lightrl: str = "lightrl"
    ) -> str:
        """`options` are lines for sbatch, "--time=1:00:00"."""
        lines = (
            *(f"--job-name={self.name}", "--nodes=1", "--ntasks=1", "--requeue"),
            *("--open-mode=append", f"--signal=B:USR1@{self.signal_s}", *options),
        )
        settings = "\n".join(f"#SBATCH {line}" for line in lines)
        words = " ".join(shlex.quote(a) for a in (*self.part.split(), *arguments))
        # exec: Slurm signals the batch shell alone, so it must be the process that handles them
        command = f'exec "${{LIGHTRL:-{lightrl}}}" slurm-job {words} "$@"'
        return f"#!/bin/bash\n{settings}\n\n{self.about}\n{command}\n"


RESERVED = Script("reserved.sbatch", "lightrl", "head", 180, ABOUT_RESERVED)
TRAINERS = Script("trainers.sbatch", "trainer", "trainer", 180, ABOUT_TRAINERS)
SPOT = Script("preemptible.sbatch", "rollout", "node --preemptible", 60, ABOUT_SPOT)
SCRIPTS = (RESERVED, TRAINERS, SPOT)


def submit(config: Config, options: SlurmOptions, dry_run: bool = False) -> list[str]:
    """Writes the scripts into the run directory and submits them; returns what was done, in lines.

    The config is fixed now: later edits of the user's file change nothing. Raises LightRLError.
    """
    require_files(config)
    run_dir = config.run_dir.resolve()
    if not has_journal(run_dir):
        settled(config)  # of a run to begin from, its newest checkpoint is found in the job
        require_new(config)
    folder = run_dir / SLURM_FOLDER
    jobs, notes = _jobs(config, options, folder), list(_notes(config))
    if dry_run:
        kinds = [f"array of {job.tasks}" if job.tasks else "job" for job in jobs]
        parts = zip(kinds, jobs, strict=True)
        lines = [f"{kind}: {job.what} ({relative(job.script)})" for kind, job in parts]
        texts = [line for job in jobs for line in (f"== {relative(job.script)}", job.text)]
        return [*lines, *notes, *texts]
    anchored = config.run.model_copy(update={"dir": str(run_dir.parent)})  # wherever a job starts
    files = {job.script: job.text for job in jobs}
    files[folder / SLURM_CONFIG] = to_toml(config.model_copy(update={"run": anchored}))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{e.filename}: cannot be written: {e.strerror}") from None
    done: list[str] = []
    first = ""
    for job in jobs:
        array = [f"--array=1-{job.tasks}", f"--dependency=after:{first}"] if job.tasks else []
        number = _sbatch(*array, str(job.script))
        once = f", once job {first} has begun" if array else ""
        done.append(f"job {number}: {job.what}{once} ({relative(job.script)})")
        first = first or number
    return [
        *done,
        *notes,
        f"their output is in {relative(folder)}; lightrl top {relative(run_dir)} shows the run",
    ]


@dataclass(frozen=True)
class _Job:
    """A job of Slurm: without `tasks` the first one, else an array that starts after it."""

    script: Path
    text: str
    what: str
    tasks: int = 0


def _jobs(config: Config, options: SlurmOptions, folder: Path) -> list[_Job]:
    """Return the jobs in the order of their submission."""
    run_dir, nodes, spot = str(folder.parent), config.train.nodes, options.nodes
    lightrl = str(Path(sys.executable).with_name("lightrl"))

    def job(script: Script, argument: str, what: str, tasks: int = 0) -> _Job:
        is_spot = script is SPOT
        partition = options.partition_spot if is_spot else options.partition_reserved
        given = (("--partition", partition), ("--time", options.time))
        lines = [f"{key}={value}" for key, value in given if value]
        lines += [f"--output={folder}/%x-{'%A_%a' if tasks else '%j'}.out"]
        lines += shlex.split(options.spot_args if is_spot else options.reserved_args)
        return _Job(folder / script.file, script.text([argument], lines, lightrl), what, tasks)

    head = f"coordinator and trainer{_beside(config, [0], 'its')}"
    jobs = [job(RESERVED, str(folder / SLURM_CONFIG), head)]
    if nodes > 1:
        what = f"{nodes - 1} more trainer nodes{_beside(config, range(1, nodes), 'their')}"
        jobs.append(job(TRAINERS, run_dir, what, nodes - 1))
    if spot:
        own = " with devices of their own" if config.rollout.placement == "shared" else ""
        jobs.append(job(SPOT, run_dir, f"{spot} rollout nodes{own}", spot))
    return jobs


def _beside(config: Config, trainers: Sequence[int], whose: str) -> str:
    """Return a text with the engines that use the devices of these trainer nodes in turn, or the
    engines of several sizes on the first; "" = none."""
    if sizes := config.rollout.parallel:
        spans = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} GPUs"
        num = len(sized_engines(config))
        return f", with {num} rollout nodes, engines of {spans} in turn" if 0 in trainers else ""
    if config.rollout.placement != "shared":
        return ""
    engines = sum(engines_of(config, number) for number in trainers)
    what = "1 rollout node" if engines == 1 else f"{engines or 'no'} rollout nodes"
    return f", with {what} in turn on {whose} devices"


def _notes(config: Config) -> Iterator[str]:
    """Yield a note if trainer nodes with shared devices have different numbers of engines."""
    engines, nodes = config.rollout.nodes, config.train.nodes
    each, more = divmod(engines, nodes)
    if config.rollout.placement == "shared" and more:
        others = f"{each} on each other one" if each else "the others only train"
        yield (
            f"note: rollout.nodes = {engines} over train.nodes = {nodes}: {each + 1} on each of "
            f"the first {more}, {others}"
        )


def _sbatch(*arguments: str) -> str:
    """The id of the submitted job. Raises LightRLError with the error of sbatch."""
    command = ("sbatch", "--parsable", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SBATCH_S)
    except FileNotFoundError:
        raise LightRLError("there is no sbatch here: run this where jobs are submitted") from None
    except subprocess.CalledProcessError as e:
        raise LightRLError(
            f"sbatch refuses: {e.stderr.strip() or f'exit status {e.returncode}'}"
        ) from None
    except subprocess.TimeoutExpired:
        raise LightRLError(f"sbatch does not answer within {SBATCH_S:.0f} s") from None
    return done.stdout.strip().partition(";")[0]  # "42;cluster" where there are several clusters
