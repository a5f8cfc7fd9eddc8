"""Hundreds of seeded worlds in which everything happens in any order; a world that breaks becomes a
test.

After every event all invariants hold (the driver checks). In the end, with the faults over, every
world finishes. What a synchronous run has trained is what `oracle` says, whatever went wrong on the
way.
"""

import random
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest

from lightrl.core.events import DrainRequested, NodeLeft, ShellFailed
from lightrl.core.settings import EvalSet, Tail
from lightrl.core.training import trainer_feed as trainer_feed
from lightrl.messages.responses import Sampling
from tests.core.conftest import held_out
from tests.core.oracle import oracle
from tests.core.world import World
from tests.support.tiers import e2e

NUM_EVENTS = 100
# of different numbers of prompts and samples, sampled differently and cut at different lengths
EVAL_SETS = (
    EvalSet("short", 2, 1, Sampling(0.0), 2),
    EvalSet("many", 1, 3, Sampling(0.6, 0.95), 7),
    EvalSet("long", 2, 2, Sampling(1.0), 12),
)


def settings(seed: int, race: str = "tokens", **changes: Any) -> dict[str, Any]:
    """Of a small run of any kind: tail batching off, of prompts or of both, and everything else."""
    rng = random.Random(f"settings {seed}")
    needed, size = rng.randint(1, 4), rng.randint(1, 2)
    eta = rng.choice([1.25, 1.5, 2.0])
    many = round(eta * needed)
    tail = Tail(*rng.choice([(1.0, 1.0), (eta, 1.0), (eta, 1.5)]), fresh_noise=rng.random() < 0.1)
    deferred = random.Random(f"deferred {seed}").choice(["restart", "continue"])
    return {
        "num_steps": rng.randint(3, 5),
        "prompts_per_step": needed,
        "group_size": size,
        "num_prompts": max(many, needed) + rng.choice([0, 1, 2, 3, 5, 10]),
        "tail": replace(tail, race=race, deferred=deferred),
        "dynamic_sampling": rng.random() < 0.35,
        "deterministic": rng.random() < 0.5,
        "foresight": rng.random() < 0.7,
        "eval_sets": rng.choice([(), (), (held_out(2), EVAL_SETS)[seed % 2]]),
        "eval_interval": rng.choice([0, 1, 2]),
        "reward_on_failure": rng.choice([None, None, -1.0]),
        "slots": rng.randint(1, 4),
        "broadcast": rng.choice(["auto", "always", "always", "off"]),
        "weights_timeout_s": 3.0,
        **changes,
    }


def sharing(seed: int, **changes: Any) -> dict[str, Any]:
    """The same, of nodes that use the trainer's devices: all at once, or some of them."""
    parts = 1 + seed % 3 // 2
    return {**settings(seed), "shares": True, "device_parts": parts, "release_s": 6.0, **changes}


def check_against_oracle(world: World) -> None:
    run = world.core.settings
    steps = oracle(run, world.driver.prompt_at, world.length_of, world.reward_of)
    assert [r.kind for r in world.rounds] == [s.kind for s in steps]
    for number, step in enumerate(steps):
        got = world.trained(number)
        if run.deterministic:
            assert got == step.trained, f"step {number}"
        assert sorted(got) == sorted(step.trained), f"step {number}"


def check_end(world: World) -> None:
    [finish] = world.finished
    assert str(finish.state) == "finished"
    assert sorted(world.shards) == list(range(world.core.settings.num_steps))


def check_groups(world: World) -> None:
    run = world.core.settings
    names: list[str] = []
    for step in range(run.num_steps):
        trained = world.trained(step)
        assert len(trained) <= run.prompts_per_step
        assert all(len(responses) == run.group_size for _, responses in trained)
        names += [group for group, _ in trained]
    assert len(set(names)) == len(names), "a group twice"


@pytest.mark.parametrize("seed", [*range(100), *e2e(range(100, 300))])
def test_world_trains_exactly_what_the_oracle_says(seed: int):
    world = World(seed, **settings(seed)).live(NUM_EVENTS).heal()
    check_end(world)
    check_against_oracle(world)


