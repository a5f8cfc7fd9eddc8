"""A tiny random model with two versions of weights, and engine processes that the tests share."""

import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.devices.cuda import has_cuda
from lightrl.engine.base import (
    EngineFailed,
    EngineLoaded,
    EngineSlept,
    EngineSpec,
    EngineStarted,
    EngineWoken,
    LoadWeights,
    Sleep,
    Wake,
)
from lightrl.engine.sampling import keys, sample
from lightrl.engine.start import start_engine
from lightrl.messages.load import Load
from lightrl.messages.responses import Abort, Generate, ResponseRequest, Sampling, TokenChunk
from lightrl.messages.weights import Canary
from lightrl.system.child import ChildDied
from lightrl.weights.canary import tolerance
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import write_tensors
from lightrl.wire import pack_i32, unpack_f32, unpack_i32
from tests.support.paths import python_path
from tests.support.warm import CHILD_CODE, Origin, forking, origin

Event = TypeVar("Event")

VOCABULARY = 32
MAX_LENGTH = 512
DEADLINE_S = 60.0
START_S = 240.0  # on a GPU vLLM compiles the model first

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_LENGTH,  # the longest response fills the context
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
    "eos_token_id": 1,
}


@dataclass
class TinyModel:
    """Model directory and versions 1 and 2 of its weights; `reference` computes with transformers
    alone."""

    dir: Path
    files: dict[int, VersionFile]
    models: dict[int, Any]

    @torch.inference_mode()
    def reference(self, version: int, prompt: list[int], seed: int, sampling: Sampling, num: int):
        """(tokens, logprobs) of one response: the whole sequence anew for every token, no cache, no
        batch."""
        tokens, logprobs = list(prompt), []
        for position in range(len(prompt), len(prompt) + num):
            logits = self.models[version](torch.tensor([tokens])).logits[:, -1]
            controls = [[sampling.temperature], [sampling.top_p], [sampling.top_k]]
            ids, logprob = sample(logits, keys([seed], [position]), *map(_array, controls))
            tokens.append(int(ids))
            logprobs.append(float(logprob))
        return tokens[len(prompt) :], logprobs


def _array(values: list[float]) -> Any:
    return torch.tensor(values, dtype=torch.float64).numpy()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    files, models = {}, {}
    for version in (1, 2):
        torch.manual_seed(version)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        path = folder / f"v{version}.bin"
        files[version] = write_tensors(path, version, model.named_parameters())
        models[version] = model
    return TinyModel(folder, files, models)


