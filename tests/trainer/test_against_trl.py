"""Losses and gradients against TRL's trainers on the same float32 batch, with ratios away from 1 on
both sides of the clip.

Where the two differ by definition:
- CISPO: TRL's `epsilon_high` is the largest weight itself, `clip_high` what it may exceed 1 by.
- KL: ours has the importance weight pi_old / pi_rollout of its token, TRL's has none. TRL's has the
  ratio pi / pi_old by default (`use_bias_correction_kl`), ours has not.
- Entropy: ours is normalised like the loss, TRL's is a mean over tokens whatever the loss is.
"""

import math
import random
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.config.algorithm import AlgorithmSection
from lightrl.trainer.algorithm.advantage import advantages, whitened
from lightrl.trainer.algorithm.loss import Losses, denominator, losses
from lightrl.trainer.model.collate import Batch, collate
from lightrl.trainer.model.policy import Policy, load_policy, response_logprobs
from lightrl.wire import unpack_i32
from tests.support.tiers import e2e

pytestmark = pytest.mark.filterwarnings("ignore")  # whatever TRL and what it imports say
CPU = torch.device("cpu")
LIMIT = 32  # rollout.max_response_length
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl")


@pytest.fixture(scope="module")
def new_trainer(trl, model_dir, tmp_path_factory):
    """One of TRL's, on the CPU in float32, with the model of `policy`."""

    def make(kind: str, **settings: Any) -> Any:
        from datasets import Dataset

        settings = {"epsilon": 0.2, "beta": 0.0, "num_generations": 2} | settings
        if kind == "GRPO":
            settings["use_bias_correction_kl"] = False
        args = getattr(trl, f"{kind}Config")(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            max_completion_length=LIMIT,
            per_device_train_batch_size=2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            **settings,
        )
        trainer = getattr(trl, f"{kind}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "abc"}] * 2),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
        )
        trainer.model.eval()  # nothing is accumulated over several calls
        return trainer

    return make


@dataclass(frozen=True)
class Case:
    """Twelve responses, and what is known of their tokens: [num_tokens], in order, of all rows."""

    policy: Policy
    batch: Batch
    prompts: list[list[int]]
    responses: list[list[int]]
    old: Tensor
    rollout: Tensor
    ref: Tensor
    mask: Tensor = field(default_factory=lambda: torch.ones(0))

    def placed(self, values: Tensor, where: Tensor, elsewhere: float = 0.0) -> Tensor:
        """In the columns of `where`."""
        return torch.full_like(where, elsewhere).masked_scatter(where.bool(), values)


@pytest.fixture(scope="module")
def case(model_dir, samples) -> Case:
    policy = load_policy(model_dir, CPU)
    some = samples[:12]
    batch = collate(some, CPU, policy.vocabulary)
    with torch.no_grad():
        current = response_logprobs(policy, batch)[0][batch.mask.bool()]
    generator = torch.Generator().manual_seed(3)

    def moved(by: float) -> Tensor:
        return current + by * (2 * torch.rand(len(current), generator=generator) - 1)

    old = moved(0.6)
    rollout = old + 0.8 * (2 * torch.rand(len(old), generator=generator) - 1)
    return Case(
        policy,
        batch,
        [unpack_i32(s.prompt) for s in some],
        [unpack_i32(s.token_ids) for s in some],
        old,
        rollout,
        moved(0.4),
        torch.ones(len(current)),
    )


def ours(case: Case, **settings: Any) -> tuple[float, list[Tensor], Losses]:
    """Loss and gradients of a step that is this batch."""
    algorithm = AlgorithmSection(**settings)
    batch, placed = case.batch, case.placed
    # What lies outside the responses must not count.
    mask = placed(case.mask, batch.mask)
    ref = placed(case.ref, batch.mask, 300.0) if algorithm.kl_coef else None
    logprobs, entropy = response_logprobs(case.policy, batch, 1.0, algorithm.entropy_coef > 0)
    found = losses(
        algorithm,
        logprobs,
        placed(case.old, batch.mask, -300.0),
        placed(case.rollout, batch.mask),
        ref,
        batch.advantages,
        mask,
        entropy if algorithm.entropy_coef else None,
    )
    divisor = denominator(algorithm, len(case.responses), int(mask.sum()), LIMIT)
    total = found.total / divisor
    return (
        total.item(),
        list(torch.autograd.grad(total, list(case.policy.module.parameters()))),
        found,
    )


