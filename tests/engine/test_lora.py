"""Versions that are adapters, in engines that run a model: against peft within transformers."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from lightrl.adapters import is_adapter, public_name
from lightrl.engine.base import EngineLoaded, LoadWeights, LoraSpec
from lightrl.engine.model_dir import build_model, read_config
from lightrl.messages.responses import Sampling
from lightrl.weights.version.manifest import AdapterManifest, encode, finish_version, read_manifest
from lightrl.weights.version.tensors import write_tensors
from tests.engine.conftest import VLLM

LORA = LoraSpec(4, 16.0, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
# longer than a block of vLLM's KV cache, so that an older version's could be found
PROMPT = [2 + (7 * i) % 30 for i in range(300)]


def adapted(tiny, folder, version, base):
    """The model of version 1 with arbitrary adapters, and the file of these."""
    model = build_model(read_config(tiny.dir), torch.float32, "cpu", LORA)
    state = tiny.models[1].state_dict()
    torch.manual_seed(version)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            given = None if is_adapter(name) else state[public_name(name)]
            tensor.copy_(0.1 * torch.randn(tensor.shape) if given is None else given)
    adapters = [(public_name(n), p) for n, p in model.named_parameters() if is_adapter(n)]
    path = folder / f"adapters_{version}.bin"
    file = write_tensors(path, version, adapters)
    plain = read_manifest(file)
    manifest = AdapterManifest(plain.tensors, plain.num_bytes, plain.digests, base.digest)
    return model, finish_version(path, version, plain.num_bytes, encode(manifest))


@pytest.fixture(scope="module", params=["torch", VLLM])
def engine(request, start):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return start(request.param, slots=4, lora=LORA)


def load(engine, file, base):
    engine.child.send(LoadWeights(file, None, base))
    while True:
        event = engine.receive()
        if isinstance(event, EngineLoaded) or getattr(event, "policy_version", None):
            return event


def test_adapters_are_served_beside_their_base_and_no_keys_of_older_ones(
    engine, tiny, tmp_path, ask
):
    base = tiny.files[1]
    made = {version: adapted(tiny, tmp_path, version, base) for version in (1, 2)}
    known = replace(tiny, models={version: model for version, (model, _) in made.items()})
    sampling = Sampling(1.0)
    for version in (1, 2, 1):
        loaded = load(engine, made[version][1], base)
        assert loaded == EngineLoaded(version, made[version][1].digest, loaded.load_s)
        [outcome] = engine.run(version, sampling, ask("r", PROMPT, 20, seed=5))
        tokens, logprobs = known.reference(version, PROMPT, 5, sampling, 20)
        assert outcome.tokens == tokens
        assert outcome.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert known.reference(1, PROMPT, 5, sampling, 20) != known.reference(
        2, PROMPT, 5, sampling, 20
    )


def test_adapters_of_another_base_are_refused(engine, tiny, tmp_path):
    _, file = adapted(tiny, tmp_path, 1, tiny.files[1])
    failed = load(engine, file, tiny.files[2])
    assert "adapters of the version" in failed.reason
    failed = load(engine, file, None)
    assert "there is none here" in failed.reason
