"""Agents of clients as they are published, in whole runs: what a client receives is what the
journal has and what is trained."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.messages.episodes import EpisodeEnded
from lightrl.wire import unpack_f32, unpack_i32
from tests.environments.test_adapters import interpreter
from tests.environments.test_exact import Played, bits
from tests.environments.test_kills import tool_model
from tests.support.chat_models import make_model, trl_templates
from tests.support.cli import DEADLINE_S, QUICKSTART, arguments

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
# file in data/ with its arguments, what must be here for it, steps of the run
FRAMEWORKS = [
    ("agent_openai_agents.py responses", "agents", 5),
    pytest.param(*("agent_openai_agents.py chat_completions", "agents", 5), marks=pytest.mark.slow),
    ("agent_langchain.py", "interpreter", 5),
    ("agent_anthropic.py", "anthropic", 2),
]
# Five turns with a tool. What the client received goes to a file.
AGENT = """
import json, os
import openai

TOOL = {"type": "function", "function": {"name": "count", "description": "Count.", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}
client = openai.OpenAI()
messages = [{"role": "user", "content": os.environ["LIGHTRL_ROW"]}]
turns, num_calls = [], 0
for k in range(5):
    try:
        got = client.chat.completions.create(
            model="any", messages=messages, tools=[TOOL], logprobs=True,
            extra_body={"return_token_ids": True},
        )
    except openai.BadRequestError as e:
        assert e.code == "context_length_exceeded", e
        break
    choice = got.choices[0]
    turns.append({
        "prompt": got.prompt_token_ids,
        "ids": choice.token_ids,
        "logprobs": [each.logprob for each in choice.logprobs.content],
        "version": got.weight_version,
    })
    messages.append(choice.message)
    for call in choice.message.tool_calls or []:
        num_calls += 1
        n = json.loads(call.function.arguments)["n"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(n + 1)})
    if not choice.message.tool_calls:
        messages.append({"role": "user", "content": "Go on."})
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps({"key": client.api_key, "turns": turns, "calls": num_calls}) + chr(10))
"""
CONFIG = """
run = { name = "exact", dir = "runs", bind = "tcp://127.0.0.1:*" }
model = { path = "model" }
[environment]
program = "python agent.py"
slots = 4
tool_format = "hermes"
max_length = 2000
max_turn_length = 40
[data]
path = "rows.jsonl"
[reward]
functions = "reward.py:reward"
[rollout]
engine = "emulated"
nodes = 1
slots = 8
group_size = 2
max_response_length = 200
engine_args = { mean_length = 8.0, t0_ms = 2.0, train_step_ms = 30.0 }
[train]
engine = "emulated"
steps = 2
prompts_per_step = 2
[algorithm]
name = "grpo"
[checkpoint]
interval = 0
"""
REWARD = """
def reward(sample):
    return len(sample.turns) + sum(sample.response_ids) % 11 / 10
"""


def run(folder: Path, *overrides: str, template: str = "", **files: str) -> Played:
    """`template`: the name of one that TRL ships; without one tokens are mostly calls of a tool."""
    texts = {"run.toml": CONFIG, "reward.py": REWARD, **files}
    texts["rows.jsonl"] = "".join(f'{{"prompt": "{k}"}}\n' for k in range(50))
    for name, text in texts.items():
        (folder / name).write_text(text)
    if template:
        made = make_model(folder / "model", trl_templates()[template], template)
        table = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**table, "max_position_embeddings": 2048}))
        shutil.copy(QUICKSTART.parent / "model" / "model.safetensors", made)
    else:
        tool_model(folder / "model")
    done = subprocess.run(
        arguments("up", "run.toml", "--no-tui", *overrides),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        env={**os.environ, "SEEN": str(folder / "seen")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Played(folder)


def seen(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the clients received, by response."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "seen").read_text().splitlines():
        each = json.loads(line)
        name = each["key"].partition(".")[0]
        found[base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()] = each["turns"]
    return found


def test_ids_and_logprobs_of_a_client_are_those_that_are_trained(tmp_path: Path):
    pytest.importorskip("openai")
    played = run(tmp_path, **{"agent.py": AGENT})
    received = seen(tmp_path)
    assert len(played.trained) == 2 * 2 * 2
    for name, (_, trained) in played.trained.items():
        ids, logprobs = unpack_i32(trained.token_ids), unpack_f32(trained.rollout_logprobs)
        mask = [0] * len(ids)
        of_journal = [(unpack_i32(a), unpack_f32(b)) for _, a, b in played.turns(name)]
        assert len(received[name]) == len(of_journal)
        for turn, (sampled, of_sampled) in zip(received[name], of_journal, strict=True):
            start = len(turn["prompt"])
            end = start + len(turn["ids"])
            assert turn["prompt"] + turn["ids"] == ids[:end]
            assert turn["ids"] == sampled
            assert turn["logprobs"] == of_sampled == logprobs[start:end]
            mask[start:end] = [1] * len(sampled)
        assert bits(trained) == mask
        assert trained.reward >= len(of_journal)
    assert max(map(len, received.values())) == 5


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("agent", "needs", "steps"), FRAMEWORKS)
def test_agents_of_frameworks_are_trained(tmp_path: Path, agent: str, needs: str, steps: int):
    """All episodes have several turns and a score. A program takes seconds to start."""
    python = sys.executable
    if needs == "interpreter":
        python = interpreter("agents")
    else:
        pytest.importorskip(needs)
    played = run(
        tmp_path,
        f"environment.program=python {HERE}/data/{agent}",
        f'environment.command=["{python}"]',
        f"train.steps={steps}",
        "train.prompts_per_step=1",
    )
    ended = [e for e in played.entries if isinstance(e, EpisodeEnded)]
    assert {e.stop for e in ended} <= {"done", "length"}, ended
    assert len(played.trained) == steps * 2
    num_with_results = 0
    for name, (_, trained) in played.trained.items():
        turns = [observation.turn for observation, _, _ in played.turns(name)]
        assert trained.reward >= len(turns) > 1
        num_with_results += sum(turn.num_tool_calls > 0 for turn in turns)
    assert num_with_results >= 2 * len(played.trained)


@pytest.mark.slow
def test_environment_of_verifiers_v1_trains_on_what_it_got(tmp_path: Path):
    """Each episode starts a process of verifiers, which takes many seconds."""
    python = interpreter("verifiers-v1")
    played = run(
        tmp_path,
        "environment.program=",
        "environment.source=verifiers:guess_v1.py",
        f'environment.command=["{python}"]',
        "environment.timeout_s=300",
        "environment.tasks=2",
        "environment.tool_format=auto",
        "data.path=",
        "reward.functions=[]",
        template="qwen3",
        **{"guess_v1.py": (HERE / "data" / "guess_v1.py").read_text()},
    )
    assert len(played.trained) == 2 * 2 * 2
    for name, (_, trained) in played.trained.items():
        turns = list(played.turns(name))
        assert len(turns) == 3
        held: list[int] = []
        mask: list[int] = []
        for observation, sampled, _ in turns:
            inserted, ids = unpack_i32(observation.token_ids), unpack_i32(sampled)
            held += inserted + ids
            mask += [0] * len(inserted) + [1] * len(ids)
        assert unpack_i32(trained.token_ids) == held
        assert bits(trained) == mask