def theirs(trainer: Any, case: Case, weights: Tensor | None = None) -> tuple[float, list[Tensor]]:
    """`weights`: [num_tokens], as TRL makes them where its engine is vLLM."""

    def padded(rows: list[list[int]], at_left: bool) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows))
        holes = [[0] * (width - len(row)) for row in rows]
        ids = [h + r if at_left else r + h for h, r in zip(holes, rows, strict=True)]
        real = [[1] * len(row) for row in rows]
        mask = [h + r if at_left else r + h for h, r in zip(holes, real, strict=True)]
        return torch.tensor(ids), torch.tensor(mask)

    prompt_ids, prompt_mask = padded(case.prompts, at_left=True)
    completion_ids, completion_mask = padded(case.responses, at_left=False)
    where = completion_mask.float()
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "tool_mask": case.placed(case.mask, where).long(),
        "advantages": case.batch.advantages[:, 0],
        "old_per_token_logps": case.placed(case.old, where),
        "old_logps": case.placed(case.old, where).sum(1),
        "ref_per_token_logps": case.placed(case.ref, where),
        "num_items_in_batch": case.mask.sum(),
    }
    if weights is not None:
        trainer.use_vllm = True
        inputs["importance_sampling_ratio"] = case.placed(weights, where)
    total = trainer._compute_loss(trainer.model, inputs)
    return total.item(), list(torch.autograd.grad(total, list(trainer.model.parameters())))


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], abs=LOSS_TOLERANCE)
    off = sum((a - b).square().sum().item() for a, b in zip(found[1], expected[1], strict=True))
    norm = sum(b.square().sum().item() for b in expected[1])
    assert norm > 1e-6
    assert math.sqrt(off / norm) <= GRADIENT_TOLERANCE


def num_clipped(case: Case, low: float, high: float, unit: str) -> tuple[int, int, int]:
    """Above with A > 0, below with A < 0, and free: of tokens, or of responses."""
    current = response_logprobs(case.policy, case.batch)[0].detach()[case.batch.mask.bool()]
    lengths = [len(r) for r in case.responses]
    gaps = (current - case.old).split(lengths)
    counts = [0, 0, 0]
    for gap, advantage in zip(gaps, case.batch.advantages[:, 0].tolist(), strict=True):
        parts = {"token": gap, "mean": gap.mean()[None], "sum": gap.sum()[None]}[unit]
        for ratio in parts.exp().tolist():
            is_above, is_below = ratio > 1 + high, ratio < 1 - low
            counts[0 if is_above and advantage > 0 else 1 if is_below and advantage < 0 else 2] += 1
    return counts[0], counts[1], counts[2]


TABLE = [
    ({"name": "grpo"}, {"loss_type": "grpo"}, "token"),
    ({"name": "dr_grpo"}, {"loss_type": "dr_grpo"}, "token"),
    ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}, "token"),
    ({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.2}, "token"),
    ({"name": "cispo", "clip_high": 4.0}, {"loss_type": "cispo", "epsilon_high": 5.0}, ""),
    (
        {"name": "gspo", "clip_low": 0.05, "clip_high": 0.1},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.1,
        },
        "mean",
    ),
    (
        {"name": "gspo"},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        "",
    ),
    ({"name": "grpo", "kl_coef": 0.3}, {"loss_type": "grpo", "beta": 0.3}, "token"),
    (
        {"name": "dapo", "kl_coef": 0.3},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3},
        "token",
    ),
    (
        {"name": "dapo", "entropy_coef": 0.1},
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1},
        "token",
    ),
]


@pytest.mark.parametrize(("settings", "args", "unit"), TABLE)
def test_losses_and_gradients_are_those_of_grpo_trainer(new_trainer, case, settings, args, unit):
    trainer = new_trainer("GRPO", **args)
    assert_equal(ours(case, **settings)[:2], theirs(trainer, case))
    if unit:
        low, high = AlgorithmSection(**settings).clip
        above, below, free = num_clipped(case, min(low, 0.2), high, unit)
        assert min(above, below, free) > 0
    if settings["name"] != "cispo":
        assert ours(case, **settings)[2].num_clipped > 0


@pytest.mark.parametrize("settings", [{}, {"clip_low": 0.5, "clip_high": 0.7}])
def test_losses_and_gradients_are_those_of_rloo_trainer(new_trainer, case, settings):
    low, high = AlgorithmSection(name="rloo", **settings).clip
    trainer = new_trainer("RLOO", epsilon=low, epsilon_high=high)
    assert_equal(ours(case, name="rloo", **settings)[:2], theirs(trainer, case))
    assert min(num_clipped(case, low, high, "sum")) > 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_a_loss_mask_is_their_tool_mask(new_trainer, case, name):
    """Tokens of a tool between those of the policy: denominators and ratios of responses heed
    it."""
    rng = random.Random(5)
    masked = replace(case, mask=torch.tensor([float(rng.random() < 0.7) for _ in case.old]))
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    args = {"loss_type": "grpo" if name == "gspo" else name}
    if name == "gspo":
        args["importance_sampling_level"] = "sequence"
    if name == "cispo":
        clip, args["epsilon_high"] = {}, 1.2
    trainer = new_trainer("GRPO", **args)
    found = ours(masked, name=name, **clip)
    assert_equal(found[:2], theirs(trainer, masked))
    assert found[0] != pytest.approx(ours(case, name=name, **clip)[0], abs=1e-3)


