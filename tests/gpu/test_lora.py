"""Adapters on a GPU: versions of them take each other's place in an engine that goes on running,
whose CUDA graphs and keys stay behind.

Nothing says that a token is the one a float32 model draws: what the engine says of its own tokens
is held against both versions.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightrl.engine.base import EngineLoaded
from lightrl.messages.responses import Sampling
from tests.engine.conftest import (  # noqa: F401 - fixtures
    EngineClient,
    TinyModel,
    ask,
    origin_of_engines,
    start,
    tiny,
)
from tests.engine.test_lora import LORA, PROMPT, adapted, load

MOST_GAP = {"bfloat16": 0.05, "float32": 1e-4}  # mean of |float32 model's logprob - engine's|
NUM_TOKENS = 60
KINDS = [("torch", False), ("vllm", False), ("vllm", True)]


@pytest.fixture(scope="module", params=KINDS, ids=["torch", "vllm-eager", "vllm-graphs"])
def engine(
    device: str,
    start: Callable[..., Any],  # noqa: F811
    request: pytest.FixtureRequest,
) -> EngineClient:
    kind, has_graphs = request.param
    fields: dict[str, Any] = {"dtype": "bfloat16" if device == "cuda" else "float32"}
    if kind == "vllm":
        request.getfixturevalue("vllm")
        if device == "cpu" and has_graphs:
            pytest.skip("there are no CUDA graphs on a CPU")
        fields["kv_cache_gib"] = 0.5
        if device == "cuda":
            args = {"gpu_memory_utilization": 0.1, "enforce_eager": not has_graphs}
            fields["engine_args"] = args
    return start(kind, slots=4, lora=LORA, **fields)


@torch.inference_mode()
def scored(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """float32 [tokens]: the logprob of each token of a response."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def test_adapters_replace_each_other_in_place_and_leave_no_keys(
    device,
    engine,
    tiny,  # noqa: F811
    tmp_path,
    ask,  # noqa: F811
    figure,
):
    base = tiny.files[1]
    made = {version: adapted(tiny, tmp_path, version, base) for version in (1, 2)}
    dtype = "bfloat16" if device == "cuda" else "float32"
    for version in (1, 2, 1):
        loaded = load(engine, made[version][1], base)
        assert isinstance(loaded, EngineLoaded), loaded
        request = ask("r", PROMPT, NUM_TOKENS, seed=5)
        [outcome] = engine.run(version, Sampling(1.0), request)
        said = torch.tensor(outcome.logprobs)
        gaps = {
            v: float((scored(model, PROMPT, outcome.tokens) - said).abs().mean())
            for v, (model, _) in made.items()
        }
        figure(f"adapters in the {engine.kind} engine, {dtype}: gap to the trainer", gaps[version])
        assert gaps[version] <= MOST_GAP[dtype]
        assert gaps[3 - version] > 4 * MOST_GAP["bfloat16"]
