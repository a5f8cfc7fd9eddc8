"""Runs that train adapters, with real ranks and engines: they learn, are resumed, and versions that
travel are adapters alone."""

import asyncio
import json
from pathlib import Path

import pytest

from lightrl.metrics.sinks import read
from tests.daemon.test_roles import daemon
from tests.support.daemons import DEADLINE_S, QUICKSTART

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("warm_runs")]

SETTINGS = (
    "rollout.nodes=1",
    "rollout.engine=torch",
    "model.lora.rank=8",
    "model.lora.alpha=16",
    "train.optim.lr=2e-3",
    "checkpoint.interval=5",
    "eval.path=''",
)


def up(*arguments: str) -> str:
    async def scenario() -> tuple[int | None, str]:
        async with daemon(*arguments) as process:
            output, _ = await asyncio.wait_for(process.communicate(), 2 * DEADLINE_S)
            return process.returncode, output.decode()

    code, output = asyncio.run(scenario())
    assert code == 0, output
    return output


def test_a_run_of_adapters_learns(tmp_path: Path):
    run_toml = (str(QUICKSTART / "run.toml"), f"run.dir={tmp_path}", "run.name=r")
    up(*run_toml, *SETTINGS, "train.steps=8")
    rows = read(tmp_path / "r")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == 8
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.05
    assert max(row.get("train_rollout_logprob_abs_diff", 0.0) for row in rows) < 1e-5
    exported = tmp_path / "r" / "checkpoints" / "step_8" / "hf"
    config = json.loads((exported / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    assert (exported / "adapter_model.safetensors").exists()
    assert not (exported / "model.safetensors").exists()


def test_targets_that_the_model_lacks_end_a_run_before_it_trains(tmp_path: Path):
    run_toml = (str(QUICKSTART / "run.toml"), f"run.dir={tmp_path}", "run.name=r")
    with pytest.raises(AssertionError) as caught:
        up(*run_toml, *SETTINGS, 'model.lora.targets=["q_porj"]')
    assert "'q_porj' is the name of no linear layer" in str(caught.value)
    assert "there are q_proj" in str(caught.value)
    assert not read(tmp_path / "r")
