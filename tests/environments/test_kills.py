"""Episodes survive the death of anything: kill -9 at each entry of the journal of a step, of each
kind of process, and the trained sequences are those of an undisturbed run."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightrl.core.log_entries import LogEntry, TokensTaken
from lightrl.journal.disk import segments
from lightrl.journal.read import LOG, Reading
from lightrl.metrics import sinks
from lightrl.wire import unpack_i32
from tests.support.chat_models import make_model
from tests.support.cli import QUICKSTART, linux_only

pytestmark = [pytest.mark.slow, pytest.mark.e2e, linux_only, pytest.mark.timeout(1200)]

HOOK = Path(__file__).parents[1] / "support" / "kills"
STEPS = 36
TURNS = 5
PASS = "RoundOpened 1 pass"
VICTIMS = ["rollout", "worker", "environment", "head", "all"]

ENVIRONMENT = """
import os, random

class Five:
    def reset(self, row, seed):
        self.row, self.num = row["index"], 0
        return self.say(f"go {seed % 7}")

    def step(self, text):
        self.num += 1
        return self.say(f"{len(text)}"), sum(text.encode()) % 11 / 10, self.num == 5

    def say(self, text):
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{self.row} {self.num}\\n")
        return text

class Drifting(Five):
    def say(self, text):
        return f"{super().say(text)} {os.getpid()}"

class Flaky(Five):
    def reset(self, row, seed):
        if random.random() < 0.13:
            raise ConnectionError("no sandbox")
        return super().reset(row, seed)

    def step(self, text):
        if random.random() < 0.004:
            os._exit(1)
        return super().step(text)

def count(n: int) -> int:
    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{n}\\n")
    return n

def reward(sample):
    return sum(sample.response_ids) % 11 / 10
"""
CONFIG = """
[run]
name = "one"
dir = "."
bind = "tcp://127.0.0.1:*"
[model]
path = "model"
[environment]
workers = 1
timeout_s = 10
max_turn_length = 40
max_length = 400
[rollout]
engine = "emulated"
nodes = 1
slots = 8
group_size = 2
max_response_length = 200
engine_args = { t0_ms = 4.0, train_step_ms = 30.0 }
[train]
engine = "emulated"
prompts_per_step = 1
[algorithm]
name = "grpo"
[journal]
keep_history = true
[node]
heartbeat_s = 0.25
lease_s = 1.5
grace_s = 10
"""
# Five turns over HTTP; of the standard library, since others take a second to start.
AGENT = """
import json, os, urllib.request

row, seed = json.loads(os.environ["LIGHTRL_ROW"]), int(os.environ["LIGHTRL_SEED"])
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}

