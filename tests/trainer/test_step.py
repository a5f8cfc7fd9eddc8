"""Whole steps of a rank in this process: exactness of streaming, gradients, publishing, edge
cases."""

import asyncio
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrl.config.algorithm import ALGORITHMS
from lightrl.errors import TrainerError
from lightrl.trainer.algorithm import loss
from lightrl.trainer.batch import micro_batches, num_tokens
from lightrl.trainer.model import logprobs
from lightrl.trainer.model.forward import Way
from lightrl.trainer.protocol import Accumulate, Done, StepFinished, Update
from lightrl.weights.version.tensors import read_tensors
from lightrl.wire import pack_f32, unpack_f32, unpack_i32
from tests.support.tiers import e2e
from tests.trainer.conftest import DEADLINE_S


def finish(samples, step=0, extra=0):
    """`extra` responses without signal, of 10 tokens each."""
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    return Update(step, len(samples) + extra, tokens + 10 * extra, step + 1)


def run_step(rank, arrivals, samples, step=0, extra=0):
    for batches in arrivals:
        [done] = rank.perform(Accumulate(step, batches))
        assert done == Done(step)
    [finished] = rank.perform(finish(samples, step, extra))
    assert isinstance(finished, StepFinished)
    return finished.published, finished.metrics


def weights(rank):
    return {name: p.detach().clone() for name, p in rank.learner.policy.module.named_parameters()}


def assert_close(a, b, tolerance):
    """Relative to the norm of all values: Adam blows up the rounding of gradients that are about
    zero."""
    difference = math.sqrt(sum((a[name] - b[name]).square().sum().item() for name in a))
    assert difference <= tolerance * math.sqrt(sum(b[name].square().sum().item() for name in a))


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"name": name} for name in ("gspo", "rloo", "dr_grpo")),
        *e2e({"name": name} for name in ALGORITHMS if name not in ("gspo", "rloo", "dr_grpo")),
        {"name": "grpo", "kl_coef": 0.1},
        {"name": "reinforce++", "kl_coef": 0.1},
        {"name": "dapo", "tis_bounds": (0, 2.0)},
        {"name": "dapo", "entropy_coef": 0.1},
        {"name": "grpo", "tis_bounds": (0, 1.1), "tis_mode": "mask", "tis_level": "sequence"},
    ],
    ids=lambda a: "-".join(str(v) for v in a.values()),
)
def test_a_streamed_step_equals_one_big_batch(new_rank, samples, algorithm):
    mixed = random.Random(5).sample(samples, len(samples))
    ways = {
        "one batch": [(tuple(samples),)],
        "planned": [micro_batches(samples, 1, 40)[0]],
        "as they come": [(tuple(mixed[i : i + 5]),) for i in range(0, len(mixed), 5)],
    }
    after = {}
    for way, arrivals in ways.items():
        rank = new_rank(algorithm=algorithm)
        for step in range(2):  # in the second the policy has left the reference
            _, metrics = run_step(rank, arrivals, samples, step, extra=3)
        after[way] = (weights(rank), metrics)
    reference, expected = after.pop("one batch")
    for found, metrics in after.values():
        assert_close(found, reference, 2e-6)
        for key in (
            "loss/policy",
            "loss/kl",
            "entropy",
            "grad_norm",
            "train_rollout_logprob_abs_diff",
            "mismatch_kl/max",
            "ratio/min",
            "ratio/max",
            "clip_frac/high",
            "advantage/mean",
            "advantage/std",
            "advantage/min",
        ):
            assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


def test_a_step_is_the_same_packed_or_padded_by_tiles_or_by_the_model(
    new_rank, samples, monkeypatch
):
    def after(packed, has_tiles, tile, batches):
        monkeypatch.setattr(logprobs, "NARROWEST_TILE", tile)
        monkeypatch.setitem(logprobs.TILE_VALUES, "cpu", 1)
        rank = new_rank(algorithm={"name": "dapo", "tis_bounds": (0, 2.0), "kl_coef": 0.1})
        assert rank.started.is_packed
        assert rank.started.notes == ()
        for name in ("policy", "reference"):
            policy = getattr(rank.learner, name)
            projection = policy.way.projection if has_tiles else None
            setattr(rank.learner, name, replace(policy, way=Way(packed, projection)))
        for step in range(2):
            _, metrics = run_step(rank, [batches], samples, step, extra=3)
        return weights(rank), metrics

    planned = micro_batches(samples, 1, 60)[0]
    expected, figures = after(False, False, 256, (tuple(samples),))
    ways = [(True, True, 24, planned), (True, True, 5, planned), (True, False, 24, planned)]
    for way in [*ways, (False, True, 5, planned)]:
        found, metrics = after(*way)
        assert_close(found, expected, 2e-6)
        for key in ("loss/policy", "loss/kl", "entropy", "grad_norm", "tis/mean"):
            assert metrics[key] == pytest.approx(figures[key], rel=1e-4, abs=1e-5), key