@pytest.mark.parametrize(
    "seeds", [range(900, 925), *e2e(range(900 + 25 * k, 925 + 25 * k) for k in range(1, 4))]
)
def test_world_whose_prompts_come_late_trains_exactly_the_same(seeds):
    """Whatever happens before they are there, coordinator and devices included."""
    num_late = 0
    for seed in seeds:
        kind = sharing if seed % 4 == 3 else settings
        world = World(seed, reads_slowly=True, **kind(seed)).live(NUM_EVENTS).heal()
        check_end(world)
        check_against_oracle(world)
        num_late += world.num_late_draws
    assert num_late > 100


@pytest.mark.parametrize("seed", [*range(500, 515), *e2e(range(515, 560))])
def test_world_that_skips_responses_without_a_score_trains_what_the_oracle_says(seed: int):
    """Their siblings alone, where two are left, whether a failure or the cut was known first."""
    sizes = {"group_size": 2 + seed % 3, "reward_on_failure": None, "skips_unscored": True}
    world = World(seed, **settings(seed, **sizes))
    world.fails = (0.1, 0.3, 0.6)[seed % 3]
    world.live(NUM_EVENTS).heal()
    check_end(world)
    check_against_oracle(world)


@pytest.mark.parametrize(
    "seeds",
    [
        range(3000, 3040),
        *e2e([range(3040, 3080)]),
        *(
            pytest.param(range(3000 + 40 * k, 3040 + 40 * k), marks=pytest.mark.slow)
            for k in range(2, 15)
        ),
    ],
)
def test_world_whose_devices_change_sides_trains_exactly_the_same(seeds):
    """Engines never wake beside ranks, no shard leaves beside engines, a step ends when its ranks
    were given all devices (the world checks), and what is trained is what the oracle says, which
    knows nothing of devices."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, **sharing(seed))
        world.live(NUM_EVENTS).settle()
        world.heal()
        check_end(world)
        check_against_oracle(world)
        totals["slept"] += world.sharing.num_slept
        totals["woke"] += world.sharing.num_wakes
        totals["parked when asked"] += world.sharing.num_parks
        totals["released"] += world.sharing.rule.num_released
        totals["taken back"] += world.sharing.rule.num_taken_back
        totals["given in part"] += world.sharing.num_given
    assert len(totals) == 6, totals
    assert min(totals.values()) >= 1, totals


@pytest.mark.parametrize("seed", [*range(300, 315), *e2e(range(315, 350))])
def test_asynchronous_world_that_does_not_race_trains_its_prompts_in_order(seed: int):
    plain = settings(seed, tail=Tail(), dynamic_sampling=False, max_staleness=1 + seed % 2)
    world = World(seed, **plain).live(NUM_EVENTS).heal()
    check_end(world)
    check_against_oracle(world)


@pytest.mark.parametrize("seed", [*range(350, 365), *e2e(range(365, 400))])
def test_asynchronous_world_of_any_kind_finishes_with_whole_groups(seed: int):
    race = random.Random(seed).choice(["tokens", "clock"])
    changes = settings(seed, max_staleness=1 + seed % 2, race=race)
    world = World(seed, reads_slowly=seed % 3 == 0, **changes).live(NUM_EVENTS).heal()
    check_end(world)
    check_groups(world)


@pytest.mark.parametrize("seed", [*range(400, 430), *e2e(range(430, 500))])
def test_world_with_a_race_by_the_clock_finishes_with_whole_groups(seed: int):
    world = World(seed, **settings(seed, race="clock")).live(NUM_EVENTS).heal()
    check_end(world)
    check_groups(world)


@pytest.mark.parametrize("seed", [*range(500, 515), *e2e(range(515, 550))])
def test_world_that_is_stopped_in_the_middle_ends_and_nothing_is_sent_to_the_trainer_after_it(
    seed: int,
):
    world = World(seed, **settings(seed, max_staleness=seed % 3))
    world.live(world.rng.randint(1, 80))
    world.return_trainer()
    had_ended = world.core.state == "finishing"
    reason = world.rng.choice(
        [DrainRequested("*", "down"), ShellFailed("disk full"), NodeLeft("t", "bug", ok=False)]
    )
    world.feed(lambda: world.driver.feed(reason))
    known = {step: len(shards) for step, shards in world.shards.items()}
    world.live(30, coordinator_lives=True)
    for name in list(world.core.fleet.nodes):
        world.feed(lambda name=name: world.driver.feed(NodeLeft(name, "drained", ok=True)))
    [finish] = world.finished
    assert str(finish.state) in {"stopped", "failed"} or had_ended
    assert {step: len(shards) for step, shards in world.shards.items()} == known


@pytest.mark.parametrize(
    "seeds",
    [
        range(700, 730),
        *e2e(range(700 + 30 * k, 730 + 30 * k) for k in range(1, 5)),
        *(
            pytest.param(range(700 + 30 * k, 730 + 30 * k), marks=pytest.mark.slow)
            for k in range(5, 10)
        ),
    ],
)
def test_world_of_many_versions_sends_them_by_broadcast_and_nobody_waits(seeds):
    totals: Counter[str] = Counter()
    for seed in seeds:
        small = {"prompts_per_step": 1 + seed % 2, "group_size": 1, "num_prompts": 8}
        mode = "always" if seed % 3 else "auto"
        world = World(
            seed,
            **settings(seed, **small, num_steps=14, broadcast=mode, max_staleness=seed % 4 // 3),
        )
        world.feed(lambda world=world: world.driver.open("t"))
        for _ in range(8):
            world.live(40).settle()
        totals["received"] += world.broadcasts.num_received
        totals["sent"] += world.broadcasts.num_sent
        totals["failed"] += world.broadcasts.num_failed
        totals["pulled after all"] += world.broadcasts.num_hurried
        world.heal()
        check_end(world)
    assert len(totals) == 4, totals
    assert min(totals.values()) >= 2, totals


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 3000))
def test_fresh_world(seed: int):
    """Two thousand more, of each kind by turns."""
    match seed % 4:
        case 0:
            test_asynchronous_world_that_does_not_race_trains_its_prompts_in_order(seed)
        case 1:
            test_asynchronous_world_of_any_kind_finishes_with_whole_groups(seed)
        case 2:
            test_world_with_a_race_by_the_clock_finishes_with_whole_groups(seed)
        case _:
            test_world_trains_exactly_what_the_oracle_says(seed)


@pytest.mark.parametrize(
    "seeds", [range(600, 620), *e2e(range(600 + 20 * k, 620 + 20 * k) for k in range(1, 4))]
)
def test_world_whose_steps_are_much_more_than_the_trainer_takes_at_once(seeds, monkeypatch):
    """Every shard once and in order, and the same is trained, whoever dies while a step is handed
    over."""
    monkeypatch.setattr(trainer_feed, "MAX_SHARD_TOKENS", 4)
    monkeypatch.setattr(trainer_feed, "MAX_UNTAKEN_TOKENS", 6)
    num_held_back = 0
    for seed in seeds:
        world = World(seed, **settings(seed)).live(NUM_EVENTS).heal()
        check_end(world)
        check_against_oracle(world)
        num_held_back += world.num_held_back
    assert num_held_back > 20


@pytest.mark.e2e
def test_in_these_worlds_everything_does_happen():
    """They are worth something only then."""
    totals: Counter[str] = Counter()
    for seed in range(340):
        world = World(seed, **settings(seed, max_staleness=seed % 3)).live(250)
        counters = asdict(world.core.table.counters)
        totals.update(counters | {"weights_failed": world.core.fleet.num_weights_failed})
        totals.update(r.kind for r in world.rounds)
        totals.update({"restarts": world.num_restarts, "replays": world.num_replays})
        totals["bad_sources"] += world.core.fleet.num_bad_sources
        totals["told_again"] += world.num_told_again
        totals["told_without_trainer"] += world.num_without_trainer
        totals["late_endpoints"] += world.num_late_endpoints
        groups = world.core.fleet.broadcasts
        totals["broadcasts"] += groups.num_sent
        totals["broadcasts_lost"] += groups.num_lost
        totals["by_broadcast"] += world.broadcasts.num_received
        totals["broadcasts_failed"] += world.broadcasts.num_failed
        totals["pulled_after_all"] += world.broadcasts.num_hurried
        totals["surplus"] += sum(
            len(g.responses) > len(g.kept) for r in world.rounds for g in r.accepted
        )
        totals["mixed"] += sum(
            len(x.spans) > 1 for r in world.rounds for g in r.accepted for x in g.kept
        )
    assert all(count >= 5 for count in totals.values()), totals
