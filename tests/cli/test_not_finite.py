"""Figures and weights that are not finite: a run with such figures is shown and resumed, one with
such weights ends with a line that names them."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.cli import DEADLINE_S, QUICKSTART, run, running

REWARD = "def huge(sample):\n    return 1e20 * (sum(sample.response_ids) % 2)\n"
HUGE = ("reward.functions=rewards.py:huge", "algorithm.name=dr_grpo", "rollout.group_size=8")
SKIPPED = "nothing was learned in this step: its gradient is not finite"


def outcome(folder: Path, *overrides: str, resume: bool = False) -> tuple[int, list[str]]:
    """The status and all lines."""
    with running(folder, *overrides, resume=resume) as process:
        said, _ = process.communicate(timeout=2 * DEADLINE_S)
    assert "Traceback" not in said
    return process.returncode, said.splitlines()


def refused(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.e2e
def test_a_run_whose_last_gradient_is_infinite_is_shown_and_goes_on(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    status, lines = outcome(tmp_path, *HUGE, "train.steps=1")
    assert status == 0
    told = [k for k, line in enumerate(lines) if line.startswith(f"WARNING: {SKIPPED}")]
    ended = next(k for k, line in enumerate(lines) if line.startswith("finished 1 steps"))
    assert told, lines
    assert told[-1] in range(ended - 3, ended)  # the end repeats it
    assert f"warning   {SKIPPED}" in run(tmp_path, "status", "one")
    shown = json.loads(run(tmp_path, "status", "one", "--json"), parse_constant=refused)
    assert shown["metrics"]["grad_norm"] is None
    assert [row["text"] for row in shown["warnings"]][-1] == SKIPPED
    status, lines = outcome(tmp_path, "train.steps=2", resume=True)
    assert status == 0
    assert any(line.startswith("finished 2 steps") for line in lines)


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.e2e), "emulated"])
def test_a_model_with_one_nan_is_refused_by_the_name_of_the_tensor(tmp_path, engine):
    model = tmp_path / "model"
    shutil.copytree(QUICKSTART.parent / "model", model)
    [file] = model.glob("*.safetensors")
    weights = load_file(file)
    name = sorted(weights)[-1]
    weights[name].view(-1)[2] = math.nan
    save_file(weights, file, {"format": "pt"})
    status, lines = outcome(tmp_path, f"model.path={model}", f"rollout.engine={engine}")
    assert status == 1
    why = f"version 0: the weights are not finite: {name} holds NaN"
    assert lines[-1].startswith("lightrl: ")
    assert why in lines[-1]
