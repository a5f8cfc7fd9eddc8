"""A trainer that rounds differently after it was killed: the run goes on, and ends about where it
would have ended."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightrl.metrics import sinks
from tests.support.cli import (
    DEADLINE_S,
    Victims,
    linux_only,
    running,
    summary,
    until,
    wait_for_step,
)
from tests.support.rounding_rank import PYTHONPATH

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("warm_runs")]

STEPS = 20  # of about 0.15 s: many are left when the trainer is killed
SETTINGS = (
    f"train.steps={STEPS}",
    "train.prompts_per_step=8",
    "rollout.group_size=4",
    "train.optim.lr=1e-5",  # so that no rounding makes other responses
    "checkpoint.interval=0",
)


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [PYTHONPATH, os.getcwd(), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}


def head_log(folder: Path) -> str:
    return (folder / "runs" / "one" / "logs" / "head.log").read_text()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [export] = (folder / "runs" / "one" / "checkpoints").glob(f"step_{STEPS}")
    return {k: v for file in export.rglob("*.safetensors") for k, v in load_file(file).items()}


def killed(folder: Path, *overrides: str) -> str:
    """All that a run said whose trainer was killed after some steps; it has no checkpoint."""
    with running(folder, *SETTINGS, *overrides, **environment()) as process:
        lines = until(process, "  reward ")
        wait_for_step(folder, 3)
        Victims(process).kill("trainer-0")
        out, _ = process.communicate(timeout=DEADLINE_S)
    return "".join(lines) + out


@linux_only
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_the_versions_that_came_out_different(tmp_path: Path):
    plain, disturbed = tmp_path / "plain", tmp_path / "disturbed"
    plain.mkdir()
    disturbed.mkdir()
    with running(plain, *SETTINGS) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    out = killed(disturbed)
    assert summary(disturbed)["state"] == "finished", out
    assert summary(disturbed)["steps"] == STEPS
    log = head_log(disturbed)
    warnings = [line for line in log.splitlines() if "nodes load it instead of the one" in line]
    assert len(warnings) == 1
    assert (
        "was trained again and came out different: logprobs of the canary differ by" in warnings[0]
    )
    assert "cannot load version" not in log
    one, other = weights(plain), weights(disturbed)
    assert one.keys() == other.keys()
    assert any((one[k] != other[k]).any() for k in one)
    largest = max(float((one[k] - other[k]).abs().max()) for k in one)
    assert largest < 1e-6  # with a rate of 1e-5 the steps move a weight by up to 2e-4
    pairs = zip(
        sinks.read(plain / "runs" / "one"), sinks.read(disturbed / "runs" / "one"), strict=True
    )
    for a, b in pairs:
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3), json.dumps(a["step"])
