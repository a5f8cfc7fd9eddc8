"""Projects written for verl, TRL and verifiers train as they are, from a config of ten lines.

Rows and functions are laid out as the documentation of each has them; only the numbers in them are
those that the quickstart's model knows.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lightrl.metrics import sinks
from tests.support.cli import QUICKSTART, arguments

DEADLINE_S = 240.0  # `verifiers` alone takes seconds to import, twice
SIZE = ("train.prompts_per_step=2", "rollout.group_size=4", "run.bind=tcp://127.0.0.1:*")
PROMPTS = [(f"{10 + 7 * k}%{3 + k % 6}=", str(3 + k % 6)) for k in range(12)]

# verl: docs/preparation/prepare_data.rst and reward_function.rst.
VERL_CONFIG = """
model.path = "model"
data.path = "train.parquet"
data.max_prompt_length = 8
rollout.engine = "torch"
rollout.max_response_length = 24
train.steps = 5
reward.functions = "my_reward.py:compute_score"
"""
VERL_REWARD = """
import re

def extract_solution(solution_str):
    solutions = re.findall(r"(\\d+)", solution_str)
    return solutions[-1] if solutions else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "lighteval/SUMS" or extra_info["split"] != "train":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    answer = extract_solution(solution_str)
    acc = answer is not None and int(answer) < int(ground_truth)
    return {"score": 1.0 if acc else len(solution_str) / 100, "acc": acc, "pred": answer}
"""

# TRL: docs/source/grpo_trainer.md, "Using a custom reward function", examples 3 to 5 and 7.
TRL_CONFIG = """
model.path = "model"
data.path = "train.jsonl"
data.max_prompt_length = 8
rollout.engine = "torch"
rollout.max_response_length = 24
train.steps = 5
reward.functions = ["rewards.py:correct", "rewards.py:async_reward", "rewards.py:shortest"]
"""
TRL_REWARDS = """
import asyncio, re

def correct(completions, ground_truth, trainer_state, log_extra, **kwargs):
    matches = [re.search(r"(\\d+)$", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    log_extra("extracted", contents)
    weight = 1.0 + trainer_state.global_step / trainer_state.max_steps
    return [weight if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

async def async_reward(prompts, completions, task, **kwargs):
    await asyncio.sleep(0.01)
    return [0.1 if c and t == "math" else None for c, t in zip(completions, task)]

def shortest(completion_ids, log_metric=None, **kwargs):
    shortest = min(map(len, completion_ids))
    log_metric("compared", len(completion_ids))
    return [1.0 if len(ids) == shortest else 0.0 for ids in completion_ids]
"""

# verifiers: docs/environments.md, "Your First Environment" and "Group-Based Reward Functions".
VERIFIERS_CONFIG = """
model.path = "model"
data.max_prompt_length = 8
rollout.engine = "torch"
rollout.max_response_length = 24
train.steps = 5
reward.functions = "verifiers:my-sums"
"""
VERIFIERS_ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

def load_environment():
    dataset = Dataset.from_list([
        {{"prompt": [{{"role": "user", "content": prompt}}], "answer": answer}}
        for prompt, answer in {prompts}
    ])

    async def correct_answer(completion, answer) -> float:
        response = completion[-1]["content"]
        return 1.0 if answer in response else 0.0

    async def diversity_bonus(completions) -> list[float]:
        responses = [c[-1]["content"] for c in completions]
        return [0.2 if responses.count(r) == 1 else 0.0 for r in responses]

    rubric = vf.Rubric(funcs=[correct_answer, diversity_bonus])
    return vf.SingleTurnEnv(dataset=dataset, rubric=rubric)
"""


def train(folder: Path, config: str) -> list[dict[str, float]]:
    """The figures of each step."""
    model = shutil.copytree(QUICKSTART.parent / "model", folder / "model")
    file = model / "tokenizer_config.json"
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    file.write_text(json.dumps(json.loads(file.read_text()) | template))
    (folder / "run.toml").write_text(config)
    assert len(config.strip().splitlines()) <= 10
    done = subprocess.run(
        arguments("up", "run.toml", "--no-tui", *SIZE),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = sinks.read(folder / "runs" / "run")
    assert [step["step"] for step in steps] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(step["reward/failures"] == 0 for step in steps), done.stdout
    assert all(step["round/groups_trained"] == 2 for step in steps), done.stdout
    return steps


def test_a_verl_project(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    rows = [
        {
            "data_source": "lighteval/SUMS",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (prompt, answer) in enumerate(PROMPTS)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "my_reward.py").write_text(VERL_REWARD)
    steps = train(tmp_path, VERL_CONFIG)
    assert all(0 <= step["reward/min"] <= step["reward/max"] <= 1 for step in steps)
    assert all("reward/acc" in step for step in steps)


@pytest.mark.e2e
def test_a_trl_project(tmp_path):
    rows = [{"prompt": p, "ground_truth": answer, "task": "math"} for p, answer in PROMPTS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(TRL_REWARDS)
    for step in train(tmp_path, TRL_CONFIG):
        assert step["reward/compared"] == 4.0  # the whole group, each time
        assert 0.25 <= step["reward/shortest"] <= 1.0  # one of four at least
        assert step["reward/async_reward"] <= 0.1


@pytest.mark.e2e
def test_an_environment_of_verifiers(tmp_path):
    pytest.importorskip("verifiers")
    source = VERIFIERS_ENVIRONMENT.format(prompts=PROMPTS)
    (tmp_path / "my_sums.py").write_text(source)
    steps = train(tmp_path, VERIFIERS_CONFIG)
    assert all("reward/correct_answer" in s and "reward/diversity_bonus" in s for s in steps)
    assert any(step["reward/max"] > 0 for step in steps)
