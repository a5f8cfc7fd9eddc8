"""scripts/slurm/scale on a real cluster: more tasks, fewer, none; only those of its run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, a_cluster, missing

SCALE = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "scale"
SPOT = SCALE.with_name("preemptible.sbatch")

pytestmark = pytest.mark.timeout(240)


def scale(
    *arguments: str | Path, cwd: Path, env: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, str(SCALE), *map(str, arguments))
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def scaled(cluster: Cluster, *arguments: str | Path, cwd: Path) -> str:
    done = scale(*arguments, cwd=cwd, env=cluster.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tasks(cluster: Cluster, name: str) -> dict[str, str]:
    """Those of jobs with this name: task -> state."""
    lines = cluster.run("squeue", "--noheader", "--array", f"--name={name}", "--format=%i %T")
    return dict(line.split() for line in lines.splitlines() if not line.endswith("COMPLETING"))


def batch_script(run_dir: Path, name: str) -> Path:
    """As `lightrl slurm` writes one, but that its tasks only wait."""
    file = run_dir / "slurm" / "preemptible.sbatch"
    file.parent.mkdir(parents=True)
    options = (f"--job-name={name}", "--partition=spot", "--exclusive", "--output=/dev/null")
    lines = ("#!/bin/bash", *(f"#SBATCH {option}" for option in options), "exec sleep 600", "")
    file.write_text("\n".join(lines))
    return file


@pytest.mark.e2e
@pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
def test_tasks_are_submitted_and_cancelled_until_there_are_as_many_as_wanted(tmp_path: Path):
    run_dir, other = tmp_path / "runs" / "one", tmp_path / "runs" / "other"
    batch_script(run_dir, "one")
    with a_cluster(5) as cluster:
        cluster.submit("--array=1-1", str(batch_script(other, "other")), cwd=tmp_path)
        cluster.until(lambda: "RUNNING" in tasks(cluster, "other").values(), "the other one runs")

        # up: one node is left, the rest waits
        assert "4 more" in scaled(cluster, "runs/one", "4", cwd=tmp_path)
        cluster.until(lambda: "RUNNING" in tasks(cluster, "one").values(), "a task runs")
        before = tasks(cluster, "one")
        assert len(before) == 4
        [running] = [name for name, state in before.items() if state == "RUNNING"]
        # what is there counts
        assert scaled(cluster, "runs/one", "4", cwd=tmp_path) == "4 rollout tasks; 0 cancelled"
        assert "job" in scaled(cluster, run_dir, "5", cwd=tmp_path)
        assert len(tasks(cluster, "one")) == 5

        # down: who waits goes first
        assert scaled(cluster, "runs/one", "2", cwd=tmp_path) == "5 rollout tasks; 3 cancelled"
        cluster.until(lambda: len(tasks(cluster, "one")) == 2, "three are cancelled")
        assert tasks(cluster, "one")[running] == "RUNNING"

        # none, and none again
        scaled(cluster, "runs/one", "0", cwd=tmp_path)
        cluster.until(lambda: not tasks(cluster, "one"), "all are cancelled")
        assert scaled(cluster, "runs/one", "0", cwd=tmp_path) == "0 rollout tasks; 0 cancelled"
        assert list(tasks(cluster, "other").values()) == ["RUNNING"]


@pytest.mark.e2e
@pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here")
def test_a_run_whose_tasks_were_submitted_by_hand(tmp_path: Path):
    """Without a script of its own, by the one of the repository; options go to sbatch."""
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").touch()
    with a_cluster(5) as cluster:
        held = ("--partition=spot", "--hold", "--output=/dev/null")
        cluster.submit("--array=1-2", *held, str(SPOT), "runs/one", cwd=tmp_path)
        cluster.submit("--array=1-2", *held, str(SPOT), "runs/other", cwd=tmp_path)
        assert "2 rollout tasks; job" in scaled(cluster, *held, "runs/one", "3", cwd=tmp_path)
        assert len(tasks(cluster, "rollout")) == 5
        assert scaled(cluster, run_dir, "0", cwd=tmp_path) == "3 rollout tasks; 3 cancelled"
        assert len(tasks(cluster, "rollout")) == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "usage: scripts/slurm/scale [SBATCH OPTIONS] RUN_DIR N"),
        (("runs/one",), "usage: scripts/slurm/scale [SBATCH OPTIONS] RUN_DIR N"),
        (("runs/one", "-1"), "usage: scripts/slurm/scale [SBATCH OPTIONS] RUN_DIR N"),
        (("runs/none", "1"), "scale: runs/none: is no run directory"),
        (("runs/one", "1"), "scale: there is no squeue here"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], line: str):
    (tmp_path / "runs" / "one" / "slurm").mkdir(parents=True)
    done = scale(*arguments, cwd=tmp_path, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == f"{line}\n"
