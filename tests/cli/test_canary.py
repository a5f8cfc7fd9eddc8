"""A run whose nodes serve something else than the trainer has."""

import pytest

from lightrl.metrics import sinks
from tests.support.cli import DEADLINE_S, EMULATED, linux_only, running, summary

pytestmark = pytest.mark.e2e

WRONG = "rollout.engine_args={score_error=0.5}"


@linux_only
def test_a_run_whose_only_node_serves_other_weights_fails_and_a_tolerance_lets_it_in(tmp_path):
    with running(tmp_path, "train.steps=2", *EMULATED, WRONG) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert "no rollout node is left: rollout-0: cannot load version 0: " in out.splitlines()[-1]
    log = (tmp_path / "runs/one/logs/head.log").read_text().splitlines()
    refused = [line for line in log if "WARNING" in line and "canary" in line]
    assert len(refused) == 3
    for line in refused:
        assert "rollout-0: version 0 failed" in line
        assert "differ by up to 0.5 from the trainer's, more than 0.001" in line
    assert any("rollout-0 left (cannot load version 0)" in line for line in log)
    with running(tmp_path, "weights.canary=0.6", resume=True) as process:
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    assert summary(tmp_path)["state"] == "finished"
    records = sinks.read(tmp_path / "runs" / "one")
    assert {round(r["weights/canary"], 6) for r in records if "weights/canary" in r} == {0.5}