def whitened_by_formula(samples, trained=lambda s: unpack_i32(s.token_ids)):
    """Token by token, as verl's `masked_whiten` has it: mean included, n - 1, 1e-8 in the root."""
    every = torch.tensor([s.advantage for s in samples for _ in trained(s)], dtype=torch.float64)
    white = ((every - every.mean()) * torch.rsqrt(every.var() + 1e-8)).tolist()
    first = [0, *itertools.accumulate(len(trained(s)) for s in samples)]
    return [
        replace(s, advantage=white[i] if trained(s) else 0.0)
        for s, i in zip(samples, first, strict=False)
    ]


def naive_gradients(rank, samples, settings, divisor):
    """The formula, response by response and token by token, without padding, masks or detours."""
    module = rank.learner.policy.module
    parameters = list(module.parameters())
    total = torch.zeros(())
    for s in samples:
        prompt, response = unpack_i32(s.prompt), unpack_i32(s.token_ids)
        ids = torch.tensor([prompt + response])
        lines = slice(len(prompt) - 1, -1)
        index = torch.tensor(response)[:, None]
        logprobs = module(ids).logits[0, lines].log_softmax(-1).gather(-1, index)[:, 0]
        with torch.no_grad():
            logits = rank.learner.reference.module(ids).logits
            ref = logits[0, lines].log_softmax(-1).gather(-1, index)[:, 0]
        tokens = []
        for t in range(len(response)):
            old, gaps = (
                logprobs[t].item(),
                logprobs.detach() - torch.tensor(unpack_f32(s.rollout_logprobs)),
            )
            gap, ratio = gaps[t].item(), torch.exp(logprobs[t] - old)
            if rank.learner.algorithm.name == "gspo":
                ratio = torch.exp((logprobs - logprobs.detach()).mean())
            if rank.learner.algorithm.name == "rloo":
                ratio = torch.exp((logprobs - logprobs.detach()).sum())
            weight = (
                min(math.exp(gap), settings["tis_bounds"][1]) if "tis_bounds" in settings else 1.0
            )
            policy = -ratio * s.advantage
            divergence = torch.exp(ref[t] - logprobs[t]) - (ref[t] - logprobs[t]) - 1
            tokens.append(weight * (policy + settings["kl_coef"] * divergence))
        share = len(response) if rank.learner.algorithm.name in ("grpo", "gspo", "rloo") else 1
        total = total + torch.stack(tokens).sum() / share
    return torch.autograd.grad(total / divisor, parameters)


