"""Several updates of a step, held to the policy of its begin or to what engines sampled from."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch

from lightrl.config.algorithm import ALGORITHMS
from lightrl.errors import TrainerError
from lightrl.trainer.algorithm import loss
from lightrl.trainer.batch import micro_batches, num_tokens
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    RankStarted,
    ResetStep,
    StepFinished,
    Update,
)
from lightrl.trainer.trainer import MAX_NONFINITE, NonfiniteSteps
from lightrl.weights.version.tensors import read_tensors
from lightrl.wire import num_trained, pack_f32, unpack_f32, unpack_i32
from tests.support.masks import pack_mask
from tests.support.tiers import e2e
from tests.trainer.conftest import DEADLINE_S
from tests.trainer.test_step import assert_close, weights, whitened_by_formula

# Rounding of gradients that are about zero becomes steps of Adam, in proportion: they are small, so
# are the bounds that ratios are to leave.
LR, CLIP = 3e-4, {"clip_low": 0.004, "clip_high": 0.006}
METRICS = (
    "loss/policy",
    "loss/kl",
    "entropy",
    "clip_frac",
    "grad_norm",
    "train_rollout_logprob_abs_diff",
    "num_trained_tokens",
)


def train(**settings):
    return {"mini_batches": 2, "optim": {"lr": LR, "grad_clip": 0.0} | settings}


def totals(samples):
    return len(samples), sum(num_trained(s.token_ids, s.loss_mask) for s in samples)


@pytest.fixture(scope="module")
def masked(samples):
    """Some responses have tokens that are not trained: of an environment, say."""
    rng = random.Random(11)
    made = []
    for i, s in enumerate(samples):
        flags = [rng.random() < 0.6 for _ in unpack_i32(s.token_ids)]
        made.append(replace(s, loss_mask=pack_mask(flags) if i % 3 else b""))
    return made


def flags_of(sample):
    bits, length = int.from_bytes(sample.loss_mask, "little"), len(sample.token_ids) // 4
    return [not sample.loss_mask or bool(bits >> j & 1) for j in range(length)]


def run_step(rank, halves, step=0):
    """`halves`: of each mini-batch what arrives of it, in order. What has no trained token is never
    sent, but counts."""
    for i, arrivals in enumerate(halves):
        every = [s for batches in arrivals for batch in batches for s in batch]
        for batches in arrivals:
            kept = tuple(tuple(s for s in batch if totals([s])[1]) for batch in batches)
            list(rank.perform(Accumulate(step, kept)))
        if i < len(halves) - 1:
            assert list(rank.perform(Update(step, *totals(every)))) == [Done(step)]
    [finished] = rank.perform(Update(step, *totals(every), step + 1))
    return finished.published, finished.metrics


def whole(*halves):
    """Each mini-batch arrives at once."""
    return [[(tuple(half),)] for half in halves]


@pytest.mark.parametrize("is_masked", [True, *e2e([False])], ids=["masked", "all"])
@pytest.mark.parametrize("old", ["trainer", *e2e(["rollout"])])
@pytest.mark.parametrize(
    "algorithm",
    [{"name": "grpo", "kl_coef": 0.1}, *({"name": n} for n in ("cispo", "gspo", "reinforce++"))],
    ids=lambda a: a["name"],
)
def test_steps_of_two_mini_batches_do_not_depend_on_arrivals(
    new_rank, samples, masked, algorithm, old, is_masked
):
    samples = masked if is_masked else samples
    halves = samples[:12], samples[12:]
    mixed = [random.Random(5).sample(half, 12) for half in halves]
    ways = {
        "whole": whole(*halves),
        "planned": [[micro_batches(half, 1, 40)[0]] for half in halves],
        "as they come": [
            [(tuple(half[i : i + 5]),) for i in range(0, len(half), 5)] for half in mixed
        ],
    }
    after = {}
    for way, arrivals in ways.items():
        rank = new_rank(algorithm=algorithm | {"old_logprobs": old}, train=train(lr=5e-4))
        for step in range(2):
            _, metrics = run_step(rank, arrivals, step)
        after[way] = (weights(rank), metrics)
    reference, expected = after.pop("whole")
    assert expected["train/updates"] == 2
    for found, metrics in after.values():
        assert_close(found, reference, 2e-6)
        for key in METRICS:
            assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


def plain_loss(name, sample, now, old, clip):
    """Of one response, token by token: no padding, no tensors but the scalars that are trained."""
    trained = [t for t, is_trained in enumerate(flags_of(sample)) if is_trained]
    low, high = 1 - clip[0], 1 + clip[1]
    ratios = {t: torch.exp(now[t] - old[t]) for t in trained}
    logs = [now[t] - old[t] for t in trained]
    if name == "gspo":
        ratios = dict.fromkeys(trained, torch.exp(sum(logs) / len(logs)))
    if name == "rloo":
        ratios = dict.fromkeys(trained, torch.exp(sum(logs)))
    terms, num_clipped = [], 0
    for t in trained:
        ratio, a = ratios[t], sample.advantage
        held = min(max(ratio.item(), low), high)
        if name == "cispo":
            terms.append(-held * a * now[t])
            num_clipped += held != ratio.item()
        else:
            is_clipped = held * a < ratio.item() * a
            terms.append(torch.tensor(-held * a) if is_clipped else -ratio * a)
            num_clipped += is_clipped
    share = len(trained) if name in ("grpo", "gspo", "rloo") else 1
    return sum(terms) / share, num_clipped


def plain_logprobs(module, sample):
    prompt, response = unpack_i32(sample.prompt), unpack_i32(sample.token_ids)
    logits = module(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def plain_step(module, optimizer, halves, name, old_logprobs, clip):
    """One step as a loop over mini-batches, responses and tokens. Returns the share of clipped
    tokens."""
    every, num_clipped = [s for half in halves for s in half], 0
    with torch.no_grad():
        before = {
            s.response: plain_logprobs(module, s)
            if old_logprobs == "trainer"
            else torch.tensor(unpack_f32(s.rollout_logprobs))
            for s in every
        }
    for half in halves:
        worth = half
        if name.startswith("reinforce++"):
            worth = whitened_by_formula(half, lambda s: range(totals([s])[1]))
        total = 0 * sum(p.sum() for p in module.parameters())  # moments act without gradients, too
        for s in worth:
            if any(flags_of(s)):
                now = plain_logprobs(module, s)
                value, clipped = plain_loss(name, s, now, before[s.response], clip)
                total, num_clipped = total + value, num_clipped + clipped
        per_response = name in ("grpo", "gspo", "rloo", "dr_grpo")
        divisor = len(half) if per_response else totals(half)[1]
        optimizer.zero_grad()
        (total / (divisor * 20 if name == "dr_grpo" else divisor)).backward()
        optimizer.step()
    return num_clipped / totals(every)[1]


def near(module, samples):
    """What an engine with slightly other weights would have said of them."""
    rng = torch.Generator().manual_seed(2)
    made = []
    with torch.no_grad():
        for s in samples:
            exact = plain_logprobs(module, s)
            noise = 0.01 * torch.randn(len(exact), generator=rng)
            made.append(replace(s, rollout_logprobs=pack_f32((exact + noise).tolist())))
    return made


@pytest.mark.parametrize("old", ["rollout", *e2e(["trainer"])])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_of_three_mini_batches_is_that_of_a_plain_loop(new_rank, masked, name, old):
    """Old logprobs stay those of the step's begin while the weights move, and clipping acts."""
    settings = {"name": name, "old_logprobs": old} | ({} if name == "gspo" else CLIP)
    if name == "dr_grpo":
        settings["loss_norm"] = 20
    wide = {"mini_batches": 3, "prompts_per_step": 3, "optim": {"lr": LR, "grad_clip": 0.0}}
    rank, other = (new_rank(algorithm=settings, train=wide) for _ in range(2))
    module = other.learner.policy.module
    samples = near(module, masked)
    halves = samples[:8], samples[8:15], samples[15:]
    plain = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0)
    clip = rank.learner.algorithm.clip
    for step in range(2):
        _, metrics = run_step(rank, whole(*halves), step)
        clipped = plain_step(module, plain, halves, name, old, clip)
        assert metrics["clip_frac"] == pytest.approx(clipped, abs=1e-6)
        assert metrics["clip_frac"] > 0
        assert_close(weights(rank), dict(module.named_parameters()), 2e-6)


