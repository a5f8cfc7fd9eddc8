"""`lightrl serve`: the program, its clients, and what it refuses."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightrl.endpoints.api import Answered, Asked, SamplingLimits
from lightrl.environments.rendering import Renderer
from lightrl.launch.serving.backend import ServingBackend
from lightrl.launch.serving.engines import ServedEngine, ServedTurn
from lightrl.model_files import load_tokenizer
from tests.support.chat_models import make_model, trl_templates
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    all_end,
    arguments,
    descendants,
    linux_only,
    piped,
    running,
    until,
)

pytestmark = pytest.mark.usefixtures("warm_runs")

MODEL = QUICKSTART.parent / "model"
MAX_LENGTH = 113  # of the quickstart
PROMPTS = [
    json.loads(row)["prompt"]
    for row in (QUICKSTART.parent / "eval.jsonl").read_text().splitlines()[:6]
]


@dataclass(frozen=True)
class Served:
    process: "subprocess.Popen[str]"
    url: str
    line: str

    def post(self, path: str, key: str = "any", **body: Any) -> dict[str, Any]:
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def chat(self, text: str, **body: Any) -> dict[str, Any]:
        return self.post("/chat/completions", messages=[{"role": "user", "content": text}], **body)

    def text(self, prompt: Any, **body: Any) -> dict[str, Any]:
        found = self.post("/completions", prompt=prompt, **{"max_tokens": 100, **body})
        return {**found["choices"][0], "weight_version": found["weight_version"]}

    def refusal(self, path: str, key: str = "any", **body: Any) -> tuple[int, dict[str, Any]]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.post(path, key, **body)
        with refused.value as error:
            return error.code, json.load(error)["error"]


@contextlib.contextmanager
def served(folder: Path, *words: str) -> Iterator[Served]:
    with piped(folder, "serve", *words, "--port", "0", TMPDIR=str(folder)) as process:
        line = until(process, "serving")[-1]
        url = re.search(r"http\S+", line)
        assert url is not None
        yield Served(process, url[0], line)


@pytest.fixture(scope="module")
def model(origin_of_runs: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    words = (str(MODEL), "--engine", "torch", "--max-length", str(MAX_LENGTH), "--engines", "1")
    with served(folder, *words) as found:
        yield found


@pytest.fixture(scope="module")
def emulated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run "one" of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("emulated")
    with running(folder, *EMULATED, "train.steps=2", "checkpoint.interval=1") as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return folder


@pytest.mark.e2e
def test_greedy_answers_are_those_of_an_evaluation(model: Served, tmp_path: Path):
    rows = "".join(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in PROMPTS)
    (tmp_path / "rows.jsonl").write_text(rows)
    file = tmp_path / "samples.jsonl"
    words = (str(MODEL), str(QUICKSTART), f"eval.path={tmp_path}/rows.jsonl", "rollout.nodes=1")
    more = ("rollout.engine=torch", "--samples", str(file))
    subprocess.run(arguments("eval", *words, *more), cwd=tmp_path, check=True, timeout=DEADLINE_S)
    found = map(json.loads, file.read_text().splitlines())
    wanted = {row["prompt"]: row["text"] for row in found}
    of_texts = {p: model.text(p, temperature=0)["text"] for p in PROMPTS}
    assert of_texts == wanted
    chats = {p: model.chat(p, temperature=0)["choices"][0] for p in PROMPTS}
    assert {p: choice["message"]["content"] for p, choice in chats.items()} == wanted
    assert {choice["finish_reason"] for choice in chats.values()} == {"stop"}


@pytest.mark.e2e
def test_a_text_is_scored_as_it_was_sampled(model: Served):
    """At temperature 0: so each token is the likeliest."""
    sampled = model.text(PROMPTS[0], temperature=0, logprobs=1, max_tokens=8)["logprobs"]
    text = PROMPTS[0] + "".join(sampled["tokens"])
    scored = model.text(text, echo=True, logprobs=1, max_tokens=0)
    assert (scored["text"], scored["finish_reason"]) == (text, "length")
    found = scored["logprobs"]
    assert found["tokens"] == list(text)
    assert found["text_offset"] == list(range(len(text)))
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][-8:] == pytest.approx(sampled["token_logprobs"], abs=1e-4)
    top = found["top_logprobs"][-8:]
    assert top == [
        {token: logprob}
        for token, logprob in zip(found["tokens"][-8:], found["token_logprobs"][-8:], strict=True)
    ]
    # and where another token is likelier, that one
    unlikely = model.text("87%7=99", echo=True, logprobs=1, max_tokens=1)["logprobs"]
    assert len(unlikely["tokens"]) == 8
    (best,) = unlikely["top_logprobs"][-3]
    assert best != "9"
    assert unlikely["top_logprobs"][-3][best] > unlikely["token_logprobs"][-3]


@pytest.mark.e2e
def test_sampling_is_that_of_the_request(model: Served):
    plain = model.text(PROMPTS[1], temperature=0)["text"]
    stop = plain[6:8]
    cut = model.text(PROMPTS[1], temperature=0, stop=["nowhere", stop])
    assert (cut["text"], cut["finish_reason"]) == (plain.partition(stop)[0], "stop")
    chat = model.chat(PROMPTS[1], temperature=0, stop=stop)["choices"][0]
    assert (chat["message"]["content"], chat["finish_reason"]) == (cut["text"], "stop")
    short = model.text(PROMPTS[1], temperature=0, max_tokens=3)
    assert (short["text"], short["finish_reason"]) == (plain[:3], "length")
    assert model.text(PROMPTS[1], temperature=5, top_k=1)["text"] == plain
    assert model.text(PROMPTS[1], temperature=1e-300, top_k=1 << 70)["text"] == plain
    seeds = [5, 5, 6, None]
    drawn = [model.text(PROMPTS[1], temperature=3, seed=s, max_tokens=30)["text"] for s in seeds]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


@pytest.mark.e2e
def test_clients_are_answered_beside_each_other(model: Served):
    openai = pytest.importorskip("openai")
    alone = [model.text(p, temperature=0)["text"] for p in PROMPTS]
    assert model.text([PROMPTS[0]], temperature=0)["text"] == alone[0]
    together = model.post("/completions", prompt=PROMPTS, temperature=0, max_tokens=100)
    assert [choice["text"] for choice in together["choices"]] == alone

    def ask(prompt: str) -> str | None:
        with openai.OpenAI(base_url=model.url, api_key="any", max_retries=0) as client:
            messages = [{"role": "user", "content": prompt}]
            chat = client.chat.completions.create(model="m", messages=messages, temperature=0)
            return chat.choices[0].message.content

    with ThreadPoolExecutor(2 * len(PROMPTS)) as threads:
        assert list(threads.map(ask, PROMPTS * 2)) == alone * 2


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/completions", {"prompt": [3, 99]}, "token ids must be in 0..15"),
        ("/completions", {"prompt": ""}, "the prompt is empty"),
        ("/completions", {"prompt": []}, "prompt: must be a text, token ids, or a list"),
        ("/completions", {"prompt": "1", "max_tokens": 0}, "max_tokens: 0 is possible with echo"),
        ("/completions", {"prompt": "1", "logprobs": 5}, "logprobs: only 0 or 1"),
        ("/completions", {"prompt": "1", "n": 2}, "n: only 1"),
        ("/completions", {"prompt": "1", "temperature": -1}, "temperature = -1: must be 0 or more"),
        ("/completions", {"prompt": "1", "top_p": 0}, "top_p = 0: must be above 0"),
        ("/completions", {"prompt": "1" * 200}, "the prompt has 200 tokens, of at most 113"),
        ("/chat/completions", {"messages": []}, "messages: must have at least one"),
        ("/episode", {"reward": 1.0}, "lightrl serve has no episodes"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    model: Served, path: str, body: dict[str, Any], said: str
):
    status, error = model.refusal(path, **body)
    assert 400 <= status < 500
    assert said in error["message"]


class SaysOne(ServedEngine):
    """An engine that answers the same tokens to all requests."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids, self.prompts = token_ids, list[list[int]]()

    @property
    def num_running(self) -> int:
        return 0

    async def sample(self, prompt: Sequence[int], *_: Any) -> ServedTurn:
        self.prompts.append(list(prompt))
        turn = ServedTurn(None, self.token_ids, [-0.5] * len(self.token_ids), 7)
        turn.ended.set_result("stop")
        return turn


