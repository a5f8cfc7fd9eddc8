"""Adapters in place of the model: what is trained, published, saved and compared with, on one
rank and on two."""

import asyncio
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen2Config

from lightrl.adapters import PREFIX, is_adapter
from lightrl.engine.base import LoraSpec
from lightrl.engine.model_dir import build_model
from lightrl.errors import ConfigError, LightRLError
from lightrl.launch.export import export_checkpoint
from lightrl.messages.weights import WeightsBase
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.lora import adapters_off
from lightrl.trainer.model.policy import load_policy, response_logprobs
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    Published,
    Save,
    Saved,
    Update,
)
from lightrl.trainer.rank.canary import _logits
from lightrl.trainer.served import ServedVersions
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import read_manifest
from lightrl.weights.version.tensors import read_tensors
from lightrl.weights.version.write import TensorBytes, write_version
from tests.trainer.test_rank import started
from tests.trainer.test_rank import step as steps

TENSOR = TensorBytes("w", "uint8", (8,), memoryview(bytes(8)))
OTHER = TensorBytes("w", "uint8", (9,), memoryview(bytes(9)))
LORA = {"path": "unused", "lora": {"rank": 4, "alpha": 8}}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def read(file):
    return dict(read_tensors(file))


def save(rank, folder, number):
    path = folder / "run" / "checkpoints" / f"step_{number}"
    said = [Done(number), Saved(str(path)), Saved(str(path), is_export=True)]
    assert rank.save(Save(number, str(path), True)) == said
    return path


