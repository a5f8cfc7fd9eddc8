"""Runs on a real Slurm cluster: array tasks preempted and requeued, the coordinator requeued, all
cancelled.

Each ends with the digests of a run that nobody has disturbed.
"""

import getpass
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightrl.metrics import sinks
from tests.slurm.cluster import Cluster, a_cluster, missing

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "slurm"
STEPS = 10
SMALL = (
    "rollout.engine=emulated",
    "train.engine=emulated",
    "rollout.group_size=2",
    "rollout.slots=4",
    "train.prompts_per_step=4",
    "train.optim.lr=1e-3",
    f"train.steps={STEPS}",
    "run.deterministic=true",
    "eval.path=",
    "checkpoint.interval=4",
    "node.grace_s=10",
)
SLOW = "rollout.engine_args={t0_ms=10.0, mean_length=40.0}"  # a step takes about a second
FAST = "rollout.engine_args={t0_ms=0.0, mean_length=40.0}"
DEADLINE_S = 150.0
GRACE_S = 30
Story = Callable[[Cluster, Path, dict[str, Any]], None]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with a_cluster(GRACE_S) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the same run on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = ("up", str(QUICKSTART), "run.name=calm", *SMALL, FAST, "rollout.nodes=1", "--no-tui")
    lightrl(folder, *command)
    return summary(folder / "runs" / "calm")


def lightrl(cwd: Path, *arguments: str, cluster: Cluster | None = None) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "lightrl.cli", *arguments),
        cwd=cwd,
        env=cluster.environment if cluster is not None else None,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


class Submitted:
    """A run that `lightrl slurm` has submitted: one job for the coordinator, two rollout tasks."""

    def __init__(self, cluster: Cluster, tmp_path: Path, *overrides: str) -> None:
        self.cluster = cluster
        self.run_dir = tmp_path / "runs" / "one"
        options = ("--nodes", "2", "--partition-reserved", "reserved", "--partition-spot", "spot")
        # Three jobs on two cores: each node of the cluster takes one task.
        options += ("--spot-args", "--exclusive")
        what = (str(QUICKSTART), "run.name=one", *SMALL, SLOW, *overrides)
        said = lightrl(tmp_path, "slurm", *what, *options, cluster=cluster).splitlines()
        self.head, nodes = (line.split()[1].rstrip(":") for line in said[:2])
        self.tasks = [f"{nodes}_1", f"{nodes}_2"]

    def steps(self) -> int:
        """Optimizer steps done."""
        try:
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step, f"step {step}")

    def until(self, holds: Any, what: str) -> None:
        try:
            self.cluster.until(holds, what, DEADLINE_S)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.said()}") from None

    def until_finished(self) -> dict[str, Any]:
        for job in (self.head, *self.tasks):
            self.until(lambda job=job: self.cluster.state(job) == "COMPLETED", f"{job} completed")
            assert self.cluster.job(job)["ExitCode"] == "0:0", self.said()
        assert summary(self.run_dir)["state"] == "finished", self.said()
        return summary(self.run_dir)

    def restarts(self, job: str) -> int:
        return int(self.cluster.job(job)["Restarts"])

    def runs(self, job: str) -> bool:
        return self.cluster.state(job) == "RUNNING"

    def said(self) -> str:
        files = sorted((self.run_dir / "slurm").glob("*.out"))
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files
        )


@pytest.fixture(scope="module")
def stories(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: dict[str, Any]
) -> Iterator[dict[Story, "Future[None]"]]:
    """On a cluster each, side by side: Slurm's clocks are most of it."""

    def tell(story: Story, folder: Path) -> None:
        with a_cluster(GRACE_S) as running:
            story(running, folder, undisturbed)

    with ThreadPoolExecutor(len(STORIES)) as pool:
        yield {story: pool.submit(tell, story, tmp_path_factory.mktemp("t")) for story in STORIES}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("weights_digest", "responses_digest"))


