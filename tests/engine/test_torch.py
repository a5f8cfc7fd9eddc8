"""The torch engine on several architectures, against transformers without cache or batch."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.engine.base import EngineSpec
from lightrl.engine.model_dir import check_fits, tensor_targets
from lightrl.engine.sampling import keys, sample
from lightrl.engine.torch.engine import TorchEngine
from lightrl.errors import EngineError, WeightsError
from lightrl.history.gate import Gate
from lightrl.messages.responses import PromptHistory, Sampling
from lightrl.weights.version.layout import plan
from lightrl.weights.version.tensors import write_tensors
from lightrl.wire import pack_i32

COMMON = {
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "vocab_size": 40,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "llama, untied": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 16},
    "gemma3, mixed attention": {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2, learned positions": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 256,
        "vocab_size": 40,
        "initializer_range": 0.2,
        "dtype": "float32",
    },
}


def model_of(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    return model, write_tensors(folder / "w.bin", 1, model.named_parameters())


class Open(Gate):
    """Drafts always pay."""

    def width(self, batch):
        return self.max_width


def run(engine, requests):
    """Tokens and logprobs by response, at temperature 1."""
    for request in requests:
        engine.add(request, Sampling(1.0))
    tokens = {request.response: [] for request in requests}
    logprobs = {request.response: [] for request in requests}
    while engine.num_unfinished():
        for d in engine.step():
            tokens[d.response] += d.token_ids
            logprobs[d.response] += d.logprobs
    return tokens, logprobs


def spec_of(folder, **fields):
    return EngineSpec(
        "torch", str(folder), "float32", **{"max_model_length": 160, "slots": 4, **fields}
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_transformers(tmp_path, ask, name):
    """More responses than slots, of all lengths, past the first growth of the cache; two share a
    prompt."""
    config = ARCHITECTURES[name] if name.startswith("gpt2") else COMMON | ARCHITECTURES[name]
    model, file = model_of(tmp_path, config)
    engine = TorchEngine(spec_of(tmp_path))
    engine.load_weights(file)
    prompts = [[2 + (5 * (i // 2) + 3 * j) % 38 for j in range(3 + i // 2 * 9)] for i in range(6)]
    limits = [20, 100, 45, 7, 139, 33]  # the fifth is as long as the engine allows
    requests = [
        ask(f"g{i}#0", p, n, seed=i) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    tokens, logprobs = run(engine, requests)
    one = np.ones(1)
    with torch.inference_mode():
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            got = tokens[f"g{i}#0"]
            assert len(got) == limit
            logits = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
            noise = keys(np.full(limit, i), np.arange(len(prompt), len(prompt) + limit))
            same = one.repeat(limit)
            ids, expected = sample(logits, noise, same, same, np.zeros(limit, np.int64))
            assert got == ids.tolist()
            assert logprobs[f"g{i}#0"] == pytest.approx(expected.tolist(), abs=1e-4)
    # Many tokens at once, right ones and (after every seventh) wrong ones: the same once more.
    engine = TorchEngine(spec_of(tmp_path, max_window=8))
    engine.load_weights(file)
    engine._drafter.gate = Open(8, is_padded=True)
    for response, right in tokens.items():
        nearly = [t if j % 7 else (t + 1) % 40 for j, t in enumerate(right, 1)]
        engine.remember((PromptHistory(response[:-2], (pack_i32(nearly),), (None,)),))
    again, close = run(engine, requests)
    assert again == tokens
    for response, expected in logprobs.items():
        assert close[response] == pytest.approx(expected, abs=1e-4)
    drafting = engine.load().drafting
    assert drafting.accepted > 100 < drafting.drafted - drafting.accepted


def test_a_version_that_does_not_fit_the_model_is_refused(tmp_path):
    model, _ = model_of(tmp_path, COMMON | ARCHITECTURES["llama, untied"])
    engine = TorchEngine(spec_of(tmp_path))
    named = dict(model.named_parameters())
    path = tmp_path / "other.bin"
    without = {k: v for k, v in named.items() if k != "lm_head.weight"}
    with pytest.raises(WeightsError, match=r"lm_head\.weight: missing"):
        engine.load_weights(write_tensors(path, 1, without.items()))
    with pytest.raises(WeightsError, match="no such tensor"):
        engine.load_weights(write_tensors(path, 1, {**named, "extra": torch.zeros(1)}.items()))
    with pytest.raises(WeightsError, match="shape"):
        engine.load_weights(
            write_tensors(path, 1, {**named, "lm_head.weight": torch.zeros(3, 32)}.items())
        )


def test_a_version_with_the_layout_of_the_last_is_proved_all_the_same(tmp_path):
    model, file = model_of(tmp_path, COMMON | ARCHITECTURES["llama, untied"])
    engine = TorchEngine(spec_of(tmp_path))
    engine.load_weights(file)
    doubled = {name: 2 * tensor for name, tensor in model.named_parameters()}
    other = write_tensors(tmp_path / "other.bin", 2, doubled.items())
    engine.load_weights(other)
    loaded = dict(engine._model.named_parameters())
    assert torch.equal(loaded["model.norm.weight"].cpu(), doubled["model.norm.weight"])
    with pytest.raises(WeightsError, match="another digest"):
        engine.load_weights(replace(other, digest=file.digest))


class WithRouterBias(torch.nn.Module):
    """A persistent buffer, as some routers have, one that is not, and two names for one tensor."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.inner.weight
        self.register_buffer("bias", torch.arange(4.0))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


def test_persistent_buffers_are_given_and_tied_names_once():
    model = WithRouterBias()
    targets = tensor_targets(model)
    given = plan(
        (name, "float32", tuple(targets[name].shape))
        for name in ("bias", "inner.weight", "inner.bias")
    )
    check_fits(targets, given, 1)
    with pytest.raises(WeightsError, match="bias: missing"):
        check_fits(targets, given[1:], 1)
    with pytest.raises(WeightsError, match=r"inner\.weight: given under another name"):
        check_fits(
            targets,
            plan(
                (*((t.name, t.dtype, t.shape) for t in given), ("head.weight", "float32", (4, 4)))
            ),
            1,
        )


def test_kv_cache_gib_limits_how_many_responses_run_at_once(tmp_path, ask):
    model_of(tmp_path, COMMON | ARCHITECTURES["llama, untied"])
    bytes_per_token = 2 * 3 * 2 * 8 * 4
    engine = TorchEngine(
        spec_of(tmp_path, slots=64, kv_cache_gib=2.5 * 160 * bytes_per_token / 2**30)
    )
    for i in range(5):
        engine.add(ask(f"r{i}", [4, 5], 9), Sampling(1.0))
    engine.step()
    assert (engine.load().running, engine.load().waiting) == (2, 3)
    with pytest.raises(EngineError, match="kv_cache_gib"):
        TorchEngine(spec_of(tmp_path, kv_cache_gib=1e-9))
