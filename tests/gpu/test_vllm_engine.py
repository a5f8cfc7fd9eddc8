"""vLLM on a GPU: the engines' contract, CUDA graphs on and off, weights in place, drafts, sleep.

The contract is asked in vLLM's batch-invariant mode, in which the same tokens come in any company,
as `run.deterministic` has it. Without that mode tokens may differ by rounding, which is counted and
proved.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.engine.base import EngineSpec
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.forward import Way, response_logprobs
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import pack_f32, pack_i32
from tests.engine import test_contract
from tests.engine.conftest import (  # noqa: F401 - fixtures
    CONFIG,
    EngineClient,
    TinyModel,
    ask,
    origin_of_engines,
    start,
    tiny,
)
from tests.gpu.coupled import check, requests
from tests.gpu.driver import Asked, Remote, nearly

for name, function in vars(test_contract).items():
    if name.startswith("test_"):
        globals()[name] = function

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("vllm")]

KV_GIB = 0.5
WINDOW = 8
TENSOR = "tensor_parallel_size"
MOST_GAP = {"bfloat16": 0.03, "float32": 1e-4}  # mean of |trainer's logprob - engine's|
GRAPHS = [pytest.param(False, id="eager"), pytest.param(True, id="graphs")]


@dataclass(frozen=True)
class On:
    """What a device allows: vLLM on a CPU has neither graphs nor a batch-invariant mode, nor need
    of one."""

    device: str

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    def args(self, graphs: bool) -> dict[str, Any]:
        """Little memory: several engines share the GPU."""
        if self.device == "cpu":
            return {}
        return {"gpu_memory_utilization": 0.1, "enforce_eager": not graphs}

    def spec(self, tiny: TinyModel, graphs: bool, **fields: Any) -> EngineSpec:  # noqa: F811
        args = self.args(graphs) | fields.pop("engine_args", {})
        return EngineSpec(
            "vllm",
            str(tiny.dir),
            self.dtype,
            512,
            64,
            KV_GIB,
            max_window=WINDOW,
            engine_args=args,
            **fields,
        )


@pytest.fixture(scope="session")
def on(device: str) -> On:
    return On(device)


def graphs_of(on: On, wanted: bool) -> bool:
    if on.device == "cpu" and wanted:
        pytest.skip("there are no CUDA graphs on a CPU")
    return wanted


@pytest.fixture(scope="module", params=GRAPHS)
def client(on: On, start: Callable[..., Any], request: pytest.FixtureRequest) -> EngineClient:  # noqa: F811
    args = on.args(graphs_of(on, request.param))
    with pytest.MonkeyPatch.context() as patch:
        if on.device == "cuda":
            patch.setenv("VLLM_BATCH_INVARIANT", "1")
        limit = {"canary": 0.1} if on.dtype == "bfloat16" else {}  # by itself it would be 1
        return start("vllm", dtype=on.dtype, kv_cache_gib=KV_GIB, engine_args=args, **limit)


@pytest.fixture
def engine(client: EngineClient) -> EngineClient:
    client.load(1)
    return client


@pytest.fixture(scope="module", params=GRAPHS)
def remote(on: On, tiny: TinyModel, request: pytest.FixtureRequest) -> Iterator[Remote]:  # noqa: F811
    """As users have it by default, and without graphs; with version 1 loaded."""
    engine = Remote(on.spec(tiny, graphs_of(on, request.param)))
    engine.load(tiny.files[1])
    yield engine
    engine.close()


def test_company_speculation_and_a_move_change_no_more_than_rounding_does(on, remote, tiny, figure):  # noqa: F811
    remote.load(tiny.files[1])
    asked = requests(CONFIG["vocab_size"], 16, 4, 72)
    changed = check(remote, CONFIG, on.dtype, asked, "vLLM, 2 layers", figure)
    if on.dtype == "float32":
        assert max(changed.values()) <= 1


def test_drafts_that_the_gate_lets_through_change_nothing_either(on, remote, tiny, figure):  # noqa: F811
    """What the gate decides depends on the clock, so that no run repeats: the share alone is looked
    at."""
    remote.load(tiny.files[1])
    asked = requests(CONFIG["vocab_size"], 16, 4, 72)
    plain = remote.run(asked)
    renamed, histories = nearly(plain, "gate", asked, CONFIG["vocab_size"])
    got = remote.run(renamed, histories=histories, drafts="gate")
    figure("vLLM: drafted tokens accepted through the gate", got.accepted)
    same = [plain.tokens[a.name] == got.tokens[r.name] for a, r in zip(asked, renamed, strict=True)]
    figure("vLLM: share of responses that are the same through the gate", sum(same) / len(same))
    assert sum(same) / len(same) > (0.5 if on.dtype == "bfloat16" else 0.95)


def test_reloading_replaces_weights_in_place_tied_ones_too(on, remote, tiny):  # noqa: F811
    """CUDA graphs have the addresses of the weights in them."""
    remote.load(tiny.files[1])
    before = remote.weights()
    remote.load(tiny.files[2])
    after = remote.weights()
    assert before.keys() == after.keys()
    if on.device == "cuda":
        assert [place for place, _ in after.values()] == [place for place, _ in before.values()]
    (embedding,) = [n for n in after if n.endswith("embed_tokens.weight")]
    found = torch.tensor(after[embedding][1])
    wanted = dict(tiny.models[2].named_parameters())["model.embed_tokens.weight"].flatten()[:4]
    assert torch.allclose(found, wanted.float(), atol=0.01)
    assert before[embedding][1] != after[embedding][1]


@pytest.mark.parametrize("version", [1, 2])
def test_logprobs_are_those_of_the_trainer(on, remote, tiny, figure, version):  # noqa: F811
    """Also that no key of older weights is left in the prefix cache, and that the head was renewed:
    the same long prompts were answered by the other version before."""
    rng = np.random.default_rng(7)
    asked = [
        Asked(f"q{i}#0", tuple(rng.integers(2, CONFIG["vocab_size"], 200).tolist()), i, 60)
        for i in range(8)
    ]
    remote.load(tiny.files[3 - version])
    remote.run(asked)
    remote.load(tiny.files[version])
    got = remote.run(asked)
    samples = [
        TrainSample(
            a.name,
            *map(pack_i32, (a.prompt, got.tokens[a.name])),
            pack_f32(got.logprobs[a.name]),
            1.0,
        )
        for a in asked
    ]
    module = tiny.models[version].to(on.device)
    with torch.no_grad():
        batch = collate(samples, torch.device(on.device), CONFIG["vocab_size"], packed=False)
        logprobs, _ = response_logprobs(module, Way(), batch)
    gaps = ((logprobs - batch.rollout_logprobs).abs() * batch.mask).sum() / batch.mask.sum()
    tiny.models[version].to("cpu")
    figure(f"vLLM: train_rollout_logprob_abs_diff, {on.dtype}, version {version}", float(gaps))
    assert gaps < MOST_GAP[on.dtype]


@pytest.mark.parametrize("graphs", GRAPHS)
def test_sleep_gives_memory_back_and_waking_up_changes_nothing(on, tiny, graphs, figure):  # noqa: F811
    """Level 2, woken in the one order that is right; under another version, too."""
    if on.device == "cpu":
        pytest.skip("on a CPU it frees nothing: tests/engine/test_sleep.py")
    engine = Remote(on.spec(tiny, graphs, can_sleep=True))
    try:
        asked, text = requests(CONFIG["vocab_size"], 8, 2, 40), list(range(20))
        expected = {}
        for version in (2, 1):
            engine.load(tiny.files[version])
            expected[version] = engine.run(asked).tokens, engine.logprobs_of(text)
        awake = engine.free()
        for version in (1, 2, 1):
            said, asleep = engine.sleep()
            figure(f"vLLM, {'graphs' if graphs else 'eager'}: MiB freed by sleep", said >> 20)
            assert said > 0.8 * KV_GIB * 2**30
            assert asleep - awake > 0.8 * KV_GIB * 2**30
            engine.wake(tiny.files[version])
            tokens, canary = expected[version]
            assert engine.logprobs_of(text) == pytest.approx(canary, abs=MOST_GAP[on.dtype])
            assert engine.run(asked).tokens == tokens
            assert abs(engine.free() - awake) < 0.2 * KV_GIB * 2**30
    finally:
        engine.close()


def test_engines_of_two_sizes_take_turns_over_the_same_gpus(on, tiny, figure):  # noqa: F811
    """The large one starts first and sleeps; neither needs memory while the other has it."""
    if on.device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    shares = {"gpu_memory_utilization": 0.5, TENSOR: 2}
    large = Remote(on.spec(tiny, False, can_sleep=True, parallel=2, engine_args=shares))
    asked, text = requests(CONFIG["vocab_size"], 8, 2, 40), list(range(20))
    try:
        large.sleep()  # as it is told when it has started
        small = Remote(
            on.spec(tiny, False, can_sleep=True, parallel=1, engine_args=shares | {TENSOR: 1})
        )
        try:
            small.load(tiny.files[1])
            score, of_small = small.logprobs_of(text), small.run(asked).tokens
            for _ in range(2):
                said, free = small.sleep()
                figure("vLLM: MiB freed by an engine of one GPU", said >> 20)
                large.wake(tiny.files[1])
                assert large.free() < free
                assert large.logprobs_of(text) == pytest.approx(score, abs=MOST_GAP[on.dtype])
                assert len(large.run(asked).tokens) == len(of_small)
                large.sleep()
                small.wake(tiny.files[1])
                assert small.run(asked).tokens == of_small
        finally:
            small.close()
    finally:
        large.close()