def preempted(cluster: Cluster, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    run = Submitted(cluster, tmp_path)
    run.until_step(2)
    began = time.monotonic()
    urgent = cluster.submit(
        "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=tmp_path
    )
    run.until(lambda: cluster.state(urgent) == "COMPLETED", "the urgent job has run")
    took = time.monotonic() - began
    assert all(run.restarts(task) == 1 for task in run.tasks), run.said()
    before = run.steps()
    assert before < STEPS - 2, "preempted too late to show anything"
    run.until(lambda: all(run.runs(task) for task in run.tasks), "both tasks are back")
    assert same(run.until_finished(), undisturbed), run.said()
    # The tasks did not sit out their grace time: the node was free once their tokens were sent.
    assert took < 25, run.said()
    said = run.said()
    assert said.count("SIGUSR1: this job has to leave") == 2, said
    assert said.count("back to the queue") == 2, said
    assert "Traceback" not in said


def requeued(cluster: Cluster, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    run = Submitted(cluster, tmp_path)
    run.until_step(3)
    cluster.run("scontrol", "requeue", run.head)
    run.until(lambda: run.restarts(run.head) == 1 and run.runs(run.head), "the coordinator is back")
    assert same(run.until_finished(), undisturbed), run.said()
    assert "Traceback" not in run.said()


def by_hand(cluster: Cluster, tmp_path: Path, _: dict[str, Any]) -> None:
    real = "train.engine=torch"  # a rank of a Slurm job that computes
    what = (str(QUICKSTART), "run.name=one", *SMALL, FAST, real, "rollout.nodes=0")
    python = f"--export=ALL,LIGHTRL={Path(sys.executable).with_name('lightrl')}"
    head = cluster.submit(python, str(SCRIPTS / "reserved.sbatch"), *what, cwd=tmp_path)
    run_dir = tmp_path / "runs" / "one"
    cluster.until((run_dir / "address").exists, "the coordinator listens", DEADLINE_S)
    elsewhere = tmp_path / "copied"
    shutil.copy2(run_dir / "join", elsewhere)
    address = (run_dir / "address").read_text().strip()
    where = ("--partition=spot", "--array=1-2", str(SCRIPTS / "preemptible.sbatch"))
    nodes = cluster.submit(python, *where, address, str(elsewhere), cwd=tmp_path)
    for job in (head, f"{nodes}_1", f"{nodes}_2"):
        cluster.until(
            lambda job=job: cluster.state(job) == "COMPLETED", f"{job} completed", DEADLINE_S
        )
    assert summary(run_dir)["state"] == "finished"


STORIES = (preempted, requeued, by_hand)


def test_preempted_tasks_come_back_and_the_run_is_what_it_would_have_been(stories):
    stories[preempted].result()


def test_a_requeued_coordinator_goes_on_with_its_run(stories):
    stories[requeued].result()


def test_the_scripts_by_hand_with_an_address_and_a_key(stories):
    stories[by_hand].result()


@pytest.mark.slow
def test_before_its_time_limit_the_coordinator_returns_to_the_queue(cluster, tmp_path, undisturbed):
    run = Submitted(cluster, tmp_path)
    run.until_step(3)
    cluster.run("scancel", "--batch", "--signal=USR1", run.head)  # as --signal=B:USR1@180 does
    run.until(lambda: run.restarts(run.head) == 1 and run.runs(run.head), "the coordinator is back")
    assert same(run.until_finished(), undisturbed), run.said()


@pytest.mark.slow
def test_a_coordinator_that_is_killed_goes_on_in_the_same_job(cluster, tmp_path, undisturbed):
    run = Submitted(cluster, tmp_path)
    run.until_step(3)
    [head] = [n for n in status(run)["nodes"] if "coordinator" in n["roles"]]
    subprocess.run(("kill", "-9", str(head["pid"])), check=True)
    assert same(run.until_finished(), undisturbed), run.said()
    assert run.restarts(run.head) == 0
    assert "killed by SIGKILL; the run continues" in run.said()


@pytest.mark.slow
def test_shared_devices_beside_a_spot_node_give_the_bits_of_own_ones(
    cluster, tmp_path, undisturbed
):
    """The trainer's job is requeued on the way, with the engines that use its devices."""
    run = Submitted(cluster, tmp_path, "rollout.placement=shared", "rollout.nodes=2")
    run.until_step(2)
    mine = [f"head-{run.head}-rollout-{k}" for k in range(2)]
    names = {n["name"] for n in status(run)["nodes"]}
    assert {*mine, f"head-{run.head}"} < names
    cluster.run("scontrol", "requeue", run.head)
    run.until(lambda: run.restarts(run.head) == 1 and run.runs(run.head), "the trainer is back")
    assert same(run.until_finished(), undisturbed), run.said()
    assert "Traceback" not in run.said()
    switches = [row.get("offload/switches", 0) for row in sinks.read(run.run_dir)]
    assert max(switches) == 2 * len(mine)
    for name in mine:
        log = (run.run_dir / "logs" / f"{name}.log").read_text()
        assert log.count("engine started on") == 2


def status(run: Submitted) -> dict[str, Any]:
    return json.loads(lightrl(run.run_dir.parent, "status", str(run.run_dir), "--json"))


@pytest.mark.slow
def test_cancelled_jobs_stay_cancelled(cluster, tmp_path):
    run = Submitted(cluster, tmp_path)
    run.until_step(2)
    cluster.run("scancel", "--user", getpass.getuser())
    run.until(lambda: not cluster.run("squeue", "--noheader"), "all jobs have ended")
    assert {cluster.state(job) for job in (run.head, *run.tasks)} == {"CANCELLED"}, run.said()
    assert summary(run.run_dir)["state"] == "stopped"
    assert not (run.run_dir / "slurm" / "returns").exists()
