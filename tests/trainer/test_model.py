import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrl.errors import TrainerError
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.policy import load_policy, response_logprobs, shards
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import pack_f32, pack_i32, unpack_f32, unpack_i32

CPU = torch.device("cpu")
VOCABULARY = 24  # of the model in conftest


def alone(module, sample, temperature=1.0):
    """Logprobs and entropies of one response, without padding, batch or slicing."""
    prompt, response = unpack_i32(sample.prompt), unpack_i32(sample.token_ids)
    with torch.no_grad():
        logits = module(torch.tensor([prompt + response])).logits[0].float() / temperature
    every = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return every.gather(-1, torch.tensor(response)[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_a_padded_batch_equal_those_of_each_response_alone(
    model_dir, samples, temperature
):
    policy = load_policy(model_dir, CPU)
    batch = collate(samples, CPU, VOCABULARY)
    with torch.no_grad():
        logprobs, entropy = response_logprobs(policy, batch, temperature)
    for i, sample in enumerate(samples):
        here = batch.mask[i] == 1
        expected, expected_entropy = alone(policy.module, sample, temperature)
        assert batch.targets[i][here].tolist() == unpack_i32(sample.token_ids)
        assert batch.rollout_logprobs[i][here].tolist() == unpack_f32(sample.rollout_logprobs)
        torch.testing.assert_close(logprobs[i][here], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(entropy[i][here], expected_entropy, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_changes_no_gradient(model_dir, samples):
    def gradients(activation_checkpointing):
        policy = load_policy(model_dir, CPU, activation_checkpointing=activation_checkpointing)
        batch = collate(samples, CPU, VOCABULARY)
        logprobs, _ = response_logprobs(policy, batch)
        (logprobs * batch.mask).sum().backward()
        return [p.grad for p in policy.module.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_shards_of_one_rank_are_the_tensors_of_the_checkpoint(save_model, tmp_path, dtype, tied):
    policy = load_policy(save_model(tmp_path, dtype, tied), CPU)
    assert {p.dtype for p in policy.module.parameters()} == {torch.float32}
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    full = {s.name: s.values.to(s.dtype).view(s.shape) for s in shards(policy, is_stored=True)}
    assert set(full) == set(stored) - ({"lm_head.weight"} if tied else set())
    for name, tensor in full.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, stored[name])


def test_a_bfloat16_checkpoint_computes_as_its_float32_copy(save_model, tmp_path, samples):
    """Rotary frequencies and other buffers must not have been rounded on the way."""
    policy = load_policy(save_model(tmp_path, torch.bfloat16), CPU)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = collate(samples[:1], CPU, VOCABULARY)
    with torch.no_grad():
        logprobs, _ = response_logprobs(policy, batch)
    torch.testing.assert_close(logprobs[0], alone(module, samples[0])[0], rtol=1e-5, atol=1e-5)


def test_an_empty_batch_is_a_row_of_nothing(model_dir):
    policy = load_policy(model_dir, CPU)
    batch = collate([], CPU, VOCABULARY)
    logprobs, _ = response_logprobs(policy, batch)
    assert batch.mask.sum() == 0
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize(
    ("prompt", "response", "logprobs", "reason"),
    [
        ([], [3], [-1], "nothing comes before its first token, which is trained"),
        ([3], [3], [-1, -1], "1 prompt tokens, 1 response tokens, 2 logprobs"),
        ([3], [3, 24], [-1, -1], "token id 24 is outside the vocabulary of 24"),
        ([-1], [3], [-1], "token id -1 is outside the vocabulary of 24"),
        ([3], [3, 3], [-1, math.nan], "a rollout logprob is nan"),
        ([3], [3], [-math.inf], "a rollout logprob is -inf"),
    ],
)
def test_a_sample_that_cannot_be_is_named(samples, prompt, response, logprobs, reason):
    wrong = TrainSample("r", pack_i32(prompt), pack_i32(response), pack_f32(logprobs), 1.0)
    with pytest.raises(TrainerError, match=f"^r: {reason}$"):
        collate([samples[0], wrong], CPU, VOCABULARY)


def test_the_vocabulary_of_a_policy_is_that_of_its_embedding(model_dir):
    assert load_policy(model_dir, CPU).vocabulary == VOCABULARY


def test_a_folder_without_a_model_is_named_in_one_line(tmp_path):
    with pytest.raises(TrainerError, match="not a model directory"):
        load_policy(tmp_path, CPU)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(TrainerError, match="cannot be loaded") as e:
        load_policy(tmp_path, CPU)
    assert "\n" not in str(e.value)