def after_one(new_rank, samples, mini_batches, name):
    settings = {"optim": {"lr": 1e-2, "grad_clip": 0.0}, "mini_batches": mini_batches}
    equal = {"name": name, "loss_norm": "token"}  # but for what is clipped, and how
    rank = new_rank(algorithm=equal, train=settings)
    half = len(samples) // mini_batches
    _, metrics = run_step(
        rank, whole(*(samples[i : i + half] for i in range(0, len(samples), half)))
    )
    return weights(rank), metrics["clip_frac"]


@pytest.mark.parametrize(("one", "other"), [("grpo", "gspo"), ("dapo", "cispo")])
def test_with_two_mini_batches_clipping_tells_algorithms_apart(new_rank, samples, one, other):
    """With one they are the same: all ratios are 1."""
    for mini_batches in (1, 2):
        (first, clipped), (second, other_clipped) = (
            after_one(new_rank, samples, mini_batches, name) for name in (one, other)
        )
        gap = math.sqrt(sum((first[n] - second[n]).square().sum().item() for n in first))
        if mini_batches == 1:
            assert clipped == other_clipped == 0
            assert_close(first, second, 2e-6)
        else:
            assert clipped > 0
            assert other_clipped > 0
            assert gap > 1e-3


def test_a_single_update_is_clipped_where_ratios_are_to_what_engines_said(new_rank, samples):
    rank = new_rank(algorithm={"name": "grpo", "old_logprobs": "rollout"})
    _, metrics = run_step(rank, whole(samples))
    assert metrics["clip_frac"] > 0.3
    assert metrics["train_rollout_logprob_abs_diff"] > 0.1  # of the policy, not of its old logprobs
    assert "tis/mean" not in metrics