async def ask_with_tools(folder: Path) -> tuple[Answered, str]:
    template = trl_templates()["qwen3"]  # drops earlier thinking, so no episode could use it
    model = make_model(folder / "model", template)
    tokenizer = load_tokenizer(str(model))
    said = '<tool_call>\n{"name": "f", "arguments": {"q": 2}}\n</tool_call><|im_end|>'
    engine = SaysOne(tokenizer(said, add_special_tokens=False)["input_ids"])
    renderer = Renderer(model)
    renderer.prove((), user_turns=False)
    limits = SamplingLimits("m", 4096, is_free=True)
    backend = ServingBackend(limits, renderer, model, [engine], "")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"q": 1}}}
    messages = [
        {"role": "user", "content": "the question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "the result"},
    ]
    described = {"name": "f", "description": "", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": described}]
    answered = await backend.ask("", Asked(messages=messages, tools=tools))
    backend.close()
    return answered, tokenizer.decode(engine.prompts[0])


def test_tools_are_rendered_and_their_calls_found(tmp_path: Path):
    answered, prompt = asyncio.run(ask_with_tools(tmp_path))
    for part in ('"name": "f"', "the question", '{"q": 1}', "the result"):
        assert part in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    (call,) = answered.message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"q": 2}}
    assert (answered.finish_reason, answered.weight_version) == ("stop", 7)


