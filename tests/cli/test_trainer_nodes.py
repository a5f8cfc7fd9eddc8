"""Several trainer daemons: the bits of one with as many ranks, whoever of them is killed, and what
is said of one that is missing or sees another folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    SMALL,
    Victims,
    arguments,
    linux_only,
    running,
    summary,
    until,
    wait_for_step,
)

pytestmark = [pytest.mark.e2e, linux_only, pytest.mark.usefixtures("warm_runs")]
REAL = ("run.deterministic=true", "checkpoint.interval=2", "train.steps=6", "node.lease_s=1.5")
DIGESTS = ("weights_digest", "responses_digest")


def finished(folder: Path, *overrides: str) -> dict[str, str]:
    folder.mkdir()
    with running(folder, *overrides) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return {name: summary(folder)[name] for name in DIGESTS}


@pytest.mark.timeout(400)
def test_two_nodes_give_the_bits_of_two_ranks_whichever_is_killed(tmp_path: Path):
    expected = finished(tmp_path / "ranks", *REAL, "train.ranks=2")
    folder = tmp_path / "nodes"
    folder.mkdir()
    with running(folder, *REAL, "train.nodes=2") as process:
        until(process, " reward ")
        for name, step in (("trainer-1", 3), ("trainer-0", 5)):
            wait_for_step(folder, step)
            Victims(process).kill(name)
            until(process, f"{name} was killed by SIGKILL")
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert {name: summary(folder)[name] for name in DIGESTS} == expected
    assert not list((folder / "runs" / "one" / "checkpoints").glob(".*"))


def test_nodes_are_told_of_each_other_again_when_the_coordinator_was_killed(tmp_path: Path):
    settings = (*EMULATED, "run.deterministic=true", "checkpoint.interval=2", "train.steps=40")
    expected = finished(tmp_path / "ranks", *settings, "train.ranks=2")
    folder = tmp_path / "nodes"
    folder.mkdir()
    with running(folder, *settings, "train.nodes=2") as process:
        until(process, " reward ")
        wait_for_step(folder, 4)
        Victims(process).kill("head")
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert {name: summary(folder)[name] for name in DIGESTS} == expected


def head_of(folder: Path, *overrides: str) -> "subprocess.Popen[str]":
    """Coordinator, rollout and one of two trainer nodes, as one daemon."""
    roles = ("--role", "coordinator,trainer,rollout", "--name", "head")
    settings = ("run.name=one", *SMALL, *EMULATED, "train.nodes=2", *overrides)
    return subprocess.Popen(
        arguments("up", str(QUICKSTART), *settings, *roles),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def joining(lines: list[str]) -> list[str]:
    """How another trainer node takes part, by what the first one has said."""
    address = lines[-1].split("--join ", 1)[1].split()[0]
    options = ("--join", address, "--key", "runs/one/key", "--role", "trainer", "--name", "other")
    return arguments("up", *options)


def may_mount() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    return (
        subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
    )


def test_a_run_says_for_how_many_trainer_nodes_it_waits_and_goes_on_when_all_are_there(
    tmp_path: Path,
):
    with head_of(tmp_path, "train.steps=2") as head:
        try:
            lines = until(head, "join it")
            if not any("the run waits for 1 of 2 trainer nodes" in line for line in lines):
                until(head, "the run waits for 1 of 2 trainer nodes")
            with subprocess.Popen(joining(lines), cwd=tmp_path) as far:
                out, _ = head.communicate(timeout=DEADLINE_S)
                assert far.wait(DEADLINE_S) == 0
            assert head.returncode == 0, out
        finally:
            head.kill()


@pytest.mark.skipif(not may_mount(), reason="a folder that one process sees otherwise takes root")
def test_a_checkpoint_folder_that_one_node_does_not_see_ends_the_run_in_one_line(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    with head_of(tmp_path, "train.steps=2", f"checkpoint.dir={shared}") as head:
        try:
            lines = until(head, "join it")
            blind = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
            command = [*blind, str(shared), *joining(lines)]
            with subprocess.Popen(command, cwd=tmp_path):
                out, _ = head.communicate(timeout=DEADLINE_S)
        finally:
            head.kill()
    folder = shared / "one" / "checkpoints"
    why = (
        f"other: does not see {folder}: checkpoint.dir must be a folder that all trainer nodes see"
    )
    assert head.returncode == 1
    assert why in out
    assert "Traceback" not in out