@dataclass
class Outcome:
    """All that an engine process said about one response."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    # of each token
    versions: list[int] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)
    # of the first token
    offset: int | None = None
    num_cached: int | None = None


class EngineClient:
    """The daemon's side of one engine process, for synchronous tests. Every wait has a deadline."""

    def __init__(
        self, runner: asyncio.Runner, spec: EngineSpec, tiny: TinyModel, log: Path
    ) -> None:
        self._runner = runner
        self.kind = spec.kind
        self.canary_limit = tolerance(spec.canary, spec.dtype)
        self.tiny = tiny
        self.child = runner.run(start_engine(spec, threads=1, log=log))
        self.outcomes: dict[str, Outcome] = {}
        self.failures: list[EngineFailed] = []
        self.loads: list[Load] = []
        self.num_chunks = 0
        self.is_stopped = False
        try:
            started = self.receive(START_S)
            assert isinstance(started, EngineStarted)
            self.device, self.num_workers = started.device, started.num_workers
            self.notes = started.notes
        except ChildDied:
            pytest.fail(log.read_text())

    def receive(self, deadline_s: float = DEADLINE_S) -> Any:
        """The next event, noted where it belongs."""
        event = self._runner.run(asyncio.wait_for(self.child.receive(), deadline_s))
        match event:
            case TokenChunk(version, digest, responses):
                self.num_chunks += 1
                for r in responses:
                    outcome = self.outcomes.setdefault(r.response, Outcome())
                    assert outcome.finish is None, f"{r.response} goes on after its end"
                    ids, logprobs = unpack_i32(r.token_ids), unpack_f32(r.logprobs)
                    assert len(ids) == len(logprobs)
                    if outcome.offset is None:
                        outcome.offset = r.offset
                    assert r.offset == outcome.offset + len(outcome.tokens)
                    outcome.tokens += ids
                    outcome.logprobs += logprobs
                    outcome.versions += [version] * len(ids)
                    outcome.digests.add(digest)
                    outcome.finish = r.finish_reason
                    outcome.num_cached = r.num_cached
            case EngineFailed():
                self.failures.append(event)
            case Load():
                self.loads.append(event)
        return event

    def together(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Of what happens while events come; the coroutine takes them from `child`."""
        return self._runner.run(what)

    def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.receive()

    def generate(self, version: int, sampling: Sampling, *requests: ResponseRequest) -> None:
        for r in requests:
            self.outcomes.pop(r.response, None)
        self.child.send(Generate(version, sampling, requests))

    def finished(self, *responses: str) -> list[Outcome]:
        """Waits until these responses have finished."""
        self.until(lambda: all(r in self.outcomes and self.outcomes[r].finish for r in responses))
        return [self.outcomes[r] for r in responses]

    def run(self, version: int, sampling: Sampling, *requests: ResponseRequest) -> list[Outcome]:
        self.generate(version, sampling, *requests)
        return self.finished(*(r.response for r in requests))

    def abort(self, *attempts: tuple[str, int]) -> None:
        self.child.send(Abort(attempts))

    def stop(self) -> None:
        """Now, and not at the end of the session."""
        assert self._runner.run(stop_all([self])) == [0]
        self.is_stopped = True

    def load(self, version: int) -> EngineLoaded:
        return self.load_file(self.tiny.files[version])

    def sleep(self) -> EngineSlept:
        self.child.send(Sleep())
        return self.next(EngineSlept)

    def wake(self, version: int, canary: Canary | None = None) -> EngineLoaded:
        self.child.send(Wake())
        self.child.send(LoadWeights(self.tiny.files[version], canary))
        self.next(EngineWoken)
        return self.next(EngineLoaded)

    def next(self, kind: type[Event]) -> Event:
        """The next event of this kind."""
        while True:
            if isinstance(event := self.receive(), kind):
                return event

    def load_file(self, file: VersionFile, canary: Canary | None = None) -> Any:
        self.child.send(LoadWeights(file, canary))
        while True:
            event = self.receive()
            if isinstance(event, EngineLoaded) or (
                isinstance(event, EngineFailed) and event.policy_version
            ):
                return event


async def stop_all(clients: list[EngineClient]) -> list[int]:
    return await asyncio.gather(*(client.child.stop(DEADLINE_S) for client in clients))


class Origins:
    """Engines are forked from these, and need not import torch and vLLM: others start them in
    earnest (tests/cli/test_real_runs.py, tests/chaos/test_vllm.py). vLLM has one of its own, which
    is begun by the first test that needs it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._known: dict[bool, Origin | None] = {}

    def forking(self, kind: str) -> contextlib.AbstractContextManager[None]:
        if has_cuda():
            return contextlib.nullcontext()
        is_vllm = kind == "vllm"
        if is_vllm not in self._known:
            vllm = ["tests.support.warm_vllm"] if is_vllm else []
            modules = ("lightrl.engine.process", "lightrl.engine.torch.engine", *vllm)
            self._known[is_vllm] = self._stack.enter_context(origin(*modules))
        return forking(self._known[is_vllm])


@pytest.fixture(scope="session")
def origin_of_engines() -> Iterator[Origins]:
    with contextlib.ExitStack() as stack:
        yield Origins(stack)


@pytest.fixture(scope="session")
def start(
    tiny: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
    origin_of_engines: Origins,
) -> Iterator[Callable[..., EngineClient]]:
    """Starts engine processes: `start("torch", slots=4)`; all are stopped at the end of the
    session."""
    clients: list[EngineClient] = []
    logs = tmp_path_factory.mktemp("logs")
    with asyncio.Runner() as runner:

        def begin(
            kind: str,
            slots: int = 16,
            dtype: str = "float32",
            model_dir: Path = tiny.dir,
            **fields: Any,
        ) -> EngineClient:
            spec = EngineSpec(kind, str(model_dir), dtype, MAX_LENGTH, slots, **fields)
            log = logs / f"{kind}-{len(clients)}.log"
            with origin_of_engines.forking(kind):
                clients.append(EngineClient(runner, spec, tiny, log))
            return clients[-1]

        yield begin
        running = [client for client in clients if not client.is_stopped]
        codes = runner.run(stop_all(running))
    assert codes == [0] * len(running)


@contextlib.contextmanager
def vllm_child(file: str, spec: EngineSpec, origin_of_engines: Origins) -> Iterator[Any]:
    """A connection to a child that runs `file` with a vLLM engine of this spec; see warm_vllm."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    here, there = multiprocessing.Pipe()
    target = "tests.support.warm_vllm:run_file"
    words = ("-P", "-c", CHILD_CODE, "vllm", target, str(there.fileno()), str(os.getpid()))
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[2])}
    with origin_of_engines.forking("vllm"):
        child = subprocess.Popen(
            (sys.executable, *words), pass_fds=(there.fileno(),), env=environment
        )
    there.close()
    here.send((file, spec))
    yield here
    here.close()
    assert child.wait(30) == 0


@pytest.fixture(scope="session")
def emulated_engine(start: Callable[..., EngineClient]) -> EngineClient:
    return start("emulated", can_sleep=True, engine_args={"t0_ms": 1.0, "restart_change": 1.0})


@pytest.fixture(scope="session")
def torch_engine(start: Callable[..., EngineClient]) -> EngineClient:
    return start("torch", can_sleep=True)


@pytest.fixture(scope="session")
def vllm_engine(start: Callable[..., EngineClient]) -> EngineClient:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    return start("vllm", can_sleep=not has_cuda())  # there: tests/gpu/test_vllm_engine.py


# vLLM's part of the default tests: test_equality.py.
VLLM = pytest.param("vllm", marks=pytest.mark.e2e)


@pytest.fixture(scope="session", params=["emulated", "torch", VLLM])
def any_engine(request: pytest.FixtureRequest) -> EngineClient:
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture(scope="session", params=["torch", VLLM])
def real_engine(request: pytest.FixtureRequest) -> EngineClient:
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture
def engine(any_engine: EngineClient) -> EngineClient:
    """Each kind in turn, with version 1 loaded."""
    any_engine.load(1)
    return any_engine


@pytest.fixture
def real(real_engine: EngineClient) -> EngineClient:
    """The engines that run the model, with version 1 loaded."""
    real_engine.load(1)
    return real_engine


def request_of(
    response: str,
    prompt: list[int],
    num: int,
    seed: int = 7,
    prefix: list[int] | None = None,
    attempt: int = 1,
    turn_start: int = 0,
) -> ResponseRequest:
    held = pack_i32(prefix or [])
    return ResponseRequest(response, attempt, seed, pack_i32(prompt), held, num, turn_start)


@pytest.fixture(scope="session")
def ask() -> Callable[..., ResponseRequest]:
    return request_of