# On-policy: nothing is clipped here. The clipping is tested by hand in test_loss.py.
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_equal_a_naive_implementation(new_rank, samples, name):
    settings = {"name": name, "tis_bounds": (0, 1.5), "kl_coef": 0.2, "kl_type": "k3"}
    if name == "dr_grpo":
        settings["loss_norm"] = 20
    rank = new_rank(algorithm=settings, train={"optim": {"lr": 1e-2, "grad_clip": 0.0}})
    run_step(rank, [(tuple(samples),)], samples)  # away from the reference
    some = samples[:10]
    tokens = sum(len(s.token_ids) // 4 for s in some)
    divisor = {"grpo": 10, "gspo": 10, "dr_grpo": 200, "rloo": 10}.get(name, tokens)
    is_whitened = name.startswith("reinforce++")
    worth = whitened_by_formula(some) if is_whitened else some
    expected = naive_gradients(rank, worth, settings, divisor)

    assert loss.denominator(rank.learner.algorithm, 10, tokens, 1) == divisor
    list(rank.perform(Accumulate(1, (tuple(some[:7]), tuple(some[7:])))))
    if not is_whitened:  # else it computes when the step ends
        found = {
            name: p.grad / divisor for name, p in rank.learner.policy.module.named_parameters()
        }
        assert_close(found, dict(zip(found, expected, strict=True)), 1e-4)
    [finished] = rank.perform(finish(some, step=1))
    norm = torch.nn.utils.get_total_norm(expected).item()
    assert finished.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_step_is_that_of_a_plain_loop(new_rank, samples):
    """AdamW, clipping and warm-up against the textbook, two steps."""
    optim = {"lr": 1e-3, "grad_clip": 0.5, "warmup_steps": 4, "weight_decay": 0.1}
    rank = new_rank(algorithm={"name": "dr_grpo", "loss_norm": 20}, train={"optim": optim})
    other = new_rank(algorithm={"name": "dr_grpo", "kl_coef": 1e-9, "loss_norm": 20})
    module = other.learner.policy.module
    plain = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(2):
        _, metrics = run_step(rank, [micro_batches(samples, 1, 100)[0]], samples, step)
        gradients = naive_gradients(other, samples, {"kl_coef": 0.0}, 24 * 20)
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        plain.param_groups[0]["lr"] = 1e-3 * (step + 1) / 4
        plain.step()
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["lr"] == pytest.approx(1e-3 * (step + 1) / 4)
        assert_close(weights(rank), dict(module.named_parameters()), 2e-6)


def test_the_published_file_holds_the_new_weights_and_old_ones_go(new_rank, samples):
    rank = new_rank()
    first = rank.started.published.file
    for step in range(3):
        published, _ = run_step(rank, [(tuple(samples),)], samples, step)
    assert published.file.policy_version == 3
    assert published.file.digest != first.digest
    read = dict(read_tensors(published.file))
    for name, tensor in weights(rank).items():
        assert torch.equal(read[name], tensor)
    names = sorted(p.name.split(".")[0] for p in Path(published.file.path).parent.glob("*.bin"))
    assert names == ["version_2", "version_3"]


def test_a_step_without_signal_changes_no_bit(new_rank, samples):
    rank = new_rank(train={"optim": {"lr": 1e-3, "weight_decay": 0.1}})
    before, _ = run_step(rank, [(tuple(samples),)], samples)
    after, metrics = run_step(rank, [], [], step=1, extra=8)
    assert after.file.digest == before.file.digest
    assert after.file.policy_version == 2
    assert metrics["grad_norm"] == metrics["perf/micro_batches"] == 0
    assert metrics["num_tokens"] == 80


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_a_step_of_equal_advantages_changes_no_bit(new_rank, samples, name):
    """Momentum of the step before must not act, either."""
    rank = new_rank(algorithm={"name": name}, train={"optim": {"lr": 1e-3}})
    before, _ = run_step(rank, [(tuple(samples),)], samples)
    equal = [replace(s, advantage=0.1) for s in samples]
    after, metrics = run_step(rank, [(tuple(equal),)], equal, step=1)
    assert after.file.digest == before.file.digest
    assert metrics["grad_norm"] == metrics["num_trained_tokens"] == 0


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_whitening_on_two_ranks_is_that_of_one(start, new_rank, processes, samples):
    """One of them has more samples than the other, and longer ones."""
    sections = {"algorithm": {"name": "reinforce++"}, "train": {"optim": {"lr": 1e-3}}}
    ordered = sorted(samples, key=num_tokens)
    shares = [(tuple(ordered[8:16]), tuple(ordered[16:])), (tuple(ordered[:8]), ())]

    async def on_two_ranks():
        async with asyncio.timeout(DEADLINE_S), processes(start(**sections), world=2) as ranks:
            for rank, share in zip(ranks, shares, strict=True):
                rank.send(Accumulate(0, share))
                rank.send(finish(samples))
            while not isinstance(event := await ranks[0].receive(), StepFinished):
                pass
            return dict(read_tensors(event.published.file))

    alone = new_rank(**sections)
    run_step(alone, [(tuple(samples),)], samples)
    found, expected = asyncio.run(on_two_ranks()), weights(alone)
    assert_close({name: found[name] for name in expected}, expected, 2e-6)


def test_weights_are_due_unless_engines_agree_exactly(new_rank, samples):
    for sections, cap in (
        ({}, 0.0),
        ({"model": {"path": "unused", "dtype": "bfloat16"}}, 2.0),
        ({"async": {"max_staleness": 1}}, 2.0),
        (
            {"model": {"path": "unused", "dtype": "bfloat16"}, "algorithm": {"tis_bounds": "off"}},
            0.0,
        ),
    ):
        rank = new_rank(**sections)
        _, metrics = run_step(rank, [(tuple(samples),)], samples)
        assert metrics.get("tis/max", 0.0) == cap


def test_a_bonus_for_entropy_raises_it(new_rank, samples):
    """Alone: no response has an advantage."""
    flat = [replace(s, advantage=0.0) for s in samples]
    rank = new_rank(algorithm={"name": "dapo", "entropy_coef": 1.0}, train={"optim": {"lr": 1e-3}})
    entropies = [run_step(rank, [(tuple(flat),)], flat, step)[1]["entropy"] for step in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.01


def test_a_gradient_that_is_not_finite_is_left_out(new_rank, samples):
    rank = new_rank()
    before = rank.started.published.file.digest
    poisoned = [*samples, replace(samples[0], advantage=math.inf)]
    published, metrics = run_step(rank, [(tuple(poisoned),)], poisoned)
    assert metrics["train/skipped_nonfinite"] == 1
    assert published.file.digest == before
    published, metrics = run_step(rank, [(tuple(samples),)], samples, step=1)
    assert metrics["train/skipped_nonfinite"] == 0
    assert math.isfinite(metrics["grad_norm"])
    assert published.file.digest != before


def test_the_difference_to_the_engine_is_measured(new_rank, samples):
    rank = new_rank()
    logprobs = [unpack_f32(s.rollout_logprobs) for s in samples]
    _, first = run_step(rank, [(tuple(samples),)], samples)
    assert (
        first["train_rollout_logprob_abs_diff_max"] >= first["train_rollout_logprob_abs_diff"] > 0
    )
    assert first["mismatch_kl/mean"] > 0
    shifted = [
        replace(s, rollout_logprobs=pack_f32([x + 100 for x in lp]))
        for s, lp in zip(samples, logprobs, strict=True)
    ]
    rank = new_rank()
    _, metrics = run_step(rank, [(tuple(shifted),)], samples)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(100, rel=0.1)
    assert metrics["clip_frac"] == 0
    assert metrics["num_trained_tokens"] == sum(num_tokens(s) - len(s.prompt) // 4 for s in samples)


def test_commands_of_another_step_are_refused(new_rank):
    rank = new_rank()
    with pytest.raises(TrainerError, match="step 3, but the rank is at step 0"):
        list(rank.perform(Accumulate(3, ())))


def test_only_what_the_newest_version_sampled_is_compared(new_rank, samples):
    old = [replace(s, num_stale=len(s.token_ids) // 4) for s in samples]
    _, metrics = run_step(new_rank(), [(tuple(old),)], old)
    assert metrics["train_rollout_logprob_abs_diff"] == metrics["mismatch_kl/max"] == 0
    assert metrics["num_trained_tokens"] > 0
    half = [replace(s, num_stale=0 if i else 1) for i, s in enumerate(old)]
    _, metrics = run_step(new_rank(), [(tuple(half),)], half)
    assert metrics["train_rollout_logprob_abs_diff"] > 0


def test_advantages_count_responses_that_were_not_computed(new_rank, samples):
    _, metrics = run_step(new_rank(), [(tuple(samples),)], samples, extra=3)
    values = [*(s.advantage for s in samples), 0.0, 0.0, 0.0]
    mean = sum(values) / len(values)
    assert metrics["advantage/mean"] == pytest.approx(mean, abs=1e-6)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    assert metrics["advantage/std"] == pytest.approx(std, rel=1e-5)
    assert metrics["advantage/max"] == pytest.approx(max(values))
    assert metrics["perf/host_memory_gib"] > 0.05
    assert 0 <= metrics["perf/padding_share"] < 1


def test_engine_against_trainer_is_compared_as_verl_does(new_rank, samples):
    """`calculate_debug_metrics` and `compute_offpolicy_metrics` of verl, over tokens of any
    version; differences of logprobs only over those of the newest one."""
    rank, rng = new_rank(), random.Random(3)
    module = rank.learner.policy.module
    some, ours, engine, current = [], [], [], []
    for k, s in enumerate(samples[:8]):
        prompt, response = unpack_i32(s.prompt), unpack_i32(s.token_ids)
        with torch.no_grad():
            every = module(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        exact = every.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        told = [x + rng.uniform(-0.3, 0.0) for x in exact.tolist()]
        num_stale = k % min(3, len(response))
        some.append(replace(s, rollout_logprobs=pack_f32(told), num_stale=num_stale))
        ours += exact.tolist()
        engine += told
        current += [j >= num_stale for j in range(len(response))]
    _, metrics = run_step(rank, [(tuple(some[:3]), tuple(some[3:]))], some)
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(engine, dtype=torch.float64)
    probabilities, logs = (a.exp() - b.exp()).abs(), (a - b).abs()[torch.tensor(current)]
    expected = {
        "train_rollout_prob_abs_diff": probabilities.mean(),
        "train_rollout_prob_abs_diff_max": probabilities.max(),
        "train_rollout_prob_abs_diff_std": probabilities.std(),
        "train_rollout_logprob_abs_diff": logs.mean(),
        "train_rollout_logprob_abs_diff_max": logs.max(),
        "mismatch_kl/all": ((a - b).exp() - (a - b) - 1).mean(),
    }
    assert 0 < sum(current) < len(current)
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value.item(), rel=1e-4), key


def test_the_largest_advantages_have_finite_figures(new_rank, samples):
    huge = [replace(s, advantage=(-1.0) ** k * 3e38) for k, s in enumerate(samples[:4])]
    _, metrics = run_step(new_rank(), [(tuple(huge),)], huge)
    assert metrics["advantage/std"] == pytest.approx(3e38, rel=1e-4)
    assert abs(metrics["advantage/mean"]) < 1e33
    assert metrics["advantage/max"] == pytest.approx(3e38)
