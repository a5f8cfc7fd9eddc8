"""Groups that come in any order, any number at a time: the same step, or with run.deterministic the
same bits. In one rank in this process, and through the trainer node with real ranks."""

import asyncio
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lightrl.config.algorithm import AlgorithmSection
from lightrl.config.run_file import parse_config
from lightrl.errors import TrainerError
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.training import ShardsTaken, StepDone, TrainGroup, TrainResponse, TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.trainer.algorithm.advantage import train_samples
from lightrl.trainer.batch import num_tokens, plan_micro_batches
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.policy import load_policy, response_logprobs
from lightrl.trainer.protocol import Accumulate, Update
from lightrl.trainer.rank_processes import Place
from lightrl.trainer.served import ServedVersions
from lightrl.trainer.trainer import Trainer
from lightrl.weights.serve.server import WeightServer
from lightrl.wire import unpack_f32
from tests.support.tiers import e2e

pytestmark = pytest.mark.usefixtures("warm_ranks")

DEADLINE_S = 110
STEPS = 3
# As the samples are.
SHORT = {"data": {"max_prompt_length": 8}, "rollout": {"max_response_length": 32}}
# How many of eight groups wait each time that the trainer looks, as far as it has not been told
# more.
ALL, HALVES, ONES, UNEVEN = (8,), (4, 4), (1,) * 8, (1, 5, 0, 2)


@pytest.fixture(scope="session")
def groups(samples):
    """Eight groups of three samples."""
    return [samples[i : i + 3] for i in range(0, 24, 3)]


def parts(items, sizes):
    borders = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [items[begin:end] for begin, end in pairwise(borders)]