def test_ratios_to_one_policy_do_not_depend_on_when_a_mini_batch_comes(new_rank, samples):
    """The copy is of the step's begin, not of the last update; and the weights come back."""
    rank = new_rank(train=train() | {"mini_batches": 3, "prompts_per_step": 3})
    seen = []
    original = loss.losses

    def spy(algorithm, logprobs, old_logprobs, *rest):
        seen.append((logprobs.detach(), old_logprobs))
        return original(algorithm, logprobs, old_logprobs, *rest)

    learner_losses = pytest.MonkeyPatch()
    learner_losses.setattr(loss, "losses", spy)
    try:
        run_step(rank, whole(samples, samples, samples))
    finally:
        learner_losses.undo()
    assert torch.equal(seen[0][0], seen[0][1])
    assert torch.equal(seen[1][1], seen[0][1])
    assert torch.equal(seen[2][1], seen[0][1])
    assert not torch.equal(seen[1][0], seen[1][1])
    assert not torch.equal(seen[2][0], seen[1][0])


@pytest.mark.parametrize("old", ["trainer", "rollout"])
def test_the_difference_to_the_engine_is_of_the_weights_that_it_serves(new_rank, samples, old):
    """Whatever the first update has made of them."""
    rank = new_rank(algorithm={"name": "grpo", "old_logprobs": old}, train=train(lr=1e-6))
    exact = near(rank.learner.policy.module, samples)
    found = {}
    for lr in (1e-6, 1e-2):
        rank = new_rank(algorithm={"name": "grpo", "old_logprobs": old}, train=train(lr=lr))
        _, metrics = run_step(rank, whole(exact[:12], exact[12:]))
        found[lr] = metrics["train_rollout_logprob_abs_diff"]
    assert 0.001 < found[1e-2] < 0.02
    assert found[1e-2] == pytest.approx(found[1e-6], rel=1e-4)


def test_a_step_is_lost_when_none_of_its_updates_is_finite(new_rank, samples):
    poisoned = [*samples[:11], replace(samples[11], advantage=math.inf)]
    rank, lost, before = new_rank(train=train()), NonfiniteSteps(), None
    for step in range(MAX_NONFINITE):
        published, metrics = run_step(rank, whole(samples[12:], poisoned), step)
        assert (metrics["train/skipped_nonfinite"], metrics["train/updates"]) == (1, 1)
        assert published.file.digest != before  # the other one has moved them
        before = published.file.digest
        lost.count(step, metrics)
    for step in range(MAX_NONFINITE, 2 * MAX_NONFINITE - 1):
        published, metrics = run_step(rank, whole(poisoned, poisoned), step)
        assert published.file.digest == before
        lost.count(step, metrics)
    with pytest.raises(TrainerError, match="is not finite: the weights stay as they were"):
        lost.count(9, metrics)


