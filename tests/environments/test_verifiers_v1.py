"""Episodes of verifiers 0.4, in its own interpreter, against a stand-in for the endpoint."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.chat_models import make_model, trl_templates
from tests.support.token_endpoint import KEY, TokenEndpoint, serving

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-environments" / "verifiers-v1" / "bin" / "python"
PROGRAM = ROOT / "lightrl" / "environments" / "adapters" / "verifiers_v1.py"
GUESS, CLERK = "guess_v1.py", "clerk_v1.py"
NULL = {"agent": {"harness": {"id": "null"}}}
LIMIT_S = 280.0
END = "<|im_end|>"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"no {PYTHON.relative_to(ROOT)}: scripts/setup environments"
    ),
]


class Model:
    """A directory with a tokenizer that merges "ab"."""

    def __init__(self, folder: Path, template: str) -> None:
        self.folder = make_model(folder, trl_templates()[template], template)
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def turn(self, text: str) -> list[int]:
        return self.tokenizer.encode(text + END).ids

    def spelled(self, text: str) -> list[int]:
        """A turn sampled letter by letter, as the tokenizer would not write it."""
        return [*(i for letter in text for i in self.tokenizer.encode(letter).ids), *self.turn("")]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model", "qwen3")


def play(
    model: Model, source: str, endpoint: TokenEndpoint, args: dict[str, Any] | None = None
) -> tuple[int, str]:
    """The exit status and stderr of an episode."""
    with serving(endpoint):
        env = {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "OPENAI_BASE_URL": endpoint.url,
            "OPENAI_API_KEY": KEY,
            "LIGHTRL_MODEL": str(model.folder),
            "LIGHTRL_ARGS": json.dumps(args or {}),
        }
        done = subprocess.run(
            [str(PYTHON), "-P", str(PROGRAM), source],
            env=env,
            cwd=HERE / "data",
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    return done.returncode, done.stderr


def failed(model: Model, source: str, endpoint: TokenEndpoint, **args: Any) -> str:
    """The line of an episode without a score."""
    status, line = play(model, source, endpoint, args)
    assert status == 1
    assert not endpoint.reports
    assert line.count("\n") == 1
    return line


def test_each_request_extends_the_ids_that_are_held(model: Model):
    turns = [model.spelled("no: abab"), model.spelled("ab no"), model.turn("yes")]
    endpoint = TokenEndpoint(turns, {"index": 2})
    assert play(model, GUESS, endpoint) == (0, "")
    assert not endpoint.wrong
    assert endpoint.reports == [{"reward": 2.0, "metrics": {"replies": 3.0}}]
    assert endpoint.sampled == turns
    assert len(endpoint.sessions) == 1
    said = ["no: abab", "No. Question 1.", "ab no", "No. Question 2.", "yes"]
    held = model.text(endpoint.held)
    assert [held.count(text) for text in said] == [1] * 5
    assert held.count("<|im_start|>") == 6
    assert model.tokenizer.encode(held).ids != endpoint.held


def test_tools_of_a_taskset_answer_between_turns(model: Model):
    call = '<tool_call>\n{"name": "room", "arguments": {"number": "1"}}\n</tool_call>'
    endpoint = TokenEndpoint([model.turn(call), model.turn("answer")], {"index": 0})
    assert play(model, CLERK, endpoint, NULL) == (0, "")
    assert not endpoint.wrong
    assert endpoint.reports == [{"reward": 1.5, "metrics": {"knows": 1.0, "is_short": 1.0}}]
    first, second = (model.text(prompt) for prompt in endpoint.prompts)
    assert "Say who is in a room." in first
    assert "<tool_response>\nanswer\n</tool_response>" in second.removeprefix(first)


@pytest.mark.parametrize(
    ("limit", "args"),
    [
        ({}, {"player": {"max_turns": 2}}),  # of the environment
        ({"max_turns": 2}, {}),  # of the endpoint
        ({"max_length": 60}, {}),  # seen by the client
    ],
)
def test_a_limit_ends_with_a_reward(model: Model, limit: dict[str, int], args: dict[str, Any]):
    endpoint = TokenEndpoint([model.turn("no")] * 9, {"index": 0}, **limit)
    args = {**args, "turns": 9, "renderer": {"name": "qwen3"}}
    assert play(model, GUESS, endpoint, args) == (0, "")
    assert not endpoint.wrong
    assert endpoint.reports == [{"reward": 0.0, "metrics": {"replies": 2.0}}]


def test_what_breaks_ends_without_a_score(model: Model):
    turns = [model.turn("yes")]
    line = failed(model, GUESS, TokenEndpoint(turns, {}), taskset={"words": ["broken"]}, turns=1)
    assert line.startswith("verifiers:guess_v1.py: TaskError: task GuessTask scoring: ValueError")
    line = failed(model, GUESS, TokenEndpoint([], {}), renderer={"name": "qwen3"})
    assert "ProviderError: Error code: 500" in line
    assert "no engine" in line


@pytest.mark.parametrize(
    ("source", "args", "reason"),
    [
        ("nothing.py", {}, "no file nothing.py"),
        ("nothing", {}, "'nothing' not found"),
        (GUESS, {"turn": 3}, "turn Extra inputs are not permitted"),
        (CLERK, {}, "agent: harness 'bash' executes commands of the model: set"),
        (GUESS, {"renderer": {"name": "qwen"}}, "qwen"),
    ],
)
def test_bad_input_is_one_line(model: Model, source: str, args: dict[str, Any], reason: str):
    endpoint = TokenEndpoint([], {"index": 0})
    assert reason in failed(model, source, endpoint, **args)
    assert not endpoint.prompts


def test_a_template_of_no_family_is_sent_as_chats(tmp_path: Path):
    model = Model(tmp_path / "model", "qwen2_5")
    endpoint = TokenEndpoint([], {"index": 0}, replies=["no", "yes"])
    assert play(model, GUESS, endpoint) == (0, "")
    assert not endpoint.prompts
    assert endpoint.reports == [{"reward": 2.0, "metrics": {"replies": 2.0}}]
    roles = [[message["role"] for message in chat] for chat in endpoint.chats]
    assert roles == [["user"], ["user", "assistant", "user"]]
