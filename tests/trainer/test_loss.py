import math
import re
from pathlib import Path

import pytest
import torch

from lightrl.config.algorithm import ALGORITHMS, AlgorithmSection
from lightrl.trainer.algorithm import loss
from lightrl.trainer.algorithm.loss import denominator, importance_weights, kl, losses

LOG2, LOG_HALF = math.log(2), math.log(0.5)
# Two responses, of two tokens and of one. Ratios 2, 1/2 and 2; advantages 1 and -3.
RATIOS = torch.tensor([[LOG2, LOG_HALF], [LOG2, 9.9]])
ADVANTAGES = torch.tensor([[1.0], [-3.0]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
OLD = torch.tensor([[-1.0, -2.0], [-1.5, 7.7]])


def evaluate(name, ref=None, rollout=OLD, **settings):
    algorithm = AlgorithmSection(name=name, **{"clip_low": 0.2, "clip_high": 0.3} | settings)
    logprobs = (OLD + RATIOS).requires_grad_()
    result = losses(algorithm, logprobs, OLD, rollout, ref, ADVANTAGES, MASK)
    (gradient,) = torch.autograd.grad(result.total, logprobs)
    return result, gradient


# min(2 * 1, 1.3 * 1) = 1.3; min(0.5 * 1, 0.8 * 1) = 0.5; min(2 * -3, 1.3 * -3) = -6.
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("grpo", -(1.3 + 0.5) / 2 + 6),
        ("dr_grpo", -(1.3 + 0.5) + 6),
        ("dapo", -(1.3 + 0.5) + 6),
        ("reinforce++", -(1.3 + 0.5) + 6),
        ("reinforce++-baseline", -(1.3 + 0.5) + 6),
    ],
)
def test_clipped_loss_by_hand(name, policy):
    result, gradient = evaluate(name)
    assert result.policy.item() == pytest.approx(policy)
    assert result.num_clipped.item() == 1
    share = 0.5 if name == "grpo" else 1.0
    # -A r where the ratio is free, nothing where it is clipped, nothing at padding.
    assert gradient.flatten().tolist() == pytest.approx([0.0, -0.5 * share, 6.0, 0.0])


def test_gspo_has_one_ratio_per_response_by_hand():
    result, gradient = evaluate("gspo")
    # s = (2 * 1/2)^(1/2) = 1 for the first, 2 for the second response: min(1, 1) and min(-6, -3.9).
    assert result.policy.item() == pytest.approx(-1 + 6)
    assert result.num_clipped.item() == 0
    assert gradient.flatten().tolist() == pytest.approx([-0.5, -0.5, 6.0, 0.0])


def test_gspo_clips_a_response_as_a_whole():
    algorithm = AlgorithmSection(name="gspo", clip_low=0.2, clip_high=0.3)
    logprobs = OLD + torch.tensor([[LOG2, LOG2], [LOG_HALF, 0.0]])
    result = losses(algorithm, logprobs, OLD, OLD, None, ADVANTAGES, MASK)
    # s = 2 with A > 0 is held to 1.3; s = 1/2 with A < 0 to 0.8.
    assert result.policy.item() == pytest.approx(-1.3 + 0.8 * 3)
    assert result.num_clipped.item() == 3


def test_rloo_takes_a_response_for_one_action_by_hand():
    result, gradient = evaluate("rloo")
    # s = 2 * 1/2 = 1 for the first, 2 for the second response: min(1, 1) and min(-6, -3.9).
    assert result.policy.item() == pytest.approx(-1 + 6)
    assert gradient.flatten().tolist() == pytest.approx([-1.0, -1.0, 6.0, 0.0])
    result, gradient = evaluate("rloo", clip_high=0.0, clip_low=0.0)
    assert result.policy.item() == pytest.approx(-1 + 6)
    algorithm = AlgorithmSection(name="rloo", clip_low=0.2, clip_high=0.3)
    logprobs = OLD + torch.tensor([[LOG2, LOG2], [LOG_HALF, 0.0]])
    result = losses(algorithm, logprobs, OLD, OLD, None, ADVANTAGES, MASK)
    # s = 4 with A > 0 is held to 1.3; s = 1/2 with A < 0 to 0.8.
    assert result.policy.item() == pytest.approx(-1.3 + 0.8 * 3)
    assert result.num_clipped.item() == 3