@linux_only
@pytest.mark.e2e
def test_it_ends_by_a_signal_without_a_word(emulated_run: Path, tmp_path: Path):
    """Whatever is open, and nothing is left of it."""
    folder = tmp_path / "runs"
    folder.symlink_to(emulated_run / "runs")
    slow = "rollout.engine_args={t0_ms=1000}"
    with served(tmp_path, "one", "--engines", "2", "--key", "secret", slow) as found:
        assert found.line.startswith("serving one, step 2: http://127.0.0.1:")
        status, error = found.refusal("/completions", "wrong", prompt="1")
        assert (status, error["code"]) == (401, "invalid_api_key")
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(found.post, "/completions", "secret", prompt="1")
            children = descendants(found.process.pid)
            found.process.send_signal(signal.SIGINT)
            out, _ = found.process.communicate(timeout=DEADLINE_S)
            failed = asking.exception()
            assert isinstance(failed, urllib.error.URLError | ConnectionError)
            if isinstance(failed, urllib.error.HTTPError):
                failed.close()
    assert (found.process.returncode, out) == (0, "")
    assert all_end(children)
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


@pytest.mark.e2e
def test_a_newer_checkpoint_is_followed(emulated_run: Path, tmp_path: Path):
    shutil.copytree(emulated_run / "runs", tmp_path / "runs", symlinks=True)
    newer = tmp_path / "runs" / "one" / "checkpoints" / "step_2"
    newer.rename(tmp_path / "later")
    with served(tmp_path, "latest", "--follow") as found:
        assert "serving one, step 1" in found.line
        assert found.text("1")["weight_version"] == 1
        (tmp_path / "later").rename(newer)
        until(found.process, "serving step 2")
        assert found.text("1")["weight_version"] == 2


def test_what_cannot_be_served_is_refused_in_one_line(emulated_run: Path, tmp_path: Path):
    empty = emulated_run / "runs" / "empty" / "checkpoints"
    empty.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, said in (
            (("nothing",), "nothing: no such checkpoint"),
            (("empty",), "empty: this run has no checkpoint yet"),
            (("one", "--engine", "sglang"), "rollout.engine = 'sglang'"),
            (("one", "--port", port), f"--port {port}: cannot listen on 127.0.0.1"),
            (("one", "--host", "0.0.0.0"), "--host 0.0.0.0: others reach it; give a --key"),
            ((str(MODEL), "--follow"), "--follow: "),
            (("one", "--max-length", "999999"), "--max-length 999999: the model's context is "),
            (("one", "run.toml"), "run.toml: only section.key=value can follow"),
            (("one", "rollout.what=1"), "rollout.what"),
        ):
            more = () if "--port" in words else ("--port", "0")
            done = subprocess.run(
                arguments("serve", *words, *more),
                cwd=emulated_run,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert done.returncode == 1
            assert done.stdout == ""
            assert re.fullmatch(rf"lightrl: {re.escape(said)}.*\n", done.stderr), done.stderr
