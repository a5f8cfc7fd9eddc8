"""Environments of other frameworks, as published: a config of at most 15 lines trains 5 steps.

The model is tiny and random. Its head prefers digits, ends of turns, and tokens that are a whole
action, answer or tool call, so that games go on and rewards differ.
"""

import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lightrl.metrics import sinks
from tests.environments.test_adapters import HERE, interpreter
from tests.support.chat_models import make_model, make_weights, trl_templates
from tests.support.cli import DEADLINE_S, arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(4 * DEADLINE_S)]

CONFIGS = sorted(HERE.glob("configs/*.toml"))
WORDS = [
    *(" left", " down", " right", " up", " stick", " hit"),
    *("[7]", "<answer>1</answer>", "#### 5", "no"),
    '<tool_call>\n{"name": "guess", "arguments": {"number": 4}}\n</tool_call>',
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 9}}\n</tool_call>',
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model") / "m", trl_templates()["qwen2_5"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(WORDS)
    tokenizer.save(str(folder / "tokenizer.json"))
    make_weights(folder, [*"0123", *WORDS, "<|im_end|>"], max_positions=2048)
    return folder


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_published_environment_trains_5_steps(file: Path, model: Path, tmp_path: Path):
    python = interpreter("verifiers" if file.stem.startswith("verifiers") else "games")
    run = ["run.name=one", f"run.dir={tmp_path}", "run.bind=tcp://127.0.0.1:*"]
    run += [f"model.path={model}", f'environment.command=["{python}", "-P"]']
    small = ["model.dtype=float32", "rollout.engine=torch"]
    small += ["rollout.nodes=1", "rollout.group_size=2", "train.prompts_per_step=2"]
    done = subprocess.run(
        arguments("up", str(file), "--no-tui", *run, *small),
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = sinks.read(tmp_path / "one")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert all(line["episodes/turns"] >= 1 for line in metrics)
    assert sum(line["episodes/unscored"] for line in metrics) == 0
    if file.stem in ("blackjack", "cliffwalking", "countdown", "taxi"):  # a reward in a few turns
        assert any(line["grad_norm"] > 0 for line in metrics)
    tools = file.stem in ("trl_higher_lower", "verifiers_tools")
    assert (sum(line["episodes/tool_calls"] for line in metrics) > 0) == tools