def train(rank, steps):
    """`steps`: for each the groups that wait each time. The digests of the versions published."""
    digests = []
    for step, waits in enumerate(steps):
        train = rank.config.train
        for waiting in waits:
            [batches] = plan_micro_batches(
                waiting, 1, train.max_tokens_per_gpu, rank.config.run.deterministic
            )
            list(rank.perform(Accumulate(step, batches)))
        samples = [s for waiting in waits for group in waiting for s in group]
        tokens = sum(len(s.token_ids) // 4 for s in samples)
        [finished] = rank.perform(Update(step, len(samples), tokens, step + 1))
        digests.append(finished.published.file.digest)
    return digests


@pytest.mark.parametrize(
    "algorithm", [{"name": "reinforce++", "kl_coef": 0.1}, *e2e([{"name": "grpo"}])]
)
def test_deterministic_steps_are_equal_in_every_bit(new_rank, groups, algorithm):
    def digests(deterministic, *splits):
        rank = new_rank(
            algorithm=algorithm,
            run={"deterministic": deterministic},
            train={"max_tokens_per_gpu": 60},
            data={"path": "unused"} | SHORT["data"],
            rollout=SHORT["rollout"],
        )
        return train(rank, [parts(groups, sizes) for sizes in splits])

    expected = digests(True, ALL, ALL, ALL)
    assert len(set(expected)) == STEPS
    for splits in [(HALVES, ONES, UNEVEN), (ONES, UNEVEN, HALVES), (UNEVEN, HALVES, ONES)]:
        assert digests(True, *splits) == expected
    # Without it the same splits round differently, or the above would show nothing.
    assert digests(False, ALL, ALL, ALL) != digests(False, ONES, ONES, ONES)


@pytest.mark.parametrize("seed", [0, *e2e(range(1, 6))])
def test_any_order_of_arrival_gives_the_same_step_up_to_rounding(new_rank, groups, seed):
    """Tolerance: 2e-6 of the norm of all weights, after three steps of AdamW with lr 1e-3."""
    rng = random.Random(seed)

    def weights(steps):
        rank = new_rank(
            algorithm={"name": "dapo", "tis_bounds": (0, 2.0)}, train={"optim": {"lr": 1e-3}}
        )
        train(rank, steps)
        return torch.cat([p.detach().flatten() for p in rank.learner.policy.module.parameters()])

    expected = weights([[groups]] * STEPS)
    arrivals = []
    for _ in range(STEPS):
        order, sizes = rng.sample(groups, 8), []
        while sum(sizes) < 8:
            sizes.append(rng.randint(1, 8 - sum(sizes)))
        arrivals.append(parts(order, sizes))
    found = weights(arrivals)
    assert (found - expected).norm() <= 2e-6 * expected.norm()


def shards(groups, step, sizes):
    """A shard for each of `sizes`, of groups as the coordinator sends them."""
    rewards = [1.0, 0.0, 0.25]
    sent = [
        TrainGroup(
            f"p{i}@0",
            group[0].prompt,
            tuple(
                TrainResponse(s.response, s.token_ids, s.rollout_logprobs, reward, "stop")
                for s, reward in zip(group, rewards, strict=True)
            ),
        )
        for i, group in enumerate(groups)
    ]
    return [
        TrainShard(step, index, step, tuple(part), index == len(sizes) - 1, len(sent))
        for index, part in enumerate(parts(sent, sizes))
    ]


async def run_trainer(config, folder, next_shards, pause, digests):
    """A trainer node with real ranks. `next_shards(version)` are sent to it when it publishes that
    version, the digest of which is appended to `digests`. Returns the metrics of all steps.

    `pause`: turns of the event loop between shards. With some, the first one is computed while the
    others come and wait; without, all of them wait together.
    """
    for name in ("logs", "weights"):
        (folder / name).mkdir(parents=True)
    published, done = asyncio.Queue(), []

    def send(message):
        match message:
            case PublishWeights(version, digest, deltas=()):
                digests.append(digest)
                published.put_nowait(version)
                trainer.handle(VersionTaken(version, wants_delta=True))
            case StepDone():
                done.append(message.metrics)

    async def feed():
        while True:
            for shard in next_shards(await published.get()):
                trainer.handle(shard)
                for _ in range(pause):
                    await asyncio.sleep(0)

    server = WeightServer()
    await server.start("127.0.0.1")
    versions = ServedVersions(server)
    trainer = Trainer(config, Place(folder, folder / "weights"), versions, send, lambda: None)
    feeding = asyncio.ensure_future(feed())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await trainer.run()
            return done
    finally:
        feeding.cancel()
        await trainer.close()
        await server.close()


def trainer_config(model_dir, ranks, steps):
    return parse_config(
        {
            "model": {"path": str(model_dir)},
            "data": {"path": "unused", **SHORT["data"]},
            "rollout": SHORT["rollout"],
            "run": {"deterministic": True},
            "algorithm": {"name": "dapo", "tis_bounds": (0, 2.0)},
            "train": {
                "steps": steps,
                "ranks": ranks,
                "max_tokens_per_gpu": 40,
                "optim": {"lr": 1e-3},
            },
        }
    )


def test_two_deterministic_ranks_publish_the_same_bits_whatever_the_timing(
    model_dir, tmp_path, groups
):
    config = trainer_config(model_dir, ranks=2, steps=STEPS)

    def run(name, splits, pause):
        def next_shards(version):
            return shards(groups, version, splits[version]) if version < STEPS else []

        digests = []
        return digests, asyncio.run(
            run_trainer(config, tmp_path / name, next_shards, pause, digests)
        )

    digests, metrics = run("together", (ALL, ALL, ALL), pause=0)
    others, other_metrics = run("apart", (ONES, UNEVEN, HALVES), pause=20)
    assert len(set(digests)) == STEPS + 1
    assert others == digests
    for found, expected in zip(other_metrics, metrics, strict=True):
        assert expected["grad_norm"] > 0
        for step in (found, expected):  # as the daemon sees it
            assert step["timing_s/accumulate"] > 0.9 * step["timing_s/forward_backward"]
            assert step["timing_s/finish"] > step["timing_s/optimizer"] > 0
        assert found.keys() == expected.keys()
        times = {key for key in found if key.startswith("timing_s/")} | {"weights/publish_s"}
        for key in found.keys() - times - {"perf/host_memory_gib"}:
            assert found[key] == expected[key], key


@pytest.mark.e2e
def test_shards_of_a_later_step_wait_and_any_other_is_refused(
    new_rank, model_dir, tmp_path, groups
):
    """Also: what a trainer with one rank publishes is what a rank does that gets the same groups in
    order."""
    config = trainer_config(model_dir, ranks=1, steps=STEPS)
    later = shards(groups, 1, ALL)
    wrong = replace(later[0], step=2, policy_version=1)

    def next_shards(version):
        return {0: [*shards(groups, 0, HALVES), *later], 1: [], 2: [wrong]}[version]

    digests = []

    async def run():
        refused = (
            "^shard 0 of step 2 for version 1 came instead of shard 0 of step 2 for version 2$"
        )
        with pytest.raises(TrainerError, match=refused):
            await run_trainer(config, tmp_path / "run", next_shards, pause=20, digests=digests)

    asyncio.run(run())
    rank = new_rank(**config.model_dump(include={"algorithm", "train", "run", "data", "rollout"}))
    samples = [train_samples(group, config) for group in later[0].groups]
    assert digests == [
        rank.started.published.file.digest,
        *train(rank, [[samples], parts(samples, ONES)]),
    ]


@pytest.mark.e2e
def test_entropy_is_of_all_response_tokens_also_of_groups_without_a_signal(
    model_dir, tmp_path, groups
):
    """Exact where it is computed; else the surprisal of what was sampled."""
    config = trainer_config(model_dir, ranks=1, steps=1)
    sent = shards(groups, 0, HALVES)
    flat = {"p1@0", "p2@0", "p6@0"}
    sent = [
        replace(
            shard,
            groups=tuple(
                replace(g, responses=tuple(replace(r, reward=1.0) for r in g.responses))
                if g.group in flat
                else g
                for g in shard.groups
            ),
        )
        for shard in sent
    ]
    [metrics] = asyncio.run(
        run_trainer(config, tmp_path / "run", lambda v: [] if v else sent, pause=0, digests=[])
    )
    policy = load_policy(model_dir, torch.device("cpu"))
    nats = number = num_computed = 0
    for group in (g for shard in sent for g in shard.groups):
        for s in train_samples(group, config):
            number += len(s.token_ids) // 4
            if group.group in flat:
                nats -= sum(unpack_f32(s.rollout_logprobs))
                continue
            batch = collate([s], torch.device("cpu"), policy.vocabulary)
            with torch.no_grad():
                _, entropy = response_logprobs(policy, batch)
            nats += (entropy * batch.mask).sum().item()
            num_computed += len(s.token_ids) // 4
    assert metrics["num_trained_tokens"] == num_computed < number == metrics["num_tokens"]
    assert metrics["entropy"] == pytest.approx(nats / number, rel=1e-5)


@pytest.mark.e2e
def test_gradients_that_are_not_finite_end_the_run_after_five_in_a_row(
    model_dir, tmp_path, groups, caplog
):
    config = trainer_config(model_dir, ranks=1, steps=9)
    config = config.model_copy(update={"algorithm": AlgorithmSection(name="dr_grpo")})

    def too_large(group):
        """Finite as it comes, but its gradient is not."""
        first, *rest = group.responses
        return replace(group, responses=(replace(first, reward=3e38), *rest))

    def next_shards(version):
        [shard] = shards(groups, version, ALL)
        return [shard if version == 1 else replace(shard, groups=(*map(too_large, shard.groups),))]

    digests = []
    refused = "^the gradient of step 6 is not finite: the weights stay .*, as in the 4 steps before"
    with pytest.raises(TrainerError, match=refused):
        asyncio.run(run_trainer(config, tmp_path / "run", next_shards, 0, digests))
    old, new = digests[0], digests[2]
    assert digests == [old, old, *[new] * 6]
    assert old != new
    warned = [r.getMessage() for r in caplog.records if "is not finite" in r.getMessage()]
    assert warned == [
        f"the gradient of step {step} is not finite: the weights stay as they were"
        for step in (0, 2)
    ]


@pytest.mark.e2e
def test_groups_wait_until_they_fill_a_micro_batch_on_every_rank(model_dir, tmp_path, groups):
    """But for none when the step is complete, nor for those that the journal cuts apart."""
    limit = 60
    settings = trainer_config(model_dir, ranks=2, steps=2).model_dump(
        include={"model", "data", "rollout"}
    )
    train = {"steps": 2, "ranks": 2, "max_tokens_per_gpu": limit}
    config = parse_config({**settings, "train": train})
    wholes = shards(groups, 0, ONES)
    apart = [replace(shard, step=1, policy_version=1, alone=True) for shard in wholes]
    coming, portions = [*wholes, *apart], []

    def send(message):
        """The next shard comes when one was taken: one at a time is looked at."""
        if isinstance(message, PublishWeights) and not message.deltas:
            portions.append(message.portions)
        if coming and isinstance(message, (PublishWeights, ShardsTaken)):
            if isinstance(message, PublishWeights) and message.deltas:
                return
            if coming[0].index == 0 and not isinstance(message, PublishWeights):
                return
            trainer.handle(coming.pop(0))

    async def run():
        for name in ("logs", "weights"):
            (tmp_path / name).mkdir()
        server = WeightServer()
        await server.start("127.0.0.1")
        nonlocal trainer
        versions = ServedVersions(server)
        trainer = Trainer(
            config, Place(tmp_path, tmp_path / "weights"), versions, send, lambda: None
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                await trainer.run()
        finally:
            await trainer.close()
            await server.close()

    trainer = None
    asyncio.run(run())
    expected, tokens = [0], 0
    for shard in wholes:
        made = [s for g in shard.groups for s in train_samples(g, config) if s.advantage]
        tokens += sum(map(num_tokens, made))
        expected[-1] += 1
        if tokens >= 2 * limit:
            expected, tokens = [*expected, 0], 0
    assert portions == [(), tuple(n for n in expected if n), (1,) * 8]
    assert 1 < len(portions[1]) < 8


def test_a_penalty_for_length_is_part_of_the_advantage(config):
    def advantages(lengths, **algorithm):
        responses = tuple(
            TrainResponse(f"p0@0#{n}", bytes(4 * n), bytes(4 * n), 1.0, "stop") for n in lengths
        )
        sections = {
            "rollout": {"max_response_length": 100},
            "algorithm": {"name": "dr_grpo"} | algorithm,
        }
        return [
            s.advantage
            for s in train_samples(TrainGroup("p0@0", b"", responses), config(**sections))
        ]

    # Rewards 1, 1, 0.5 and 0 once the penalty is added.
    assert advantages([10, 80, 90, 100], overlong_buffer=20) == pytest.approx(
        [0.375, 0.375, -0.125, -0.625]
    )
    assert advantages([10, 80, 90, 100], overlong_buffer=20, overlong_penalty=0.5) == pytest.approx(
        [0.1875, 0.1875, -0.0625, -0.3125]
    )
    assert advantages([10, 80, 90, 100]) == [0.0] * 4


@pytest.mark.parametrize("is_masked", [True, False])
def test_what_is_cut_at_the_limit_may_count_in_its_group_only(config, is_masked):
    responses = tuple(
        TrainResponse(f"p0@0#{i}", bytes(8), bytes(8), reward, reason)
        for i, (reward, reason) in enumerate([(1.0, "stop"), (0.0, "length"), (0.5, "stop")])
    )
    made = train_samples(
        TrainGroup("p0@0", b"", responses),
        config(algorithm={"name": "dr_grpo", "mask_truncated": is_masked}),
    )
    expected = {"p0@0#0": 0.5, "p0@0#1": -0.5, "p0@0#2": 0.0}
    if is_masked:
        del expected["p0@0#1"]
    assert {s.response: s.advantage for s in made} == expected
