"""Replicas that accumulate whole groups, each for itself: any split is the same step, none waits
for another, and a step that is trained again gives the same bits."""

import asyncio
import random
import signal

import pytest
from safetensors.torch import load_file

from lightrl.config.run_file import parse_config
from lightrl.messages.training import ShardsTaken
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    ResetStep,
    StepFinished,
    Update,
)
from lightrl.weights.version.tensors import read_tensors
from tests.support.tiers import e2e
from tests.support.trainer_coordinator import Coordinator, kill, turns, until
from tests.trainer.conftest import DEADLINE_S
from tests.trainer.test_sharding import answer, assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.timeout(300),
]
LR = {"optim": {"lr": 3e-4}, "mini_batches": 2}


def totals(samples):
    return len(samples), sum(len(s.token_ids) // 4 for s in samples)


def splits(samples, num_ranks):
    """Of each step, of each of its two mini-batches, of each rank of two replicas: its
    micro-batches. Ranks of one replica have as many."""
    rng, per_replica = random.Random(3), num_ranks // 2

    def drawn(half, share):
        mine = [s for s in half if rng.random() < share]
        rest = [s for s in half if s not in mine]
        return [dealt(mine, rng.randint(1, 4)), dealt(rest, rng.randint(1, 4))]

    def dealt(mine, num):
        """To the ranks of a replica, `num` micro-batches each if there is anything."""
        each = [mine[k::per_replica] for k in range(per_replica)]
        return [tuple(tuple(m[i::num]) for i in range(num)) if mine else () for m in each]

    halves = samples[:12], samples[12:]
    for shares in [(0.5, 0.2), (0.0, 0.9), (1.0, 0.0), (0.8, 0.5)]:
        yield [
            [batches for replica in drawn(half, share) for batches in replica]
            for half, share in zip(halves, shares, strict=True)
        ]


def steps_of_one(rank, samples, num_steps):
    for step in range(num_steps):
        list(rank.perform(Accumulate(step, (tuple(samples[:12]),))))
        list(rank.perform(Update(step, *totals(samples[:12]))))
        list(rank.perform(Accumulate(step, (tuple(samples[12:]),))))
        [finished] = rank.perform(Update(step, *totals(samples[12:]), step + 1))
    return dict(read_tensors(finished.published.file)), finished.metrics


async def steps_of_replicas(ranks, samples, steps):
    """Each begins anew once, after what is not trained in the end."""
    for step, halves in enumerate(steps):
        for rank, first, second in zip(ranks, *halves, strict=True):
            if first:
                rank.send(Accumulate(step, first))
            rank.send(ResetStep(step))
            if first:
                rank.send(Accumulate(step, first))
            rank.send(Update(step, *totals(samples[:12])))
            if second:
                rank.send(Accumulate(step, second))
            rank.send(Update(step, *totals(samples[12:]), step + 1))
        finished = await answer(ranks[0], StepFinished)
    return {n: t.clone() for n, t in read_tensors(finished.published.file)}, finished.metrics


DAPO = {"name": "dapo", "kl_coef": 0.1}
WAYS = {
    "auto": {"algorithm": DAPO},
    "old-logprobs-of-engines": {"algorithm": {"name": "gspo", "old_logprobs": "rollout"}},
    "whitened": {"algorithm": {"name": "reinforce++"}},
    "lora": {"model": {"path": "unused", "lora": {"rank": 4}}, "algorithm": {"kl_coef": 0.1}},
    "host": {"train": {"offload": "all"}},
    # of two ranks each, which sum up among them
    "whitened-each": {"algorithm": {"name": "reinforce++"}, "train": {"sync": "each"}},
    "host-each": {"algorithm": DAPO, "train": {"offload": "all", "sync": "each"}},
}
ON_TWO = tuple(way for way in WAYS if not way.endswith("-each"))
ON_FOUR = ("auto", "whitened-each", "host-each")


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [
        (ON_TWO[0], 2),
        *e2e((way, 2) for way in ON_TWO[1:]),
        *e2e((way, 4) for way in ON_FOUR),
    ],
)
def test_any_split_of_the_groups_is_the_same_step(
    start, new_rank, processes, samples, way, num_ranks
):
    """Also where a replica has nothing of a mini-batch, or all of it."""
    sections = dict(WAYS[way])
    train = LR | sections.pop("train", {})
    steps = list(splits(samples, num_ranks))
    on_two = start(**sections, train=train | {"ranks": num_ranks, "replicas": 2})

    async def on_replicas():
        async with asyncio.timeout(DEADLINE_S), processes(on_two, world=num_ranks) as ranks:
            return await steps_of_replicas(ranks, samples, steps)

    expected, figures = steps_of_one(new_rank(**sections, train=train), samples, len(steps))
    found, metrics = asyncio.run(on_replicas())
    assert_close(found, expected)
    assert metrics["train/updates"] == figures["train/updates"] == 2
    for key in ("grad_norm", "loss/policy", "entropy", "num_trained_tokens"):
        assert metrics[key] == pytest.approx(figures[key], rel=1e-4, abs=1e-5), key
    last = [len(first) + len(second) for first, second in zip(*steps[-1], strict=True)]
    assert metrics["perf/micro_batches"] == max(last)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("num_ranks", "sync"), [(2, "auto"), *e2e([(4, "each")])])
