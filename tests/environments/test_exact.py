"""Episodes of whole runs with real engines: what was sampled and inserted is what is trained, id by
id, and a fresh forward pass gives the logprobs of the engine.

The model samples "a" and "b" one by one, where its tokenizer would write the token "ab".
"""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightrl.core.log_entries import LogEntry, ObservationTaken, ShardSent, TokensTaken
from lightrl.environments.rendering import Renderer
from lightrl.journal.read import LOG, read_segment, segments
from lightrl.messages.episodes import EpisodeEnded
from lightrl.messages.training import TrainResponse
from lightrl.weights.canary import tolerance
from lightrl.wire import unpack_i32
from tests.support.chat_models import make_model, make_weights
from tests.support.cli import DEADLINE_S, arguments

pytestmark = pytest.mark.e2e

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# After each step, what it has said and heard so far goes to a file.
ENVIRONMENT = """
import json

class Abc:
    def __init__(self, log):
        self.log = log

    def reset(self, row, seed):
        self.turns = [f"row {row['index']}"]
        return self.turns[0]

    def step(self, text):
        answer = f"answer {len(text)}"
        ends = len(self.turns) > 5 or "abb" in text
        self.turns += [text, answer]
        with open(self.log, "a") as file:
            file.write(json.dumps(self.turns) + chr(10))
        return answer, float(text.count("a")), ends
"""
CONFIG = """
run = {{ name = "exact", dir = "{folder}/runs", bind = "tcp://127.0.0.1:*" }}
model = {{ path = "{folder}/model", dtype = "float32" }}
rollout = {{ engine = "{engine}", nodes = 1, slots = 8, group_size = 4, max_response_length = 40 }}
train = {{ steps = 2, prompts_per_step = 4 }}
[environment]
source = "{folder}/abc.py:Abc"
args = {{ log = "{folder}/heard.jsonl" }}
max_length = 200
max_turn_length = 12
tasks = 8
"""


@dataclass(frozen=True)
class Played:
    """A run that has ended."""

    folder: Path

    @cached_property
    def entries(self) -> list[LogEntry]:
        found = segments(self.folder / "runs" / "exact" / "journal")
        return [entry for segment in found for entry in read_segment(segment.path, LOG)]

    @cached_property
    def trained(self) -> dict[str, tuple[int, TrainResponse]]:
        """(policy version, what was sent to the trainer) by response."""
        sent = [e.shard for e in self.entries if isinstance(e, ShardSent)]
        return {
            r.response: (s.policy_version, r) for s in sent for g in s.groups for r in g.responses
        }

    def turns(self, response: str) -> Iterator[tuple[ObservationTaken, bytes, bytes]]:
        """(observation, tokens sampled after it, their logprobs) from the journal, in order."""
        found: list[tuple[ObservationTaken, bytes, bytes]] = []
        for entry in self.entries:
            if isinstance(entry, ObservationTaken) and entry.response == response:
                found.append((entry, b"", b""))
            elif isinstance(entry, TokensTaken):
                for item in entry.items:
                    if item.response == response:
                        observation, ids, logprobs = found[-1]
                        found[-1] = observation, ids + item.token_ids, logprobs + item.logprobs
        return iter(found)


@pytest.fixture(
    scope="module",
    params=[
        "torch",
        pytest.param(
            "vllm", marks=pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is missing")
        ),
    ],
)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp(request.param)
    make_weights(make_model(folder / "model", CHATML), ["a", "b", "<|im_end|>"])
    (folder / "abc.py").write_text(ENVIRONMENT)
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, engine=request.param))
    done = subprocess.run(
        arguments("up", str(folder / "run.toml"), "--no-tui", "checkpoint.interval=0"),
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Played(folder)


def bits(trained: TrainResponse) -> list[int]:
    """1 for each token that is trained."""
    packed = np.frombuffer(trained.loss_mask, np.uint8)
    return np.unpackbits(packed, bitorder="little")[: len(trained.token_ids) // 4].tolist()


def test_ids_of_the_journal_are_trained_and_only_sampled_ones_count(played: Played):
    assert len(played.trained) == 2 * 4 * 4
    for name, (_, trained) in played.trained.items():
        expected: list[int] = []
        mask: list[int] = []
        logprobs = b""
        for observation, sampled, of_sampled in played.turns(name):
            assert observation.turn.start == len(expected)
            inserted = unpack_i32(observation.token_ids)
            expected += inserted + unpack_i32(sampled)
            mask += [0] * len(inserted) + [1] * (len(sampled) // 4)
            logprobs += bytes(len(observation.token_ids)) + of_sampled
        assert unpack_i32(trained.token_ids) == expected
        assert trained.rollout_logprobs == logprobs
        assert bits(trained) == mask


def test_environments_heard_what_was_sampled_and_said_what_was_inserted(played: Played):
    renderer = Renderer(played.folder / "model")
    renderer.prove([])
    heard = set((played.folder / "heard.jsonl").read_text().splitlines())
    over = {e.response: e for e in played.entries if isinstance(e, EpisodeEnded)}
    for name in played.trained:
        held: list[int] = []
        said: list[str] = []
        start = 0  # of the newest turn
        for observation, sampled, _ in played.turns(name):
            messages: list[dict[str, Any]] = json.loads(observation.turn.record)
            said += [str(m["content"]) for m in messages]
            assert len(said) == 1 or json.dumps(said) in heard
            new = [m for m in messages if m["role"] == "user"]
            rendered = renderer.append(held, start, new, []) if held else renderer.first(new, [])
            assert unpack_i32(observation.token_ids) == rendered
            start = len(held) + len(rendered)
            held += rendered + unpack_i32(sampled)
        last = [str(m["content"]) for m in json.loads(over[name].record)]
        assert last[0] == renderer.parse(held[start:], [])["content"]
        if over[name].stop == "done":
            assert json.dumps(said + last) in heard
    assert {outcome.stop for outcome in over.values()} == {"done", "length"}


def test_logprobs_are_those_of_a_fresh_forward_pass(played: Played):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(played.folder / "model", dtype=torch.float32)
    num = 0
    for version, trained in played.trained.values():
        if version:
            continue
        tokens = torch.tensor([unpack_i32(trained.token_ids)])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits.log_softmax(-1)
        fresh = logits.gather(-1, tokens[:, 1:, None])[0, :, 0]
        given = torch.frombuffer(bytearray(trained.rollout_logprobs), dtype=torch.float32)
        sampled = torch.tensor(bits(trained)) > 0
        assert not given[~sampled].any()
        difference = (given[1:] - fresh)[sampled[1:]].abs()
        assert float(difference.max()) <= tolerance(None, "float32")
        num += len(difference)
    assert num > 50


def test_tokens_that_the_tokenizer_would_merge_are_trained_as_sampled(played: Played):
    from lightrl.model_files import load_tokenizer

    tokenizer = load_tokenizer(str(played.folder / "model"))
    a, b, ab = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "ab"))
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [ab]
    apart = 0
    for _, trained in played.trained.values():
        held = unpack_i32(trained.token_ids)
        apart += sum(held[k : k + 2] == [a, b] for k in range(len(held)))
        assert tokenizer(tokenizer.decode(held), add_special_tokens=False)["input_ids"]
    assert apart > 10
