"""How a job hears that its node is wanted back, for each way in which Slurm may be set up."""

import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import a_cluster, missing

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "preemptible.sbatch"

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")


@pytest.mark.parametrize(
    ("grace_s", "extra"),
    [(60, ""), (60, "SlurmctldParameters=preempt_send_user_signal"), (0, "")],
    ids=["only steps are told", "the batch shell is told", "no grace time"],
)
def test_a_waiting_task_gives_its_node_back_at_once_and_returns(tmp_path, grace_s, extra):
    with a_cluster(grace_s, extra) as cluster:
        lightrl = f"--export=ALL,LIGHTRL={Path(sys.executable).with_name('lightrl')}"
        where = (
            lightrl,
            "--partition=spot",
            "--nodelist=s0",
            "--exclusive",
            "--array=7",
            f"--output={tmp_path}/out",
        )
        array = cluster.submit(*where, str(SCRIPT), str(tmp_path / "no run yet"), cwd=tmp_path)
        task = f"{array}_7"
        cluster.until(
            lambda: f"{task}.0 " in cluster.run("squeue", "--steps"), "the sentinel listens"
        )
        urgent = ("--partition=urgent", "--nodelist=s0", "--exclusive", "--wrap=true")
        job = cluster.submit(*urgent, cwd=tmp_path)
        cluster.until(lambda: cluster.state(job) == "COMPLETED", "the urgent job has run", 30.0)
        cluster.until(lambda: cluster.state(task) == "RUNNING", "the task is back")
        assert cluster.job(task)["Restarts"] == "1"