def post(path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

messages, reward = [{"role": "user", "content": f"go {seed % 7}"}], 0.0
for k in range(5):
    message = post("/chat/completions", {"messages": messages})["choices"][0]["message"]
    reward += sum(message["content"].encode()) % 11 / 10
    messages += [message, {"role": "user", "content": str(len(message["content"]))}]
post("/episode", {"reward": reward})
"""
AGENTS = (
    "environment.program=python -S agent.py",
    "rollout.engine_args={mean_length=3.0,t0_ms=4.0}",
)
NATIVE = ("environment.source=env.py:Five", "rollout.engine_args={mean_length=3.0,t0_ms=4.0}")
# Most tokens of this model are a call of the tool: a turn has about eight.
CALL = '<tool_call>{{"name": "count", "arguments": {{"n": {}}}}}</tool_call>'
NUM_CALLS = 3000
MAX_CALLS = 40  # of a turn
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = (
    'environment.tools=["env.py:count"]',
    "environment.tool_format=hermes",
    f"environment.max_turns={TURNS}",
    "environment.max_length=2000",
    "reward.functions=env.py:reward",
    "data.path=rows.jsonl",
    "rollout.engine_args={mean_length=8.0,t0_ms=2.0,restart_change=0.0}",
)


@dataclass(frozen=True)
class Played:
    folder: Path
    out: str

    @property
    def summary(self) -> dict[str, Any]:
        file = self.folder / "one" / "summary.json"
        assert file.exists(), self.out
        return json.loads(file.read_bytes())

    @property
    def digests(self) -> tuple[str, str]:
        assert self.summary["state"] == "finished", self.out
        return self.summary["weights_digest"], self.summary["responses_digest"]

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    @property
    def calls(self) -> Counter[int]:
        return Counter(map(int, self.lines("calls")))

    def sampled_calls(self, first: int) -> Counter[int]:
        """The calls in all tokens that are in the journal; `first`: the token of call 0."""
        tokens: dict[tuple[str, int], int] = {}
        for segment in segments(self.folder / "one" / "journal"):
            reading: Reading[LogEntry] = Reading(segment.path, LOG)
            for entry in reading:
                for item in entry.items if isinstance(entry, TokensTaken) else ():
                    for k, token in enumerate(unpack_i32(item.token_ids)):
                        tokens[item.response, item.offset + k] = token
        return Counter(token - first for token in tokens.values() if token >= first)

    def figure(self, name: str) -> float:
        return sum(float(row.get(name, 0)) for row in sinks.read(self.folder / "one"))


def play(folder: Path, *overrides: str, victim: str = "", plan: tuple[str, ...] = ()) -> Played:
    """A run in which the entries of `plan` each kill `victim`, at most one in a step."""
    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        tool_model(folder / "model")
    for name, text in {
        "env.py": ENVIRONMENT,
        "agent.py": AGENT,
        "run.toml": CONFIG,
        "plan": "\n".join(plan),
        "victim": victim,
        "rows.jsonl": "".join(f'{{"prompt": "{k}"}}\n' for k in range(500)),
    }.items():
        (folder / name).write_text(text)
    paths = [str(HOOK), str(HOOK.parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lightrl.cli", "up", "run.toml", *overrides, "--no-tui"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "KILLS": str(folder),
            "CALLS": str(folder / "calls"),
        },
    )
    return Played(folder, done.stdout)


def tool_model(folder: Path) -> None:
    from tokenizers import Tokenizer

    make_model(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([CALL.format(n) for n in range(NUM_CALLS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    config = {"vocab_size": size, "model_type": "qwen2", "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(QUICKSTART.parent / "model" / "model.safetensors", folder)


def first_call(played: Played) -> int:
    """The token of call 0."""
    config = json.loads((played.folder / "model" / "config.json").read_text())
    return config["vocab_size"] - NUM_CALLS


def entries(undisturbed: Played, share: float = 1.0) -> tuple[str, ...]:
    """The entries that at least this share of the steps had."""
    names = undisturbed.lines("seen")
    bounds = [k for k, name in enumerate(names) if name == "RoundOpened 1"]
    steps = [names[a:z] for a, z in pairwise(bounds)]
    num = Counter(name for step in steps for name in step)
    return tuple(name for name in num if num[name] >= share * len(steps))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("native"), *NATIVE, f"train.steps={STEPS}")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("agents"), *AGENTS, f"train.steps={STEPS}")


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("tools"), *TOOLS, f"train.steps={STEPS}")


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_at_each_entry_changes_no_bit(tmp_path: Path, native: Played, victim: str):
    plan = entries(native)
    assert {"ObservationTaken 10", "EpisodeEnded 2", "ShardSent 1", "StepDone 1"} <= {*plan}
    assert len(native.lines("calls")) == STEPS * 2 * (1 + TURNS)
    played = play(tmp_path, *NATIVE, f"train.steps={STEPS}", victim=victim, plan=plan)
    assert played.lines("done") == list(plan), played.out
    assert played.digests == native.digests


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_at_each_entry_changes_no_bit_of_agents(tmp_path: Path, agents: Played, victim: str):
    """A program whose node was lost is started again, and gets its recorded answers."""
    plan = entries(agents)
    assert {"ObservationTaken 10", "EpisodeEnded 2", "ShardSent 1", "StepDone 1"} <= {*plan}
    played = play(tmp_path, *AGENTS, f"train.steps={STEPS}", victim=victim, plan=plan)
    assert played.lines("done") == list(plan), played.out
    assert played.digests == agents.digests


@pytest.mark.parametrize(
    ("victim", "moment"),
    [(v, m) for v in ("worker", "environment", "head") for m in ("", " durable")],
)
def test_tools_are_called_at_most_once_where_they_cannot_be_repeated(
    tmp_path: Path, tools: Played, victim: str, moment: str
):
    """Steps of which nothing is left alternate with others: five in a row would end the run."""
    names = [name + moment for name in entries(tools, 0.5) if "Taken" in name]
    plan = tuple(line for name in names for line in (PASS, name))
    more = ("environment.resume=once", f"train.steps={2 * len(plan)}")
    played = play(tmp_path, *TOOLS, *more, victim=victim, plan=plan)
    assert played.summary["state"] == "finished", played.out
    assert len(played.lines("done")) >= len(names)
    assert played.calls <= played.sampled_calls(first_call(played))


@pytest.mark.parametrize("victim", ["worker", "all"])
def test_tools_that_may_be_repeated_are_called_again_only_in_a_turn_that_was_lost(
    tmp_path: Path, tools: Played, victim: str
):
    plan = tuple(name for name in entries(tools, 0.5) if "Taken" in name)
    played = play(tmp_path, *TOOLS, f"train.steps={STEPS}", victim=victim, plan=plan)
    assert played.digests == tools.digests
    assert tools.calls <= played.calls
    num_kills = len(played.lines("done"))
    assert num_kills >= len(plan) // 2
    again = played.calls - tools.calls
    assert max(again.values(), default=0) <= num_kills
    # of at most one turn of each of the two episodes, which has ten calls, or a few more
    assert again.total() <= num_kills * 2 * MAX_CALLS


def test_episodes_that_infrastructure_killed_leave_the_mean_reward_as_it_was(tmp_path: Path):
    args = "{mean_length=3.0,t0_ms=1.0,restart_change=0.0}"
    more = ("train.steps=8", "train.prompts_per_step=4", "rollout.group_size=8", "rollout.slots=32")
    many = (*more, f"rollout.engine_args={args}", "environment.workers=2")
    whole = play(tmp_path / "whole", *NATIVE[:1], *many)
    flaky = play(tmp_path / "flaky", "environment.source=env.py:Flaky", *many)
    num = 8 * 4 * 8
    assert flaky.digests != whole.digests
    assert 0.05 * num < flaky.figure("episodes/unscored") < 0.3 * num
    assert flaky.summary["trained_responses"] == num - flaky.figure("episodes/unscored")
    means = [p.figure("reward/mean") / 8 for p in (whole, flaky)]
    assert abs(means[0] - means[1]) < 0.1  # a score of 0 for each would be 0.35


def test_an_environment_that_says_something_else_in_its_replay_is_not_scored(tmp_path: Path):
    plan = (PASS, "ObservationTaken 6") * 3
    source = "environment.source=env.py:Drifting"
    played = play(tmp_path, *NATIVE, source, "train.steps=9", victim="worker", plan=plan)
    assert played.summary["state"] == "finished", played.out
    assert played.lines("done") == list(plan)
    assert "was another one when it was replayed, so it cannot be resumed" in played.out
    assert 1 <= played.figure("episodes/diverged") <= played.figure("episodes/unscored") <= 6
