"""How a job gets notice that Slurm takes its node back, for each setup of Slurm."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import a_cluster, missing

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "preemptible.sbatch"
# seconds of grace, and more lines of slurm.conf
SETUPS = {
    "only steps are told": (60, ""),
    "the batch shell is told": (60, "SlurmctldParameters=preempt_send_user_signal"),
    "no grace time": (0, ""),
}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Future[None]"]]:
    """On a cluster each, side by side: Slurm's clocks are most of it."""
    with ThreadPoolExecutor(len(SETUPS)) as pool:
        yield {
            name: pool.submit(a_task_is_sent_away_and_returns, tmp_path_factory.mktemp("t"), *setup)
            for name, setup in SETUPS.items()
        }


@pytest.mark.parametrize("setup", SETUPS)
def test_a_waiting_task_gives_its_node_back_at_once_and_returns(stories, setup):
    stories[setup].result()


def a_task_is_sent_away_and_returns(folder: Path, grace_s: int, extra: str) -> None:
    with a_cluster(grace_s, extra) as cluster:
        lightrl = f"--export=ALL,LIGHTRL={Path(sys.executable).with_name('lightrl')}"
        where = (
            lightrl,
            "--partition=spot",
            "--nodelist=s0",
            "--exclusive",
            "--array=7",
            f"--output={folder}/out",
        )
        array = cluster.submit(*where, str(SCRIPT), str(folder / "no run yet"), cwd=folder)
        task = f"{array}_7"
        cluster.until(
            lambda: f"{task}.0 " in cluster.run("squeue", "--steps"), "the sentinel listens"
        )
        urgent = ("--partition=urgent", "--nodelist=s0", "--exclusive", "--wrap=true")
        job = cluster.submit(*urgent, cwd=folder)
        cluster.until(lambda: cluster.state(job) == "COMPLETED", "the urgent job has run", 30.0)
        cluster.until(lambda: cluster.state(task) == "RUNNING", "the task is back")
        assert cluster.job(task)["Restarts"] == "1"