def test_a_response_whose_ratio_no_float_holds_has_a_loss_and_no_gradient():
    algorithm = AlgorithmSection(name="rloo")
    logprobs = torch.full((1, 1000), -1.0, requires_grad=True)
    old, mask = torch.full((1, 1000), -1.1), torch.ones(1, 1000)  # e^100 together
    for advantage in (1.0, 0.0):
        result = losses(algorithm, logprobs, old, old, None, torch.tensor([[advantage]]), mask)
        (gradient,) = torch.autograd.grad(result.total, logprobs)
        assert result.policy.isfinite()
        assert not gradient.any()


def dual_by_formula(ratio, advantage, low, high, c):
    """Ye et al. 2020, eq. 5, with the sign of a loss."""
    objective = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    return -max(objective, c * advantage) if advantage < 0 else -objective


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"gspo", "rloo", "cispo"}))
@pytest.mark.parametrize("c", [1.5, 3.0, None])
def test_dual_clip_is_its_formula(name, c):
    logs = [-25.0, -3.0, -0.3, 0.0, 0.1, 0.3, 0.5, 1.0, 1.2, 19.0, 25.0]
    algorithm = AlgorithmSection(name=name, loss_norm="token", clip_dual=c)
    low, high = algorithm.clip
    mask, old = torch.ones(1, 1), torch.full((1, 1), -30.0)
    for log in logs:
        for advantage in (-2.0, 0.5):
            logprobs = (old + log).requires_grad_()
            found = losses(algorithm, logprobs, old, old, None, torch.tensor([[advantage]]), mask)
            (gradient,) = torch.autograd.grad(found.total, logprobs)
            ratio = math.exp(max(-20, min(20, log)))
            expected = dual_by_formula(ratio, advantage, low, high, c or math.inf)
            assert found.policy.item() == pytest.approx(expected, rel=1e-4)
            is_limited = bool(c) and advantage < 0 and ratio > c
            assert found.num_clipped_dual.item() == is_limited
            is_clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
            free = not (is_limited or is_clipped) and abs(log) < 20
            assert gradient.item() == pytest.approx(-ratio * advantage * free, rel=1e-4, abs=1e-12)


def test_dual_clip_limits_a_ratio_of_a_response_and_leaves_cispo_alone():
    result, gradient = evaluate("rloo", clip_dual=1.5)  # the second has 2 and A = -3
    assert result.policy.item() == pytest.approx(-1 + 1.5 * 3)
    assert gradient.flatten().tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0])
    assert result.num_clipped_dual.item() == 1
    plain, limited = evaluate("cispo"), evaluate("cispo", clip_dual=1.5)
    assert torch.equal(plain[1], limited[1])
    assert limited[0].num_clipped_dual.item() == 0


@pytest.mark.parametrize("log", [-1e30, -500.0, -21.0, 21.0, 500.0, 1e30])
@pytest.mark.parametrize("unit", [loss.token_ratio, loss.mean_ratio, loss.response_ratio])
def test_logarithms_of_ratios_are_held_to_20(unit, log):
    ratio = unit(torch.full((1, 3), log), torch.zeros(1, 3), torch.ones(1, 3))
    assert ratio[0].tolist() == pytest.approx([math.exp(math.copysign(20, log))] * 3)
    found = kl("k3", torch.tensor([log]), torch.zeros(1), torch.ones(1))
    x = math.copysign(20, log)
    assert found.item() == pytest.approx(math.exp(-x) - 1 + x)


