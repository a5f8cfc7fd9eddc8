"""The jobs of trainer nodes whose devices rollout nodes use in turn with them, here without Slurm:
who is started on which GPU, that they come and go with their trainer node, and what is refused."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lightrl.config.run_file import load_config
from lightrl.devices.plan import engines_of
from lightrl.metrics import sinks
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    SMALL,
    all_end,
    descendants,
    linux_only,
    piped,
    summary,
    until,
)
from tests.support.fake_driver import install, smi_row

pytestmark = [pytest.mark.e2e, linux_only]

SHARED = ("run.name=one", *SMALL, "rollout.placement=shared")


def job(folder: Path, *words: str, **environment: str):
    return piped(folder, "slurm-job", *words, **environment)


def head(folder: Path, *settings: str, **environment: str):
    return job(folder, "head", str(QUICKSTART), *SHARED, *settings, **environment)


def rollout_nodes(process: "subprocess.Popen[str]", num: int) -> dict[int, str]:
    """The command lines of the rollout daemons of the job by process id, once there are so many."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = {pid: words for pid, words in children(process.pid) if "--shares" in words}
        if len(found) == num:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {num} rollout nodes: {children(process.pid)}")


def children(pid: int) -> list[tuple[int, str]]:
    """(pid, command line)."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            found.append((int(child), " ".join(words)))
    return found


def test_each_gets_its_part_of_the_ranks_devices_and_all_leave_with_the_job(tmp_path):
    environment = install(tmp_path / "fake", smi_row(0) + smi_row(1))
    settings = ("train.ranks=2", "train.replicas=2", "rollout.nodes=3")
    with head(tmp_path, *settings, **environment) as process:
        name = f"head-{process.pid}"
        lines = rollout_nodes(process, 3).values()
        words = r"--(?:name|gpus|gpu-memory|shares|part) (\S+)"
        given = [re.findall(words, line) for line in lines]
        assert sorted(given) == [
            [f"{name}-rollout-0", name, "0", "0.44"],
            [f"{name}-rollout-1", name, "1", "0.9", "1"],
            [f"{name}-rollout-2", name, "0", "0.44"],
        ]
        everyone = descendants(process.pid)
        process.terminate()
        assert all_end(everyone)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert "Traceback" not in out


def test_engines_of_all_sizes_are_beside_the_ranks_of_the_first_job(tmp_path):
    sizes = ("rollout.placement=own", "rollout.nodes=2", "rollout.parallel=[1,2]", "train.steps=4")
    with head(tmp_path, *EMULATED, *sizes) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert summary(tmp_path)["state"] == "finished"
    joined = re.findall(r"head-\d+-(rollout-\d-tp\d) joined as rollout", out)
    assert sorted(set(joined)) == ["rollout-0-tp1", "rollout-0-tp2", "rollout-1-tp1"]
    assert {row["planner/parallel"] for row in sinks.read(tmp_path / "runs" / "one")} <= {1.0, 2.0}


def test_an_environment_node_is_beside_the_head(tmp_path):
    guess = QUICKSTART.parent.parent / "guess" / "run.toml"
    settings = ("run.name=one", "train.steps=1", "rollout.nodes=0", "eval.interval=0")
    with job(tmp_path, "head", str(guess), *settings) as process:
        lines = until(process, "joined as environment")
        assert f"head-{process.pid}-environment-0 joined as environment" in lines[-1]
        everyone = descendants(process.pid)
        process.terminate()
        assert all_end(everyone)


def test_they_are_there_while_their_trainer_node_is(tmp_path):
    with head(tmp_path, *EMULATED, "rollout.nodes=2", "train.steps=9999") as process:
        until(process, "step 3: ")
        first = rollout_nodes(process, 2).keys()
        os.kill(min(first), signal.SIGKILL)
        until(process, "was killed by SIGKILL")
        second = rollout_nodes(process, 2).keys()
        assert len(first & second) == 1
        [coordinator] = [pid for pid, words in children(process.pid) if "coordinator" in words]
        os.kill(coordinator, signal.SIGKILL)
        until(process, "the coordinator was killed by SIGKILL; the run continues")
        assert not second & {pid for pid, _ in children(process.pid)}  # the memory is the ranks'
        assert len(rollout_nodes(process, 2)) == 2
        until(process, "resumed at step")
        until(process, ": reward ")
        process.terminate()
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert summary(tmp_path)["state"] == "stopped"


def test_they_are_divided_among_the_jobs_of_several_trainer_nodes(tmp_path):
    run_dir = str(tmp_path / "runs" / "one")
    settings = (*EMULATED, "train.nodes=2", "rollout.nodes=3", "train.steps=5")
    with (
        head(tmp_path, *settings) as first,
        job(tmp_path, "trainer", run_dir, SLURM_ARRAY_TASK_ID="1") as second,
    ):
        assert len(rollout_nodes(first, 2)) == 2
        [line] = rollout_nodes(second, 1).values()
        assert re.search(rf"--shares \S+-{second.pid} ", line)
        for process in (first, second):
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, out
    assert summary(tmp_path)["state"] == "finished"
    switches = [row.get("offload/switches", 0) for row in sinks.read(tmp_path / "runs" / "one")]
    assert max(switches) == 2 * 3  # each of the three slept and woke


def test_what_the_devices_of_the_job_cannot_do_is_one_line(tmp_path):
    environment = install(tmp_path / "fake", smi_row(0))
    two = "rollout.engine_args={tensor_parallel_size=2}"
    with head(tmp_path, two, **environment) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert out == (
        "lightrl: an engine takes 2 GPUs (tensor_parallel_size of rollout.engine_args), and a "
        "trainer node has 1 that it could use in turn with it\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("engines", "nodes", "each"), [(1, 1, [1]), (5, 3, [2, 2, 1]), (2, 3, [1, 1, 0])]
)
def test_every_engine_has_a_trainer_node(engines: int, nodes: int, each: list[int]):
    settings = [f"rollout.nodes={engines}", f"train.nodes={nodes}", "rollout.placement=shared"]
    config = load_config(QUICKSTART, settings)
    assert [engines_of(config, node) for node in range(nodes)] == each
