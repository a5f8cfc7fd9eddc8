"""Many nodes at a low limit of open files, as scripts/bench/nodes has them at the usual one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

NODES = Path(__file__).parents[2] / "scripts" / "bench" / "nodes"
STEPS = 4


def bench(limits: str) -> dict[str, Any]:
    """What 40 nodes that come at once are to a coordinator that may have so many descriptors
    (soft:hard)."""
    command = [sys.executable, NODES, "--nodes", "40", "--limits", limits, "--steps", str(STEPS)]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])[limits]


def test_a_low_limit_is_raised_and_all_nodes_take_part():
    result = bench("48:104")
    assert (result["state"], result["steps"], result["wrong_responses"]) == ("finished", STEPS, 0)
    assert (result["joined"], result["worked_in_last_steps"], result["nodes_ended"]) == (40, 40, {})
    assert 48 < result["open_files"] <= 104
    assert result["reported"] == ""


def test_nodes_for_which_there_is_no_descriptor_are_told_so_and_the_others_work():
    result = bench("64:64")
    assert (result["state"], result["steps"], result["wrong_responses"]) == ("finished", STEPS, 0)
    assert 5 <= result["joined"] == result["worked_in_last_steps"] < 25
    assert "file descriptors" in result["reported"]
    assert "ulimit -Hn" in result["reported"]
    [(why, count)] = result["nodes_ended"].items()
    assert count + result["joined"] == 40
    assert why == (
        "the coordinator has no file descriptors for more nodes "
        "(limit 56: ulimit -Hn, before the coordinator's start, raises it)"
    )
