"""A whole run with drafts from history: the same responses as without, in fewer steps of the
engine."""

import json
from pathlib import Path
from typing import Any

from lightrl.metrics import sinks
from tests.support.cli import DEADLINE_S, QUICKSTART, running

NUM_PROMPTS = 4  # one epoch in each step
STEPS = 4


def finished(folder: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The summary of a run over the longest answers of the quickstart, and what its steps
    measured."""
    rows = (QUICKSTART.parent / "train.jsonl").read_text().splitlines()
    folder.mkdir()
    prompts = folder / "long.jsonl"
    prompts.write_text("\n".join(sorted(rows, key=len)[-NUM_PROMPTS:]) + "\n")
    settings = (
        *(f"data.path={prompts}", f"train.prompts_per_step={NUM_PROMPTS}", f"train.steps={STEPS}"),
        *("rollout.group_size=4", "rollout.max_response_length=105"),
    )
    with running(folder, *settings, *overrides) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    run_dir = folder / "runs" / "one"
    return json.loads((run_dir / "summary.json").read_text()), sinks.read(run_dir)


def test_a_run_with_drafts_has_the_responses_of_one_without(tmp_path: Path):
    drafted, steps = finished(tmp_path / "on")
    plain, plain_steps = finished(tmp_path / "off", "speculation.enabled=false")
    assert drafted["responses_digest"] == plain["responses_digest"]
    assert steps[0]["history/hit_rate"] == 0.0
    assert [step["history/hit_rate"] for step in steps[1:]] == [1.0] * (STEPS - 1)
    # Nodes say it with their heartbeats: a step may have to wait for its figures until the next
    # one.
    assert max(step.get("speculation/tokens_per_forward", 0.0) for step in steps) > 1.3
    assert max(step.get("speculation/acceptance", 0.0) for step in steps) > 0.3
    assert not any(key.startswith("speculation/") for step in plain_steps for key in step)