def step(rank, samples, number):
    totals = (len(samples), sum(len(s.token_ids) // 4 for s in samples))
    list(rank.perform(Accumulate(number, (tuple(samples),))))
    [finished] = rank.perform(Update(number, *totals, number + 1))
    return finished.published, finished.metrics


def test_a_version_is_the_adapters_alone_beside_a_base_that_stays(new_rank, samples):
    rank = new_rank(model=LORA)
    begin = rank.started.published
    base = read(begin.base)
    published, metrics = step(rank, samples, 0)
    assert published.base == begin.base
    assert read_manifest(published.file).base == begin.base.digest
    whole = new_rank()
    assert begin.base.digest == whole.started.published.file.digest
    assert read_manifest(begin.base).base == ""
    before, after = read(begin.file), read(published.file)
    assert all(name.startswith(PREFIX) and ".lora_" in name for name in after)
    assert not any("lm_head" in name for name in after)
    assert len(after) == 2 * 7 * 2
    assert all(t.count_nonzero() == 0 for n, t in before.items() if ".lora_B." in n)
    assert all(t.count_nonzero() > 0 for n, t in after.items())
    assert all(torch.equal(t, base[n]) for n, t in read(published.base).items())
    assert metrics["grad_norm"] > 0


def test_the_export_is_what_peft_reads_and_merged_what_transformers_does(
    new_rank, samples, tmp_path, model_dir
):
    rank = new_rank(model=LORA)
    step(rank, samples, 0)
    path = save(rank, tmp_path, 1)
    stored = sum(f.stat().st_size for f in (path / "state").iterdir())
    assert stored < 4 * 12 * sum(p.numel() for p in rank.learner.parameters)
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = _logits(rank.learner.policy, text)
    ids = torch.tensor([text])
    config = json.loads((path / "hf" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["base_model_name_or_path"] == str(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    before = base(ids).logits[0]
    found = PeftModel.from_pretrained(base, path / "hf").eval()(ids).logits[0]
    assert (found - expected).abs().max() < 1e-5 < (before - expected).abs().max()
    export_checkpoint(path, tmp_path / "merged", 2000, is_merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits[0]
    assert (merged - expected).abs().max() < 1e-5
    export_checkpoint(path, tmp_path / "alone", 2000)
    shutil.rmtree(path / "hf")  # its user's
    again = new_rank(model=LORA, start_step=1)
    assert again.started.published.file.digest == rank.file.digest


def test_the_reference_is_the_model_without_adapters(new_rank, samples, model_dir):
    rank = new_rank(model=LORA, algorithm={"kl_coef": 0.1})
    assert rank.learner.reference is None
    _, first = step(rank, samples, 0)
    _, second = step(rank, samples, 1)
    assert first["loss/kl"] == 0 < second["loss/kl"]
    policy = rank.learner.policy
    alone = load_policy(model_dir, policy.device)
    batch = collate(samples[:4], policy.device, policy.vocabulary, policy.way.packed)
    with torch.no_grad():
        expected, _ = response_logprobs(alone, batch)
        with adapters_off(policy.module):
            found, _ = response_logprobs(policy, batch)
        trained, _ = response_logprobs(policy, batch)
    assert torch.equal(found, expected)
    assert (trained - expected).abs().max() > 1e-3
    assert all(p.requires_grad for p in rank.learner.parameters)


def test_a_base_in_bfloat16_stays_that_and_its_adapters_are_float32(
    new_rank, samples, save_model, tmp_path
):
    folder = save_model(tmp_path / "bf16", torch.bfloat16)
    rank = new_rank(folder, model={**LORA, "path": str(folder), "dtype": "bfloat16"})
    module = rank.learner.policy.module
    kinds = {p.requires_grad: p.dtype for p in module.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    published, metrics = step(rank, samples, 0)
    assert {t.dtype for t in read(published.file).values()} == {torch.bfloat16}
    assert metrics["grad_norm"] > 0


@pytest.mark.e2e
def test_two_ranks_train_adapters_like_one(start, new_rank, processes, samples):
    settings = {
        "model": LORA,
        "algorithm": {"name": "dr_grpo", "kl_coef": 0.05},
        "train": {"optim": {"lr": 1e-3}},
    }

    async def on_two_ranks():
        async with processes(start(**settings), world=2) as ranks:
            [begin, _] = await started(ranks)
            await steps(ranks, samples, 0)
            published, metrics = await steps(ranks, samples, 1)
            return begin.published, published, metrics

    begin, published, metrics = asyncio.run(on_two_ranks())
    alone = new_rank(**settings)
    assert begin.file.digest == alone.started.published.file.digest
    assert begin.base.digest == alone.started.published.base.digest
    step(alone, samples, 0)
    expected_file, expected_metrics = step(alone, samples, 1)
    for key in ("loss/policy", "loss/kl", "grad_norm", "entropy"):
        assert metrics[key] == pytest.approx(expected_metrics[key], rel=1e-4), key
    expected, found = read(expected_file.file), read(published.file)
    difference = math.sqrt(sum((found[n] - expected[n]).square().sum().item() for n in expected))
    assert difference <= 2e-6 * math.sqrt(sum(t.square().sum().item() for t in expected.values()))


def test_targets_that_there_are_not_are_named_with_the_nearest(new_rank):
    def refused(*targets):
        with pytest.raises(ConfigError) as caught:
            new_rank(model={"path": "unused", "lora": {"rank": 4, "targets": targets}})
        return str(caught.value)

    assert refused("q_porj") == (
        "model.lora.targets: 'q_porj' is the name of no linear layer of Qwen2ForCausalLM; there "
        "are q_proj, v_proj, o_proj"
    )
    assert "'lm_head' is the name of no linear layer" in refused("q_proj", "lm_head")
    rank = new_rank(
        model={"path": "unused", "lora": {"rank": 4, "targets": ["layers.1.mlp.up_proj"]}}
    )
    names = {n.partition(".lora_")[0] for n in read(rank.started.published.file)}
    assert names == {f"{PREFIX}model.layers.1.mlp.up_proj"}


def test_a_checkpoint_without_adapters_cannot_be_merged(new_rank, samples, tmp_path):
    rank = new_rank()
    step(rank, samples, 0)
    path = save(rank, tmp_path, 1)
    with pytest.raises(LightRLError, match="has no adapters that could be merged"):
        export_checkpoint(path, tmp_path / "merged", 2000, is_merged=True)
    assert not (tmp_path / "merged").exists()


def test_optimizer_and_version_hold_no_more_than_a_fiftieth_of_a_real_model(new_rank, samples):
    rank = new_rank(model=LORA)
    published, _ = step(rank, samples, 0)
    trained = sum(p.numel() for p in rank.learner.parameters)
    state = rank.learner.optimizer.state
    assert sum(s["exp_avg"].numel() for s in state.values()) == trained
    assert sum(t.numel() for t in read(published.file).values()) == trained
    shape = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2}
    config = Qwen2Config(**shape, **heads, vocab_size=151936, tie_word_embeddings=True)
    model = build_model(config, torch.bfloat16, "meta", LoraSpec(32, 32.0))  # Qwen2.5-3B
    sizes = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        sizes[is_adapter(name)] += parameter.numel()
    assert sizes[True] <= 0.02 * sizes[False]


def test_ranks_that_start_again_bring_a_base_that_is_served_already(tmp_path):
    async def scenario():
        server = WeightServer()
        await server.start("127.0.0.1")
        versions = ServedVersions(server)
        file = write_version(tmp_path / "v0.bin", 0, [TENSOR])
        first, again = (write_version(tmp_path / f"base-{i}.bin", 0, [OTHER]) for i in range(2))
        one = await versions.serve(Published(file, base=first))
        other = await versions.serve(Published(file, base=again))
        assert one == other
        assert one.base == WeightsBase(first.digest, first.num_bytes, first.manifest_bytes())
        await versions.close()
        await server.close()
        return Path(first.path), Path(again.path)

    kept, removed = asyncio.run(scenario())
    assert kept.exists()
    assert not removed.exists()
