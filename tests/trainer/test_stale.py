"""Tokens of older policy versions: what a step makes of them against the exact weighted
gradient."""

import math
import random

import pytest
import torch

from lightrl.config.algorithm import ALGORITHMS, WHITENED
from lightrl.trainer.model.policy import load_policy
from lightrl.trainer.protocol import Accumulate, TrainSample, Update
from lightrl.wire import pack_f32, pack_i32, unpack_f32, unpack_i32
from tests.support.tiers import e2e

CPU = torch.device("cpu")
VOCABULARY = 24  # of the model in conftest
LR = 1e-2  # large: the versions shall differ
# The others compute when the step ends, with advantages of the whole of it: see test_step.py.
STREAMED = sorted({*ALGORITHMS} - WHITENED)


def logprobs_of(module, prompt, response):
    """Of one response alone, [len(response)], with gradient."""
    every = (
        module(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    )
    return every.gather(-1, torch.tensor(response)[:, None])[:, 0]


def sample(name, modules, prompt, advantage):
    """One response, its token t drawn from the model `modules[t]`."""
    response, logprobs = [], []
    for module in modules:
        with torch.no_grad():
            every = module(torch.tensor([[*prompt, *response]])).logits[0, -1].log_softmax(-1)
        response.append(int(torch.multinomial(every.exp(), 1)))
        logprobs.append(every[response[-1]].item())
    return TrainSample(name, pack_i32(prompt), pack_i32(response), pack_f32(logprobs), advantage)


def finish(samples, step):
    return Update(step, len(samples), sum(len(s.token_ids) // 4 for s in samples), step + 1)


def two_steps(rank, samples, model_dir):
    """Trains two steps; the models of versions 0, 1 and 2, of which the rank now holds the last."""
    versions = []
    for step in range(3):
        copy = load_policy(model_dir, CPU).module
        copy.load_state_dict(rank.learner.policy.module.state_dict())
        versions.append(copy)
        if step < 2:
            list(rank.perform(Accumulate(step, (tuple(samples),))))
            list(rank.perform(finish(samples, step)))
    return versions


def gradients(rank, samples, step=2):
    """The un-normalised sum over some samples, and the metrics of the step."""
    list(rank.perform(Accumulate(step, (tuple(samples[:7]), tuple(samples[7:])))))
    found = [p.grad.clone() for p in rank.learner.policy.module.parameters()]
    [finished] = rank.perform(finish(samples, step))
    return found, finished.metrics


def distance(found, expected):
    """Relative to the norm of all expected values."""
    difference = sum((a - b).square().sum().item() for a, b in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(b.square().sum().item() for b in expected))


@pytest.mark.parametrize(
    "name",
    ["gspo", "dapo", "cispo", *e2e(n for n in STREAMED if n not in ("gspo", "dapo", "cispo"))],
)
def test_samples_of_three_versions_have_the_importance_weighted_gradient(
    new_rank, samples, model_dir, name
):
    cap = 2.0
    settings = {"train": {"optim": {"lr": LR}}}
    rank = new_rank(algorithm={"name": name, "tis_bounds": (0, cap)}, **settings)
    unweighted = new_rank(algorithm={"name": name}, **settings)
    old, newer, current = two_steps(rank, samples, model_dir)
    two_steps(unweighted, samples, model_dir)
    unweighted.learner.policy.module.load_state_dict(current.state_dict())
    rng, stale = random.Random(11), []
    torch.manual_seed(11)
    for i in range(16):  # some tokens of each version, as in a response that outlived two updates
        born = (
            [old] * rng.randint(0, 6) + [newer] * rng.randint(0, 6) + [current] * rng.randint(1, 4)
        )
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(2, 5))]
        stale.append(sample(f"p{i}", born, prompt, rng.choice([-1.0, 0.5, 1.5])))

    total, weights, num_truncated = torch.zeros(()), [], 0
    for s in stale:
        logprobs = logprobs_of(current, unpack_i32(s.prompt), unpack_i32(s.token_ids))
        ratios = (logprobs.detach() - torch.tensor(unpack_f32(s.rollout_logprobs))).exp()
        weight = ratios.clamp(max=cap)
        share = len(ratios) if name in ("grpo", "gspo") else 1
        # a ratio of the whole response has the mean of the weights of its tokens
        each = weight.mean() if name in ("gspo", "rloo") else weight
        total = total - (each * s.advantage * logprobs).sum() / share
        weights += weight.tolist()
        num_truncated += int((ratios > cap).sum())
    expected = torch.autograd.grad(total, list(current.parameters()))

    found, metrics = gradients(rank, stale)
    assert distance(found, expected) <= 1e-4
    assert 0 < num_truncated < len(weights) / 2
    assert metrics["tis/mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert (metrics["tis/min"], metrics["tis/max"]) == pytest.approx((min(weights), cap), rel=1e-4)
    squares = sum(w * w for w in weights)
    assert metrics["tis/ess"] == pytest.approx(
        sum(weights) ** 2 / (len(weights) * squares), rel=1e-4
    )
    assert metrics["tis/truncated_share"] == pytest.approx(num_truncated / len(weights))
    assert metrics["train_rollout_logprob_abs_diff"] > 0.05
    assert metrics["clip_frac"] == 0
    plain, metrics = gradients(unweighted, stale)
    assert distance(plain, expected) > 0.1  # they are stale indeed
    assert not any(key.startswith("tis/") for key in metrics)


@pytest.mark.parametrize("name", ["grpo", *e2e(n for n in STREAMED if n != "grpo")])
def test_in_expectation_stale_tokens_have_the_gradient_of_fresh_ones(
    new_rank, samples, model_dir, name
):
    """Exactly, over all 24 responses of one token: each with its probability under the old
    policy."""
    rank = new_rank(algorithm={"name": name, "tis_bounds": (0, 1e6)}, train={"optim": {"lr": LR}})
    old, _, current = two_steps(rank, samples, model_dir)
    prompt, rng = [5, 9, 3], random.Random(2)
    values = [rng.uniform(-1, 1) for _ in range(VOCABULARY)]  # of each token
    every = []
    for token, value in enumerate(values):
        logprob = logprobs_of(old, prompt, [token]).item()
        every.append(
            TrainSample(
                f"p#{token}",
                pack_i32(prompt),
                pack_i32([token]),
                pack_f32([logprob]),
                value * math.exp(logprob),
            )
        )
    objective = (
        current(torch.tensor([prompt])).logits[0, -1].softmax(-1) * torch.tensor(values)
    ).sum()
    expected = torch.autograd.grad(-objective, list(current.parameters()))
    found, metrics = gradients(rank, every)
    assert distance(found, expected) <= 1e-4
    assert metrics["tis/max"] > 2


def test_what_the_current_policy_sampled_is_not_weighted(new_rank, samples, model_dir):
    """Up to the rounding between one response alone and a padded batch."""
    settings = {"train": {"optim": {"lr": LR}}}
    weighted = new_rank(algorithm={"name": "dapo", "tis_bounds": (0, 2.0)}, **settings)
    *_, current = two_steps(weighted, samples, model_dir)
    plain = new_rank(algorithm={"name": "dapo"}, **settings)
    two_steps(plain, samples, model_dir)
    plain.learner.policy.module.load_state_dict(current.state_dict())
    torch.manual_seed(5)
    fresh = [sample(f"p{i}", [current] * (1 + i), [2 + i, 7], (-1.0) ** i) for i in range(12)]
    found, metrics = gradients(weighted, fresh)
    expected, _ = gradients(plain, fresh)
    assert distance(found, expected) <= 1e-5
    assert metrics["tis/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["tis/max"] == pytest.approx(1, abs=1e-4)
    assert metrics["tis/truncated_share"] == 0
    assert metrics["train_rollout_logprob_abs_diff"] < 1e-5
