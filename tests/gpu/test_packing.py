"""Sequences back to back on a GPU: torch's variable-length kernels against padded SDPA, and the
memory of logits that are never there as a whole."""

import random

import pytest
import torch
from gpu_lib.shapes import CALM, SHAPES, make_model, shape_for
from torch.distributed.fsdp import register_fsdp_forward_method

from lightrl.trainer.model import attention
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.forward import Way
from lightrl.trainer.model.forward import response_logprobs as logprobs_of
from lightrl.trainer.model.policy import load_policy, response_logprobs
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import pack_f32, pack_i32

MOST_DIFFERENCE = 0.02  # of logprobs in bfloat16, on average; an H200 showed 0.013
GIB = 1 << 30


@pytest.fixture(scope="module")
def policy(device, tmp_path_factory):
    folder, shape = tmp_path_factory.mktemp("packing") / "model", shape_for("0.5b")
    make_model(folder, shape, device, deviation=CALM)
    return load_policy(folder, torch.device(device, 0))


def samples_of(lengths, vocabulary):
    rng = random.Random(1)
    made = []
    for i, n in enumerate(lengths):
        ids = [rng.randrange(vocabulary) for _ in range(4 + n)]
        sides = pack_i32(ids[:4]), pack_i32(ids[4:])
        made.append(TrainSample(f"r{i}", *sides, pack_f32([-1.0] * n), 1.0))
    return made


def test_packed_kernels_agree_with_padded_sdpa(device, policy, figure, monkeypatch):
    assert policy.way.packed, policy.way.notes
    calls = []
    varlen = attention._varlen
    monkeypatch.setattr(attention, "_varlen", lambda *args: (calls.append(1), varlen(*args))[1])
    samples = samples_of([7, 300, 12, 45, 200, 1], policy.vocabulary)
    packed = collate(samples, policy.device, policy.vocabulary)
    padded = collate(samples, policy.device, policy.vocabulary, packed=False)
    with torch.no_grad():
        found, _ = response_logprobs(policy, packed)
        policy.module.set_attn_implementation("sdpa")
        expected, _ = logprobs_of(policy.module, Way(), padded)
        policy.module.set_attn_implementation(attention.NAME)
    gap = float(((found - expected).abs() * packed.mask).sum() / packed.mask.sum())
    figure(f"packed against padded, {device}: mean difference of logprobs", gap)
    assert gap <= MOST_DIFFERENCE
    assert bool(calls) == (device == "cuda")


def test_the_head_adds_little_to_the_peak_of_the_trunk(device, policy, figure):
    """A CPU has no memory of its own to measure: there the passes alone are tried."""
    samples = samples_of([1020 if device == "cuda" else 20] * 8, policy.vocabulary)
    batch = collate(samples, policy.device, policy.vocabulary)
    inputs = {"position_ids": batch.positions, "packing": batch.packing, "use_cache": False}
    # As a forward pass, so that FSDP gathers what it needs.
    base = policy.module.base_model
    policy.module.trunk = lambda ids: base(input_ids=ids, **inputs).last_hidden_state
    register_fsdp_forward_method(policy.module, "trunk")

    def peak(run):
        for _ in range(2):  # gradients are there in the second
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            run()
        return torch.cuda.max_memory_allocated() if device == "cuda" else 0

    def trunk():
        policy.module.trunk(batch.ids).float().square().mean().backward()

    def whole():
        logprobs, _ = response_logprobs(policy, batch)
        (logprobs * batch.mask).sum().backward()

    added = peak(whole) - peak(trunk)
    vocabulary = SHAPES[shape_for("0.5b")]["vocab_size"]
    figure(f"peak that a head of {vocabulary:,} words adds: GiB", added / GIB)
    assert added <= 1.5 * GIB
