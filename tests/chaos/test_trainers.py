"""Several trainer nodes: killed in each phase, and on two machines that see each other by a line
alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.keys import KEY_FILE
from tests.chaos.conftest import LIMIT_S, run_chaos
from tests.chaos.network import Network, why_not
from tests.support.cli import QUICKSTART, SMALL

pytestmark = pytest.mark.e2e

PORT = 5600
REAL = ("run.deterministic=true", "train.steps=3", "run.name=run")


@pytest.mark.timeout(2 * LIMIT_S)
def test_each_trainer_killed_in_each_phase_changes_no_bit():
    result = run_chaos("--engine", "emulated", "--steps", "22", "--trainers", "2", "--each-phase")
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
    assert result["num_events"] == 8
    assert not outcome["missed"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_real_ranks_of_several_nodes_survive_whatever_happens():
    many = ("--engine", "torch", "--steps", "20", "--events", "10", "--seed", "3,4")
    result = run_chaos(*many, "--trainers", "2")
    assert all(outcome["ok"] for outcome in result["seeds"]), result


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(f"{os.getpid()}-t", 1).up() as made:
        yield made


def start(namespace: str, folder: Path, *command: str) -> "subprocess.Popen[str]":
    within = ("ip", "netns", "exec", namespace) if namespace else ()
    return subprocess.Popen(
        [*within, sys.executable, "-P", "-m", "lightrl.cli", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_bytes())


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_machines_give_the_bits_of_one(network: Network, tmp_path: Path):
    """Ranks meet over the line: neither sees the other's loopback."""
    bind = f"tcp://{network.head_address(0)}:{PORT}"
    roles = ("--role", "coordinator,trainer,rollout", "--name", "head")
    settings = ("up", str(QUICKSTART), *SMALL, *REAL, f"run.dir={tmp_path}")
    here = (f"run.bind={bind}", "train.nodes=2")
    with start(network.head, tmp_path, *settings, *here, *roles) as head:
        try:
            assert head.stdout is not None
            assert any("join it" in line for line in head.stdout)
            key = ("--key", str(tmp_path / "run" / KEY_FILE), "--name", "other")
            join = ("up", "--join", bind, "--role", "trainer", *key)
            with start(network.node(0), tmp_path, *join) as other:
                said, _ = head.communicate(timeout=LIMIT_S)
                theirs, _ = other.communicate(timeout=LIMIT_S)
        finally:
            head.kill()
    assert head.returncode == 0, f"{said}\n{theirs}"
    assert other.returncode == 0, theirs
    alone = tmp_path / "alone"
    alone.mkdir()
    command = ("up", str(QUICKSTART), *SMALL, *REAL, f"run.dir={alone}", "train.ranks=2")
    with start("", alone, *command, "--no-tui") as one:
        said, _ = one.communicate(timeout=LIMIT_S)
    assert one.returncode == 0, said
    for name in ("weights_digest", "responses_digest"):
        assert summary(tmp_path)[name] == summary(alone)[name]