def test_cispo_is_open_below_unless_it_is_asked_to_clip():
    _, gradient = evaluate("cispo", clip_low=None)
    assert gradient.flatten().tolist() == pytest.approx([-1.3, -0.5, 3.9, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens_by_hand():
    result, gradient = evaluate("cispo")
    logprobs = OLD + RATIOS
    expected = -1.3 * logprobs[0, 0] - 0.8 * logprobs[0, 1] + 3 * 1.3 * logprobs[1, 0]
    assert result.policy.item() == pytest.approx(expected.item())
    assert gradient.flatten().tolist() == pytest.approx([-1.3, -0.8, 3.9, 0.0])
    assert result.num_clipped.item() == 3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_policy_the_gradient_is_the_policy_gradient_and_nothing_is_clipped(name):
    norm = "sequence" if name == "rloo" else "token"
    algorithm = AlgorithmSection(name=name, loss_norm=norm, clip_low=0.0, clip_high=0.0)
    logprobs = OLD.clone().requires_grad_()
    result = losses(algorithm, logprobs, OLD, OLD, None, ADVANTAGES, MASK)
    result.total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == [-1.0, -1.0, 3.0, 0.0]
    assert result.num_clipped.item() == 0


def test_truncated_importance_weight_by_hand():
    # pi_old / pi_rollout = 1/2, 4 (held to 2) and 1; old as in `test_clipped_loss_by_hand`.
    rollout = OLD - torch.tensor([[LOG_HALF, math.log(4)], [0.0, 0.0]])
    result, gradient = evaluate("dapo", rollout=rollout, tis_bounds=(0, 2.0))
    assert result.policy.item() == pytest.approx(-(0.5 * 1.3 + 2 * 0.5) + 6)
    assert gradient.flatten().tolist() == pytest.approx([0.0, -1.0, 6.0, 0.0])
    assert result.weights.item() == pytest.approx(0.5 + 2 + 1)
    assert result.max_weight.item() == 2
    assert result.num_truncated.item() == 1


# Sampled by an older policy: pi_old / pi_rollout = 1/2 and 8 in the first response, 4 in the
# second.
STALE = OLD - torch.tensor([[LOG_HALF, math.log(8)], [math.log(4), -3.3]])


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"rloo"}))  # whose ratio is a product
def test_stale_tokens_are_weighted_by_hand(name):
    algorithm = AlgorithmSection(
        name=name,
        loss_norm="token",
        clip_low=0.0,
        clip_high=0.0,
        tis_bounds=(0, 3.0),
        kl_coef=0.5,
        kl_type="k1",
    )
    logprobs = OLD.clone().requires_grad_()
    result = losses(algorithm, logprobs, OLD, STALE, OLD - 0.2, ADVANTAGES, MASK)
    weights = [0.5, 3.0, 3.0, 0.0]  # of tokens, whatever the ratio is of; 8 and 4 are held to 3
    assert result.weights.item() == pytest.approx(sum(weights))
    assert result.squared_weights.item() == pytest.approx(0.25 + 9 + 9)
    assert (result.min_weight.item(), result.max_weight.item()) == (0.5, 3)
    assert result.num_truncated.item() == 2
    assert result.num_clipped.item() == 0
    assert result.kl.item() == pytest.approx(0.2 * sum(weights))
    # -A + 0.5 * 0.2 is the gradient of a token on-policy: A = 1, 1 and -3. GSPO's ratio is of the
    # whole response, and has the mean of the weights.
    result.total.backward()
    assert logprobs.grad is not None
    of_ratio = [1.75, 1.75, 3.0, 0.0] if name == "gspo" else weights
    expected = [0.1 * w - r * a for w, r, a in zip(weights, of_ratio, [1, 1, -3, 0], strict=True)]
    assert logprobs.grad.flatten().tolist() == pytest.approx(expected)