def test_no_replica_waits_for_another_before_the_update(start, processes, samples, num_ranks, sync):
    """One accumulates all of a step while the other has not even been told of it."""
    train = {"ranks": num_ranks, "replicas": 2, "sync": sync}

    async def run():
        ranks_of = processes(start(train=train, algorithm={"kl_coef": 0.1}), world=num_ranks)
        async with asyncio.timeout(DEADLINE_S), ranks_of as ranks:
            second = ranks[num_ranks // 2 :]
            for _ in range(3):
                for rank in second:
                    rank.send(Accumulate(0, (tuple(samples[:8]), tuple(samples[8:]))))
                for rank in second:
                    assert await answer(rank, Done) == Done(0)
            for rank in ranks:
                rank.send(ResetStep(0))
            assert await answer(ranks[0], Done) == Done(0)

    asyncio.run(run())


# A trainer with real ranks


@pytest.fixture
def new_config(model_dir):
    def make(steps, ranks=2, deterministic=False, mini_batches=1, replicas=2, export="never"):
        return parse_config(
            {
                "run": {"deterministic": deterministic},
                "model": {"path": str(model_dir)},
                "data": {"path": "unused", "max_prompt_length": 8},
                "rollout": {"max_response_length": 32},
                "algorithm": {"name": "dapo", "tis_bounds": (0, 2.0), "kl_coef": 0.1},
                "train": {
                    "steps": steps,
                    "ranks": ranks,
                    "replicas": replicas,
                    "prompts_per_step": 8,
                    "mini_batches": mini_batches,
                    "max_tokens_per_gpu": 40,
                    "optim": {"lr": 1e-3},
                },
                "checkpoint": {"interval": 0, "export": export},
            }
        )

    return make


async def fed_while_stopped(coordinator, step, rank, num=8):
    """The step's groups one by one. From the first of them to the `num`-th this rank computes
    nothing: with the first the collectives are over that follow a version, in which the other ranks
    would wait for it, too."""
    for shard in coordinator.shards(step, (1,) * 8):
        coordinator.trainer.handle(shard)
        taken = ShardsTaken(step, shard.index)
        await until(lambda taken=taken: taken in coordinator.sent)
        if shard.index == 0:
            kill(rank, signal.SIGSTOP)
        if shard.index == num - 1:
            kill(rank, signal.SIGCONT)


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("ranks", "mini_batches"), [(2, 1), (4, 2)])
def test_what_is_trained_again_goes_to_the_same_replicas_and_gives_the_same_bits(
    new_config, groups, tmp_path, ranks, mini_batches
):
    """Ranks of one replica or the other are stopped for a while, so that the other takes the
    groups; then ranks are killed, and with all of them running as they like the bits are the
    same."""
    config = new_config(steps=3, ranks=ranks, mini_batches=mini_batches)

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        on = coordinator.on

        def slow(step, rank):
            # of a mini-batch the rest is taken only when it has been updated, by all of them
            return lambda: fed_while_stopped(coordinator, step, rank, 8 // mini_batches)

        on["published", 0], on["published", 1] = slow(0, 0), slow(1, ranks - 1)
        on["published", 2] = lambda: kill(rank=ranks - 1)
        on["done", 2] = lambda: kill(rank=0)
        await coordinator.run_and_close()
        return coordinator

    coordinator = asyncio.run(run())
    assert coordinator.num_hellos == 3
    assert len(set(coordinator.digests.values())) == 4
    assert {sum(p) for p in coordinator.portions.values()} == {8}
    for version, portions in coordinator.portions.items():
        assert len(coordinator.replicas[version]) == len(portions)
    if mini_batches == 1:  # the one that was stopped had one portion, at most two
        groups_of = {
            version: sum(n for n, r in zip(p, coordinator.replicas[version], strict=True) if r)
            for version, p in coordinator.portions.items()
        }
        assert groups_of[1] >= 5
        assert groups_of[2] <= 3


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_a_deterministic_split_does_not_depend_on_who_is_free(new_config, groups, tmp_path):
    config = new_config(steps=2, deterministic=True)

    def run(name, slow_rank):
        async def inner():
            coordinator = Coordinator(config, tmp_path / name, groups)
            if slow_rank is not None:
                coordinator.on["published", 0] = lambda: fed_while_stopped(
                    coordinator, 0, slow_rank
                )
            await coordinator.run_and_close()
            return coordinator

        return asyncio.run(inner())

    expected, *others = (run(f"run-{rank}", rank) for rank in (None, 0, 1))
    assert set(expected.replicas[1]) == {0, 1}
    for found in others:
        assert (found.digests, found.replicas) == (expected.digests, expected.replicas)


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_replicas_learn_what_one_replica_and_one_rank_do(new_config, groups, tmp_path):
    """Whichever groups each of them happened to take."""
    found = {}
    for ranks, replicas in [(1, 1), (2, 1), (4, 2)]:
        config = new_config(2, ranks, mini_batches=2, replicas=replicas, export="last")
        folder = tmp_path / f"{ranks}-{replicas}"

        async def run(config=config, folder=folder):
            coordinator = Coordinator(config, folder, groups)
            await coordinator.run_and_close()
            return coordinator

        coordinator = asyncio.run(run())
        used = {replica for version in coordinator.replicas.values() for replica in version}
        assert used == (set() if replicas == 1 else set(range(replicas)))
        exported = folder / "checkpoints" / "step_2" / "hf" / "model.safetensors"
        found[ranks, replicas] = load_file(exported)
    expected = found.pop((1, 1))
    for weights in found.values():
        assert_close(weights, expected)


@pytest.mark.usefixtures("warm_emulated")
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), *e2e([(2, 1), (4, 2)])])
def test_whatever_disturbs_a_step_the_same_replicas_have_the_same_groups(
    groups, tmp_path, ranks, replicas
):
    """The coordinator comes back, begins a step again, and a rank is killed: versions of emulated
    ranks are digests of all that each was given, in order."""
    config = parse_config(
        {
            "model": {"path": "unused"},
            "data": {"path": "unused", "max_prompt_length": 8},
            "rollout": {
                "engine": "emulated",
                "max_response_length": 32,
                "engine_args": {"train_token_ms": 0.1},
            },
            "train": {
                "engine": "emulated",
                "steps": 4,
                "ranks": ranks,
                "replicas": replicas,
                "prompts_per_step": 8,
                "max_tokens_per_gpu": 40,
            },
            "checkpoint": {"interval": 0},
        }
    )

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        trainer, on = coordinator.trainer, coordinator.on

        async def come_back():
            kill(number=signal.SIGSTOP)
            for shard in coordinator.shards(1)[:2]:
                trainer.handle(shard)
                await turns()
            coordinator.rejoin()
            kill(number=signal.SIGCONT)

        async def begin_anew():
            for shard in [*coordinator.shards(2)[:3], *coordinator.shards(2)[:2]]:
                trainer.handle(shard)
                await turns()
            coordinator.feed(2)

        for step, happens in enumerate([come_back, begin_anew]):
            on["published", step + 1] = lambda: None  # the shards come later
            on["done", step] = happens
        on["published", 3] = lambda: kill(rank=ranks - 1)
        await coordinator.run_and_close()
        assert not on
        return coordinator

    coordinator = asyncio.run(run())
    assert coordinator.num_hellos == 2
    assert len(set(coordinator.digests.values())) == 5
    used = {r for version in coordinator.replicas.values() for r in version}
    assert used == (set() if replicas == 1 else {0, 1})