def weights_of_trl(case: Case, mode: str, level: str, cap: float, low: float = 0.0) -> Tensor:
    """Of `GRPOTrainer._generate_and_score_completions`, which cannot be called without vLLM:
    `vllm_importance_sampling_mode` is f"{level}_{mode}"."""
    gaps = (case.old - case.rollout).split([len(r) for r in case.responses])
    if level == "sequence":
        gaps = [gap.sum().expand_as(gap) for gap in gaps]
    ratio = torch.cat(list(gaps)).exp()
    if mode == "truncate":
        return ratio.clamp(low, cap)
    return ratio.masked_fill((ratio < low) | (ratio > cap), 0.0)


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("low", [0.8, *e2e([0.0])])
def test_truncated_and_masked_weights_are_theirs(new_trainer, case, name, mode, level, low):
    args: dict[str, Any] = {"loss_type": "grpo" if name == "gspo" else name}
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    if name == "gspo":
        args["importance_sampling_level"] = "sequence"
    if name == "cispo":
        clip, args["epsilon_high"] = {}, 1.2
    weights = weights_of_trl(case, mode, level, cap=1.5, low=low)
    assert 0 < (weights == (1.5 if mode == "truncate" else 0)).sum() < len(weights)
    settings = {"name": name, "tis_bounds": (low, 1.5), "tis_mode": mode, "tis_level": level}
    found = ours(case, **settings, **clip)
    assert_equal(found[:2], theirs(new_trainer("GRPO", **args), case, weights))
    assert found[2].num_truncated > 0


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_the_dual_clip_is_their_delta(new_trainer, case, name):
    args = {"loss_type": name, "delta": 1.4}
    if name == "dapo":
        args["epsilon_high"] = 0.28
    found = ours(case, name=name, clip_dual=1.4)
    assert_equal(found[:2], theirs(new_trainer("GRPO", **args), case))
    assert found[2].num_clipped_dual > 0


def test_the_kl_term_has_the_weights_that_theirs_lacks(new_trainer, case):
    settings = {"name": "dapo", "kl_coef": 3.0}
    trainer = new_trainer("GRPO", loss_type="dapo", epsilon_high=0.28, beta=3.0)
    total, _ = theirs(trainer, case, weights_of_trl(case, "truncate", "token", cap=1.5))
    plain, weighted = ours(case, **settings)[2], ours(case, **settings, tis_bounds=(0, 1.5))[2]
    num_tokens = len(case.old)
    expected = (weighted.total - 3 * weighted.kl + 3 * plain.kl).item() / num_tokens
    assert total == pytest.approx(expected, abs=LOSS_TOLERANCE)
    assert abs(3 * (weighted.kl - plain.kl)) / num_tokens > 10 * LOSS_TOLERANCE


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_reinforce_is_its_formula_token_by_token(case, samples, model_dir, name):
    """As verl has it, each response computed alone by transformers: A = (r - mean) / sqrt(var +
    1e-8) over all tokens of the step, r less the mean of its group with a baseline, then PPO's
    clipped loss, mean over tokens."""
    some, rng = samples[:12], random.Random(8)
    rewards = [rng.choice([0.0, 0.5, 1.0]) for _ in some]
    signals = [a for i in range(0, 12, 4) for a in advantages(name, rewards[i : i + 4])]
    told = [replace(s, advantage=a) for s, a in zip(some, signals, strict=True)]
    [batch] = whitened([tuple(told)], lambda parts: parts)
    mine = replace(case, batch=collate(batch, CPU, case.policy.vocabulary))

    per_token = []
    for i, response in enumerate(case.responses):
        group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
        less = sum(group) / 4 if name.endswith("baseline") else 0.0
        per_token += [rewards[i] - less] * len(response)
    num, mean = len(per_token), sum(per_token) / len(per_token)
    std = math.sqrt(sum((a - mean) ** 2 for a in per_token) / (num - 1) + 1e-8)
    module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    total, t, sides = torch.zeros(()), 0, set()
    for prompt, response in zip(case.prompts, case.responses, strict=True):
        every = module(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        for j, token in enumerate(response):
            ratio = (every[len(prompt) + j - 1, token] - case.old[t]).exp()
            advantage = (per_token[t] - mean) / std
            held = ratio.clamp(0.8, 1.2)
            total = total - torch.minimum(ratio * advantage, held * advantage) / num
            if (advantage > 0) == (ratio.item() > 1):
                sides.add((ratio.item() > 1.2) - (ratio.item() < 0.8))
            t += 1
    assert sides == {-1, 0, 1}  # clipped above, clipped below, and free
    gradients = list(torch.autograd.grad(total, list(module.parameters())))
    assert_equal(ours(mine, name=name)[:2], (total.item(), gradients))