def test_rloo_weighs_a_stale_response_as_a_whole():
    result, gradient = evaluate("rloo", rollout=STALE, tis_bounds=(0, 5.0), tis_level="sequence")
    # 1/2 * 8 = 4 and 4, times the losses of `test_rloo_takes_a_response_for_one_action_by_hand`.
    assert result.weights.item() == pytest.approx(4 + 4 + 4)
    assert result.policy.item() == pytest.approx(4 * (-1 + 6))
    assert gradient.flatten().tolist() == pytest.approx([-4.0, -4.0, 24.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "weights", "beyond"),
    [
        ({}, [0.5, 3, 3], 2),
        ({"tis_mode": "mask"}, [0.5, 0, 0], 2),
        ({"tis_level": "token", "tis_mode": "mask"}, [0.5, 0, 0], 2),
        ({"tis_level": "sequence"}, [3, 3, 3], 3),  # the products are 4 and 4
        ({"tis_level": "sequence", "tis_bounds": (0, 4.5)}, [4, 4, 4], 0),
        ({"tis_level": "sequence", "tis_mode": "mask"}, [0, 0, 0], 3),
        ({"name": "gspo"}, [0.5, 3, 3], 2),
        ({"name": "gspo", "tis_level": "sequence", "tis_bounds": (0, 5)}, [4, 4, 4], 0),
        ({"name": "rloo"}, [0.5, 3, 3], 2),
        ({"tis_bounds": (0.75, 6)}, [0.75, 6, 4], 2),
        ({"tis_bounds": (0.75, 6), "tis_mode": "mask"}, [0, 0, 4], 2),
        ({"tis_bounds": (1, 1)}, [1, 1, 1], 3),
        ({"tis_bounds": (0.5, 8)}, [0.5, 8, 4], 0),  # a bound itself is allowed
        ({"tis_bounds": "off"}, [1, 1, 1], 0),
    ],
)
def test_weights_outside_the_bounds_are_held_or_dropped_by_hand(settings, weights, beyond):
    algorithm = AlgorithmSection(**{"name": "grpo", "tis_bounds": (0, 3.0)} | settings)
    found = importance_weights(algorithm, OLD, STALE, MASK)
    assert found.values[MASK.bool()].tolist() == pytest.approx(weights)
    assert (found.truncated * MASK).sum().item() == beyond


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fresh_tokens_have_the_weight_one_bit_for_bit(name):
    on, mask = AlgorithmSection(name=name, tis_bounds=(0, 2.0)), MASK.bool()
    weights = importance_weights(on, OLD, OLD, MASK)
    assert weights.values[mask].tolist() == [1.0] * 3
    assert not weights.truncated.any()
    for bounds in ("off", (0, 2.0), (0.5, 1.0)):
        result, gradient = evaluate(name, tis_bounds=bounds)
        without, plain = evaluate(name, rollout=STALE)
        assert torch.equal(result.total, without.total)
        assert torch.equal(gradient, plain)
        assert result.weights.item() == without.weights.item() == 3


def test_a_token_that_the_older_policy_held_for_impossible_is_truncated():
    algorithm = AlgorithmSection(name="grpo", tis_bounds=(0, 2.0))
    rollout = torch.tensor([[-1e30, -2.0], [-1.5, 0.0]])
    weights = importance_weights(algorithm, OLD, rollout, MASK)
    assert weights.values[0, 0].item() == 2
    assert weights.truncated.tolist() == [[True, False], [False, False]]
    assert losses(algorithm, OLD, OLD, rollout, None, ADVANTAGES, MASK).num_truncated.item() == 1


def test_kl_estimators_by_hand():
    logprobs, ref, mask = torch.tensor([LOG2]).requires_grad_(), torch.zeros(1), torch.ones(1)
    for kind, value, slope in (
        ("k1", LOG2, LOG2),  # that of k2: its own is 1 wherever the policy stands
        ("k2", LOG2**2 / 2, LOG2),
        ("k3", 0.5 - 1 + LOG2, 0.5),
    ):
        found = kl(kind, logprobs, ref, mask)
        assert found.item() == pytest.approx(value)
        assert torch.autograd.grad(found.sum(), logprobs)[0].item() == pytest.approx(slope)
    assert kl("k3", logprobs, logprobs, mask).item() == 0.0


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_nothing_counts_where_nothing_is_trained_whatever_it_is(name, kl_type):
    """Between tokens that are trained, too: the same as without them."""
    algorithm = AlgorithmSection(
        name=name, clip_low=0.2, clip_high=0.3, kl_coef=0.5, kl_type=kl_type, tis_bounds=(0, 3.0)
    )
    algorithm = algorithm.model_copy(update={"entropy_coef": 0.1})
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    columns = torch.tensor([[0, 2], [0, 1]])

    def between(values, noise):
        return torch.full((2, 3), noise).scatter(1, columns, torch.where(MASK > 0, values, noise))

    entropy = torch.tensor([[0.5, 0.7], [0.2, 0.0]])
    every = (OLD + RATIOS, OLD, STALE, OLD - 0.2)
    logprobs = every[0].clone().requires_grad_()
    expected = losses(algorithm, logprobs, *every[1:], ADVANTAGES, MASK, entropy)
    (slope,) = torch.autograd.grad(expected.total, logprobs)
    for noises in ((-400.0, 400.0, 400.0, 400.0), (400.0, -400.0, -400.0, -400.0)):
        noisy = [between(v, n) for v, n in zip(every, noises, strict=True)]
        logprobs = noisy[0].requires_grad_()
        found = losses(
            algorithm, logprobs, *noisy[1:], ADVANTAGES, mask, between(entropy, math.inf)
        )
        for field in ("total", "policy", "kl", "num_clipped", "weights", "num_truncated"):
            assert getattr(found, field).item() == pytest.approx(getattr(expected, field).item())
        (gradient,) = torch.autograd.grad(found.total, logprobs)
        assert gradient[0].tolist() == pytest.approx([slope[0, 0].item(), 0, slope[0, 1].item()])
        assert gradient[1].tolist() == pytest.approx([slope[1, 0].item(), 0, 0])


