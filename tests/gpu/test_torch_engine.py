"""The torch engine on a GPU: coupled sampling in each dtype, its distribution, the memory it gives
back."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_lib.shapes import SHAPES, make_config, make_module

from lightrl.engine.base import EngineSpec
from lightrl.messages.responses import PromptHistory, Sampling
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import write_tensors
from lightrl.wire import pack_i32
from tests.gpu.conftest import DEVICE
from tests.gpu.coupled import check, requests
from tests.gpu.driver import Asked, Driven, Outcome

ALSO_ON_CPU = True
SIZES = ("tiny", "0.5b")
TINY = {
    "initializer_range": 0.1,
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}
DTYPES = ("float32", pytest.param("bfloat16", marks=pytest.mark.e2e))


@dataclass
class Model:
    """A model directory, a version of its weights, and what bounds the rounding in it."""

    dir: Path
    version: VersionFile
    shape: dict[str, Any]

    @property
    def vocabulary(self) -> int:
        return self.shape["vocab_size"]

    def engine(self, dtype: str, slots: int, max_window: int = 0) -> Driven:
        made = Driven(EngineSpec("torch", str(self.dir), dtype, 256, slots, max_window=max_window))
        made.load(self.version)
        return made


@pytest.fixture(scope="session")
def models(device: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(size: str) -> Model:
        if size not in made:
            folder = tmp_path_factory.mktemp("model")
            shape, changes = (
                ("small", TINY if size == "tiny" else {})
                if size == "tiny" or device == "cpu"
                else (size, {})
            )
            make_config(folder, shape, **changes)
            module = make_module(folder, device, torch.bfloat16)
            version = write_tensors(folder / "v1.bin", 1, module.named_parameters())
            made[size] = Model(folder, version, SHAPES[shape] | changes)
        return made[size]

    return get


@pytest.fixture(params=SIZES)
def model(device: str, models: Callable[[str], Model], request: pytest.FixtureRequest) -> Model:
    if request.param != "tiny" and device == "cpu" and DEVICE == "cuda":
        pytest.skip("on a CPU the tiny model will do")
    return models(request.param)


@pytest.fixture
def tiny(models: Callable[[str], Model]) -> Model:
    return models("tiny")


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_company_speculation_and_a_move_change_no_more_than_rounding_does(
    device, model, dtype, figure
):
    """The same tokens but where a uniform lies within rounding of a boundary; how many, is a
    figure."""
    asked = requests(
        model.vocabulary, 16 if device == "cuda" else 8, 4, 72 if device == "cuda" else 40
    )
    engine = model.engine(dtype, slots=64, max_window=8)
    label = f"torch engine, {model.shape['num_hidden_layers']} layers"
    changed = check(engine, model.shape, dtype, asked, label, figure)
    if dtype == "float32" and model.vocabulary < 100:
        assert max(changed.values()) <= 1  # of 2 in 100,000 tokens or fewer
    engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_batch_gives_the_same_bits(device, model, dtype):
    """Whatever differs between batches of different sizes: one and the same run repeats."""
    asked = requests(model.vocabulary, 8, 4, 40)
    engine = model.engine(dtype, slots=32)
    one, other = engine.run(asked), engine.run(asked)
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs
    engine.close()


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.e2e), 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_have_the_probabilities_of_their_logits(device, tiny, dtype, temperature):
    """Of the first token, and of the second after the likeliest first, which was drafted for
    all."""
    num, prompt = 3000 if device == "cuda" else 1200, (5, 9, 4, 11)
    engine = tiny.engine(dtype, slots=256, max_window=4)
    likeliest = likeliest_after(engine, prompt)
    next_likeliest = likeliest_after(engine, (*prompt, likeliest))
    histories = (PromptHistory("p@1", (pack_i32([likeliest, next_likeliest, 0]),), (None,)),)
    asked = [Asked(f"p@1#{i}", prompt, 1000 + i, 3) for i in range(num)]
    got = engine.run(asked, Sampling(temperature), histories, wanted=None, drafts="all")
    assert got.accepted > num // 50
    first = np.array([t[0] for t in got.tokens.values()])
    assert_drawn_from(got, asked, range(num), 0, first, temperature)
    chosen = [i for i in range(num) if first[i] == likeliest]
    assert len(chosen) > num // 30
    second = np.array([got.tokens[asked[i].name][1] for i in chosen])
    assert_drawn_from(got, asked, chosen, 1, second, temperature)
    engine.close()


def likeliest_after(engine: Driven, context: tuple[int, ...]) -> int:
    (draw,) = engine.run([Asked("free#0", context, 1, 1)], wanted=None).draws.values()
    return int(draw.logits.argmax())


def assert_drawn_from(
    got: Outcome, asked: list[Asked], chosen: Any, index: int, drawn: Any, temperature: float
):
    """Pearson's chi-square at 1 in 10,000 (Wilson and Hilferty); rare tokens count as one."""
    logits = (
        np.stack([got.draws[asked[i].noise(index)].logits for i in chosen]).astype(np.float64)
        / temperature
    )
    each = np.exp(logits - logits.max(1, keepdims=True))
    expected = (each / each.sum(1, keepdims=True)).sum(0)
    seen = np.bincount(drawn, minlength=len(expected))
    is_rare = expected < 5
    expected = np.append(expected[~is_rare], expected[is_rare].sum() + 1e-9)
    seen = np.append(seen[~is_rare], seen[is_rare].sum())
    degrees = max(1, len(expected) - 1)
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert ((seen - expected) ** 2 / np.maximum(expected, 1e-3)).sum() < limit


def in_use(device: str) -> int:
    """Bytes of live tensors."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.e2e
def test_memory_comes_back_after_a_reset_and_after_the_engine(device, model, figure):
    before = in_use(device)
    asked = requests(model.vocabulary, 8, 4, 48)
    engine = model.engine("bfloat16", slots=16)
    held = []
    for _ in range(3):
        engine.run(asked[:20])
        engine.run(asked, stop_after=10)  # and what runs is aborted
        engine.load(model.version)
        held.append(in_use(device) - before)
    figure(
        f"memory of a torch engine, {model.shape['num_hidden_layers']} layers, bfloat16: MiB",
        held[-1] / 2**20,
    )
    assert held[2] == held[1] <= held[0] + 2**20
    engine.close()
    del engine
    assert in_use(device) - before < 2**20


def test_an_engine_that_sleeps_gives_its_memory_back(device, model, figure):
    before = in_use(device)
    asked = requests(model.vocabulary, 8, 4, 48)
    engine = model.engine("bfloat16", slots=16)
    expected = engine.run(asked)
    held = in_use(device) - before
    num_bytes = engine.engine.sleep()
    figure(f"asleep: MiB freed by a torch engine of {held >> 20}", num_bytes >> 20)
    assert in_use(device) - before < held - 0.9 * num_bytes
    engine.wake(model.version)
    assert engine.run(asked).tokens == expected.tokens
    assert in_use(device) - before <= held + 2**20