@pytest.mark.parametrize("num_steps", [0, 1], ids=["no moments yet", "moments"])
def test_a_step_that_begins_anew_takes_its_updates_back(new_rank, samples, num_steps):
    halves = whole(samples[:12], samples[12:])
    digests = []
    for is_disturbed in (False, True):
        rank = new_rank(train=train())
        for step in range(num_steps):
            run_step(rank, halves, step)
        if is_disturbed:
            some = samples[3:9]
            list(rank.perform(Accumulate(num_steps, (tuple(some),))))
            list(rank.perform(Update(num_steps, *totals(some))))
            list(rank.perform(Accumulate(num_steps, (tuple(some),))))
            assert list(rank.perform(ResetStep(num_steps))) == [Done(num_steps)]
        for step in (num_steps, num_steps + 1):
            published, _ = run_step(rank, halves, step)
        digests.append(published.file.digest)
    assert digests[0] == digests[1]


def test_a_step_that_ends_after_a_mini_batch_has_no_more_to_update(new_rank, samples):
    """Fewer groups came than a step should have: the last mini-batch is empty."""
    first, second = new_rank(train=train()), new_rank(train=train())
    published, metrics = run_step(first, whole(samples))
    list(second.perform(Accumulate(0, (tuple(samples),))))
    list(second.perform(Update(0, *totals(samples))))
    [finished] = second.perform(Update(0, 0, 0, 1))
    assert finished.published.file.digest == published.file.digest
    for key in METRICS:
        assert finished.metrics[key] == metrics[key]


def test_a_mask_hides_what_it_does_not_train(new_rank, samples, masked):
    """Neither what an engine said of such a token nor its reward's share of the loss is seen."""

    def after(given):
        rank = new_rank(algorithm={"name": "grpo", "tis_bounds": (0, 2.0), "entropy_coef": 0.01})
        published, metrics = run_step(rank, whole(given))
        return published.file.digest, metrics

    noise = [
        replace(
            s,
            rollout_logprobs=pack_f32(
                [
                    x if is_trained else math.nan
                    for x, is_trained in zip(
                        unpack_f32(s.rollout_logprobs), flags_of(s), strict=True
                    )
                ]
            ),
        )
        for s in masked
    ]
    digest, metrics = after(masked)
    hidden, same = after(noise)
    assert hidden == digest
    assert {k: same[k] for k in METRICS} == {k: metrics[k] for k in METRICS}
    assert metrics["num_trained_tokens"] == metrics["num_tokens"] == totals(masked)[1]
    assert metrics["num_tokens"] < totals(samples)[1]
    assert after(samples)[0] != digest


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("old", "name", "sync"),
    [
        ("trainer", "reinforce++", "each"),
        *e2e(
            [
                ("trainer", "grpo", "last"),
                ("rollout", "grpo", "each"),
                ("trainer", "grpo", "each"),
                ("rollout", "grpo", "last"),
            ]
        ),
    ],
)
def test_two_ranks_take_the_steps_of_one(start, new_rank, processes, masked, old, name, sync):
    """Two steps of two mini-batches, the first begun anew after an update."""
    sections = {
        "algorithm": {"name": name, "old_logprobs": old, "kl_coef": 0.1},
        "train": train(lr=5e-4) | {"sync": sync},
    }
    usable = [s for s in masked if totals([s])[1]]
    halves = usable[:10], usable[10:]

    def commands(step):
        first, second = halves
        yield [Accumulate(step, (tuple(first[:7]),)), Accumulate(step, (tuple(first[7:]),))]
        yield Update(step, *totals(first))
        yield [Accumulate(step, (tuple(second[:2]),)), Accumulate(step, (tuple(second[2:]),))]

    async def on_two_ranks():
        async with asyncio.timeout(DEADLINE_S), processes(start(**sections), world=2) as ranks:

            def tell(command):
                for rank, mine in zip(
                    ranks, command if isinstance(command, list) else [command] * 2, strict=True
                ):
                    rank.send(mine)

            for command in [*commands(0), ResetStep(0)]:
                tell(command)
            for step in range(2):
                for command in [*commands(step), Update(step, *totals(halves[1]), step + 1)]:
                    tell(command)
            seen = []
            while len(seen) < 3:
                event = await ranks[0].receive()
                if isinstance(event, StepFinished | RankStarted):
                    seen.append(event.published)
            return dict(read_tensors(seen[-1].file))

    alone = new_rank(**sections)
    for step in range(2):
        run_step(alone, whole(*halves), step)
    found, expected = asyncio.run(on_two_ranks()), weights(alone)
    assert_close({name: found[name] for name in expected}, expected, 2e-6)
    assert num_tokens(usable[0]) > 0