def test_the_bonus_for_entropy_is_normalised_like_the_loss_and_has_no_weight():
    entropy = torch.tensor([[0.5, 0.7], [0.2, 9.0]])
    algorithm = AlgorithmSection(name="grpo", entropy_coef=0.1, tis_bounds=(0, 3.0))
    found = losses(algorithm, OLD, OLD, STALE, None, ADVANTAGES, MASK, entropy)
    expected = found.policy.item() - 0.1 * ((0.5 + 0.7) / 2 + 0.2)
    assert found.total.item() == pytest.approx(expected)


def test_the_kl_term_is_normalised_like_the_loss_and_weighted():
    result, _ = evaluate("grpo", ref=OLD, kl_coef=0.1, kl_type="k1")
    assert result.kl.item() == pytest.approx((LOG2 + LOG_HALF) / 2 + LOG2, abs=1e-6)
    assert result.total.item() == pytest.approx(result.policy.item() + 0.1 * result.kl.item())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "grpo"}, 8),
        ({"name": "gspo"}, 8),
        ({"name": "dapo"}, 100),
        ({"name": "cispo"}, 100),
        ({"name": "reinforce++"}, 100),
        ({"name": "dr_grpo"}, 8 * 512),
        ({"name": "rloo"}, 8),
        ({"name": "dr_grpo", "loss_norm": 20}, 160),
        ({"name": "grpo", "loss_norm": "token"}, 100),
    ],
)
def test_denominators(settings, expected):
    assert denominator(AlgorithmSection(**settings), 8, 100, max_response_length=512) == expected


def test_the_table_of_the_readme_is_that_of_the_code():
    readme = Path(loss.__file__).with_name("README.md").read_text(encoding="utf-8")
    row = r"^\| `([^`]+)` \| .+ \| (.+) \| (\S+) \.\.\. (\S+) \| (\w+) \|$"
    rows = re.findall(row, readme, re.MULTILINE)
    assert [name for name, *_ in rows] == list(ALGORITHMS)
    units = {"token": loss.token_ratio, "mean": loss.mean_ratio, "product": loss.response_ratio}
    for name, unit, low, high, norm in rows:
        recipe, clip = loss.RECIPES[name], AlgorithmSection(name=name).clip
        assert (float(low), float(high)) == (max(0, 1 - clip[0]), 1 + clip[1])
        [ratio] = {units[word] for word in units if word in unit}
        assert (recipe.ratio, recipe.norm) == (ratio, norm)


def test_ratios_and_what_is_clipped_on_each_side_by_hand():
    result, _ = evaluate("grpo")
    # 2 and 1/2, then 2: only the first is above 1.3 with an advantage above 0.
    assert (result.num_clipped_low.item(), result.num_clipped_high.item()) == (0, 1)
    assert result.ratios.item() == pytest.approx(4.5)
    assert (result.min_ratio.item(), result.max_ratio.item()) == pytest.approx((0.5, 2.0))
    result, _ = evaluate("cispo", clip_low=0.2)
    assert (result.num_clipped_low.item(), result.num_clipped_high.item()) == (1, 2)
    assert evaluate("grpo")[0].kl_of_tokens.item() == 0


def test_kl_of_tokens_is_neither_weighted_nor_divided_by_lengths():
    ref = OLD + RATIOS - 0.5
    result, _ = evaluate("grpo", ref=ref, kl_type="k1", kl_coef=1.0, tis_bounds="off")
    assert result.kl_of_tokens.item() == pytest.approx(3 * 0.5)
    assert result.kl.item() == pytest.approx(2 * 0.5)
