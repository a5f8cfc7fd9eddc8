"""Episodes in the trainer: no prompt, and tokens that an environment inserted and that nothing is
learned from."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from lightrl.config.algorithm import ALGORITHMS
from lightrl.errors import TrainerError
from lightrl.messages.training import TrainGroup, TrainResponse
from lightrl.trainer.algorithm.advantage import train_samples
from lightrl.trainer.batch import micro_batches, surprisal_of_rest
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.forward import Way
from lightrl.trainer.model.policy import load_policy, response_logprobs
from lightrl.trainer.protocol import Accumulate, Update
from lightrl.weights.version.tensors import read_tensors
from lightrl.wire import num_trained, pack_f32, pack_i32, unpack_f32, unpack_i32
from tests.support.masks import pack_mask
from tests.trainer.test_sharding import (
    CPU,
    LR,
    SECTIONS,
    VOCABULARY,
    assert_close,
    steps_of_one,
    steps_of_two,
)
from tests.trainer.test_step import assert_close as assert_about

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


TIMES = ("timing", "perf", "weights/")  # names of metrics that differ from run to run


def as_episode(sample, logprob=0.0):
    """The same tokens, all of them in the response; those of the prompt have this logprob."""
    num = len(sample.prompt) // 4
    return replace(
        sample,
        prompt=b"",
        token_ids=sample.prompt + sample.token_ids,
        rollout_logprobs=pack_f32([logprob] * num) + sample.rollout_logprobs,
        loss_mask=pack_mask([False] * num + [True] * (len(sample.token_ids) // 4)),
    )


def as_two_turns(sample, logprob=0.0, trained=()):
    """As `as_episode`, and the second third of the response is an observation, of which the tokens
    at `trained` are taken for sampled ones."""
    one = as_episode(sample)
    num, length = len(sample.prompt) // 4, len(sample.token_ids) // 4
    inserted = range(num + length // 3, num + 2 * length // 3)
    flags = [i >= num and (i not in inserted or i in trained) for i in range(num + length)]
    logprobs = unpack_f32(one.rollout_logprobs)
    for i in set(inserted) - set(trained):
        logprobs[i] = logprob
    return replace(one, rollout_logprobs=pack_f32(logprobs), loss_mask=pack_mask(flags))


def step(rank, batches, samples):
    """Gradients before the optimizer acts, and the metrics of the step."""
    for batch in batches:
        list(rank.perform(Accumulate(0, (batch,))))
    named = rank.learner.policy.module.named_parameters()
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    tokens = sum(num_trained(s.token_ids, s.loss_mask) for s in samples)
    [finished] = rank.perform(Update(0, len(samples), tokens, 1))
    found = {n: t.clone() for n, t in read_tensors(finished.published.file)}
    kept = {k: v for k, v in finished.metrics.items() if not k.startswith(TIMES)}
    return gradients, found, kept


def settings(name):
    return {"algorithm": {"name": name, "kl_coef": 0.1, "tis_bounds": [0, 2], "entropy_coef": 0.01}}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_episode_of_one_turn_is_trained_as_a_response_to_a_prompt(new_rank, samples, name):
    episodes = [as_episode(s) for s in samples]
    _, expected, figures = step(new_rank(**settings(name)), [tuple(samples)], samples)
    for num_ranks in (1, 2):
        plans = micro_batches(episodes, num_ranks, 60)
        batches = [batch for plan in plans for batch in plan]
        _, found, metrics = step(new_rank(**settings(name)), batches, episodes)
        assert_about(found, expected, 2e-5)
        assert metrics == pytest.approx(figures, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("has_tiles", [True, False])
def test_the_logprobs_of_an_episode_are_those_of_its_tokens_alone(
    model_dir, samples, packed, has_tiles
):
    policy = load_policy(model_dir, CPU)
    way = Way(packed, policy.way.projection if has_tiles else None)
    episodes = [as_two_turns(s) for s in samples]
    batch = collate(episodes, CPU, VOCABULARY, packed)
    with torch.no_grad():
        logprobs, _ = response_logprobs(replace(policy, way=way), batch)
        for row, one in enumerate(episodes):
            ids = torch.tensor(unpack_i32(one.token_ids))
            every = policy.module(ids[None]).logits[0].log_softmax(-1)[:-1]
            alone = every.gather(-1, ids[1:, None])[:, 0]
            mask = batch.mask[row, 1 : len(ids)]
            torch.testing.assert_close(
                logprobs[row, 1 : len(ids)], alone * mask, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_is_learned_from_an_observation(new_rank, samples, name):
    """Whatever logprob it carries, nothing changes by a bit; and everything does if one of its
    tokens is taken for a sampled one."""
    long = [s for s in samples if len(s.token_ids) >= 24]
    some = [as_two_turns(s) for s in long]
    expected = step(new_rank(**settings(name)), [tuple(some)], some)
    wrong = [as_two_turns(s, logprob=math.nan) for s in long]
    found = step(new_rank(**settings(name)), [tuple(wrong)], wrong)
    for a, b in zip(expected[:2], found[:2], strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
    assert found[2] == expected[2]
    first = len(long[0].prompt) // 4 + len(long[0].token_ids) // 4 // 3
    some[0] = as_two_turns(long[0], trained={first})
    gradients, weights, metrics = step(new_rank(**settings(name)), [tuple(some)], some)
    assert any(not torch.equal(weights[n], expected[1][n]) for n in weights)
    if gradients:  # else the step is computed when it ends
        assert any(not torch.equal(gradients[n], expected[0][n]) for n in gradients)
    assert metrics["num_trained_tokens"] == expected[2]["num_trained_tokens"] + 1


@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_learn_from_episodes_what_one_does(start, new_rank, processes, samples, tmp_path):
    sections = SECTIONS | {"train": {"ranks": 2, **LR}}
    episodes = [as_two_turns(s, logprob=math.nan) for s in samples]

    async def on_two_ranks():
        async with processes(start(**sections), world=2) as ranks:
            return (await steps_of_two(ranks, episodes, tmp_path))[0]

    expected = steps_of_one(new_rank(**SECTIONS | {"train": LR}), episodes)
    assert_close(asyncio.run(on_two_ranks()), expected)


def test_a_first_token_without_any_before_it_cannot_be_trained(samples):
    one = replace(as_episode(samples[0]), loss_mask=b"")
    with pytest.raises(TrainerError, match=r"^p0@0#0: nothing comes before its first token"):
        collate([one], CPU, VOCABULARY)
    with pytest.raises(TrainerError, match="nothing comes before"):
        collate([replace(one, token_ids=b"", rollout_logprobs=b"")], CPU, VOCABULARY)


def test_the_length_of_an_episode_is_that_of_its_sampled_tokens(config, samples):
    """In the penalty for length; what was cut is not trained, however long its observations are."""
    rows = [as_two_turns(s) for s in samples[:3]]
    group = TrainGroup(
        "p0@0",
        b"",
        tuple(
            TrainResponse(s.response, s.token_ids, s.rollout_logprobs, 1.0, finish, s.loss_mask)
            for s, finish in zip(rows, ("stop", "length", "stop"), strict=True)
        ),
    )
    num = max(num_trained(s.token_ids, s.loss_mask) for s in rows)
    algorithm = {"name": "dr_grpo", "overlong_buffer": num, "mask_truncated": True}
    made = train_samples(
        group, config(algorithm=algorithm, rollout={"max_response_length": num, "group_size": 3})
    )
    assert [s.response for s in made] == [rows[0].response, rows[2].response]
    penalties = [-num_trained(s.token_ids, s.loss_mask) / num for s in rows]
    mean = sum(penalties) / 3
    assert [s.advantage for s in made] == pytest.approx([penalties[0] - mean, penalties[2] - mean])


def test_the_entropy_of_what_is_not_computed_is_that_of_sampled_tokens(config, samples):
    one = replace(as_two_turns(samples[0], logprob=math.nan), advantage=0.0)
    logprobs, bits = unpack_f32(one.rollout_logprobs), int.from_bytes(one.loss_mask, "little")
    trained = [p for i, p in enumerate(logprobs) if bits >> i & 1]
    nats, number = surprisal_of_rest([one], config().algorithm)
    assert (nats, number) == (pytest.approx(-sum(trained)), len(trained))
    assert len(unpack_i32(one.token_ids)) > number
    assert pack_i32([]) == one.prompt
