"""The batch scripts: those in scripts/slurm are what the package writes, and bad input is one
line."""

import os
import subprocess
import sys
from pathlib import Path

from lightrl.launch.slurm.scripts import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart" / "run.toml"


def slurm(
    cwd: Path, *arguments: str, path: str | None = None
) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PATH": path} if path is not None else None
    command = (
        sys.executable,
        "-m",
        "lightrl.cli",
        "slurm",
        str(QUICKSTART),
        "run.name=one",
        *arguments,
    )
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_scripts_of_the_repository_are_those_that_the_package_writes():
    for script in SCRIPTS:
        assert (ROOT / "scripts" / "slurm" / script.file).read_text() == script.text()


def test_a_dry_run_prints_both_scripts_and_leaves_nothing(tmp_path):
    options = ("--partition-spot", "cheap", "--time", "1:00:00", "--spot-args", "--gpus=1 --mem=0")
    done = slurm(tmp_path, *options, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#SBATCH --time=1:00:00") == 2
    for line in ("--partition=cheap", "--gpus=1", "--mem=0", "--requeue", "--open-mode=append"):
        assert f"#SBATCH {line}\n" in done.stdout
    assert f"slurm-job node --preemptible {tmp_path / 'runs' / 'one'}" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_more_trainer_nodes_are_an_array_beside_the_first_job(tmp_path):
    reserved = ("--partition-reserved", "good", "--reserved-args", "--gpus=8")
    done = slurm(tmp_path, *reserved, "--trainer-nodes", "4", "checkpoint.dir=shared", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"slurm-job trainer {tmp_path / 'runs' / 'one'}" in done.stdout
    assert done.stdout.count("#SBATCH --partition=good\n") == 2
    assert done.stdout.count("#SBATCH --gpus=8\n") == 2


def test_a_dry_run_says_which_rollout_nodes_share_the_devices_of_which_job(tmp_path):
    done = slurm(tmp_path, "--nodes", "4", "--dry-run")
    assert done.stdout.splitlines()[:2] == [
        "job: coordinator and trainer (runs/one/slurm/reserved.sbatch)",
        "array of 4: 4 rollout nodes (runs/one/slurm/preemptible.sbatch)",
    ]
    shared = ("rollout.placement=shared", "rollout.nodes=5", "--trainer-nodes", "3")
    done = slurm(tmp_path, *shared, "--nodes", "4", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == [
        "job: coordinator and trainer, with 2 rollout nodes in turn on its devices "
        "(runs/one/slurm/reserved.sbatch)",
        "array of 2: 2 more trainer nodes, with 3 rollout nodes in turn on their devices "
        "(runs/one/slurm/trainers.sbatch)",
        "array of 4: 4 rollout nodes with devices of their own (runs/one/slurm/preemptible.sbatch)",
        "note: rollout.nodes = 5 over train.nodes = 3: 2 on each of the first 2, 1 on each other "
        "one",
    ]
    fewer = slurm(tmp_path, *shared, "rollout.nodes=2", "--nodes", "0", "--dry-run").stdout
    assert ": 1 on each of the first 2, the others only train\n" in fewer
    assert "preemptible.sbatch)" not in fewer


def test_trainer_nodes_are_held_to_what_the_config_holds_train_nodes_to(tmp_path):
    done = slurm(tmp_path, "--trainer-nodes", "3", "train.replicas=2", "--dry-run")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "train.replicas = 2: must divide train.nodes x train.ranks = 3" in line
    done = slurm(tmp_path, "--trainer-nodes", "4097", "--dry-run")
    assert "train.nodes = 4097: input should be less than or equal to 4096" in done.stderr


def test_a_machine_without_slurm_is_told_so_in_one_line(tmp_path):
    done = slurm(tmp_path, path=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "lightrl: there is no sbatch here: run this where jobs are submitted\n"


def test_a_name_that_is_taken_is_refused(tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "mine").touch()
    done = slurm(tmp_path)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "exists; choose another run.name" in line
