"""Families of models, tiny and random: packed and by tiles they compute what transformers computes
for each response alone. Those that cannot say so, and compute it all the same."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrl.trainer.model import logprobs
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.policy import load_policy, response_logprobs
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import pack_f32, pack_i32, unpack_i32
from tests.support.families import EXPERTS, PACKED, VOCABULARY, saved

CPU = torch.device("cpu")
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PADDED = {
    "gpt_oss": ({"num_local_experts": 4, "layer_types": ["full_attention"] * 2}, "has sinks"),
    "qwen3_next": (EXPERTS | {"num_experts": 4} | LINEAR, "has layers of linear_attention"),
    "gemma2": ({"layer_types": ["full_attention"] * 2}, "has a soft cap"),
}


@pytest.fixture(scope="module")
def responses():
    """Lengths that make blocks of several sequences, of one and with padding; some exceed the
    sliding windows."""
    rng = random.Random(4)
    made = []
    for i, (prompt, response) in enumerate([(3, 9), (5, 40), (2, 9), (1, 1), (4, 8), (2, 70)]):
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(prompt + response)]
        ids = pack_i32(tokens[:prompt]), pack_i32(tokens[prompt:])
        made.append(TrainSample(f"r{i}", *ids, pack_f32([-1.0] * response), 1.0))
    return made


def alone(module, sample):
    prompt, response = unpack_i32(sample.prompt), unpack_i32(sample.token_ids)
    logits = module(torch.tensor([prompt + response]), use_cache=False).logits[
        0, len(prompt) - 1 : -1
    ]
    every = logits.log_softmax(-1)
    return every.gather(1, torch.tensor(response)[:, None])[:, 0], -(every.exp() * every).sum(-1)


def assert_as_alone(policy, folder, responses):
    """Logprobs, entropies and the gradients of both."""
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    batch = collate(responses, CPU, VOCABULARY, policy.way.packed)
    assert (
        batch.ids.numel()
        == sum(  # no padding at all
            len(s.prompt + s.token_ids) // 4 - 1 for s in responses
        )
        or not policy.way.packed
    )
    logprobs, entropy = response_logprobs(policy, batch, is_entropy_trained=True)
    factors = torch.randn_like(logprobs)
    expected_loss = torch.zeros(())
    for i, sample in enumerate(responses):
        expected, expected_entropy = alone(own, sample)
        n = len(expected)
        torch.testing.assert_close(logprobs[i, :n], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy[i, :n], expected_entropy, rtol=1e-5, atol=1e-5)
        expected_loss = expected_loss + (factors[i, :n] * (expected + expected_entropy)).sum()
    (factors * (logprobs + entropy)).sum().backward()
    expected_loss.backward()
    theirs = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    ours = {n: p.grad for n, p in policy.module.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    norm = torch.nn.utils.get_total_norm(theirs.values())
    difference = torch.nn.utils.get_total_norm([ours[n] - theirs[n] for n in ours])
    assert difference <= 1e-5 * norm


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch):
    monkeypatch.setitem(logprobs.TILE_VALUES, "cpu", 1)


@pytest.mark.parametrize("family", PACKED)
def test_a_family_packed_and_by_tiles_is_each_response_alone(tmp_path, responses, family):
    folder = saved(tmp_path, family, PACKED[family])
    policy = load_policy(folder, CPU)
    assert policy.way.notes == ()
    assert policy.way.packed
    assert policy.way.projection is not None
    assert_as_alone(policy, folder, responses)


@pytest.mark.parametrize("family", PADDED)
def test_a_family_that_cannot_be_packed_says_so_and_is_padded(tmp_path, responses, family):
    settings, reason = PADDED[family]
    folder = saved(tmp_path, family, settings)
    policy = load_policy(folder, CPU)
    [note] = policy.way.notes
    assert reason in note
    assert "\n" not in note
    assert not policy.way.packed
    assert policy.way.projection is not None
    assert_as_alone(policy, folder, responses)
