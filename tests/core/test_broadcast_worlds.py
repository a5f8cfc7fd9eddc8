"""Seeded worlds in which somebody dies, stops or is cut off while a version is sent by broadcast:
at each stage of that, in whatever state the run is otherwise."""

from collections.abc import Callable

import pytest

from lightrl.core.events import MessageArrived, NodeLost, TimerFired
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.weights import WeightsFailed
from tests.core.test_worlds import check_end, settings
from tests.core.world import World

MAX_ACTS = 2000  # a stage comes within a few hundred
MAX_WORLDS = 5
APART = 10_000  # seeds
STAGES = ("forming", "sending")


def at(stage: str, seed: int) -> World:
    """The first world of this seed in which that stage comes before the run is over."""
    for k in range(MAX_WORLDS):
        if (world := lives_until(stage, seed + k * APART)) is not None:
            return world
    raise AssertionError(f"seed {seed}: nothing is at the stage {stage}")


def lives_until(stage: str, seed: int) -> World | None:
    small = {"prompts_per_step": 1 + seed % 2, "group_size": 1, "num_prompts": 8}
    run = settings(seed, **small, num_steps=20, broadcast="always", max_staleness=seed % 2)
    world = World(seed, **run)
    world.feed(lambda: world.driver.open("t"))
    for k in range(MAX_ACTS):
        if members(world, stage) and world.has_trainer:
            return world
        if world.core.state in {"finishing", "finished"}:
            break
        world.live(1)
        if k % 40 == 39:
            world.settle()
    return None


def members(world: World, *stages: str) -> list[str]:
    """That are at one of these stages."""
    fleet = world.core.fleet
    return [n for n, node in fleet.nodes.items() if fleet.broadcasts.stage(node) in stages]


def pass_time(world: World, seconds: float, *silent: str) -> None:
    """All but these are heard meanwhile."""
    for _ in range(round(seconds / 0.5)):
        world.driver.now += 0.5
        for name in sorted({*world.core.fleet.nodes} - {*silent}):
            world.broadcasts.beat(name)
        deadline = world.core.next_deadline()
        if deadline is not None and deadline <= world.driver.now:
            world.feed(lambda: world.driver.feed(TimerFired()))


def ends(world: World, name: str) -> None:
    """By its report, as its engine or its ranks have ended, or find that nothing moves."""
    published = world.core.fleet.published
    assert published is not None
    group = world.core.fleet.broadcasts.name
    failed = BroadcastStatus(published.policy_version, group, reason="member 1 is gone")
    world.feed(lambda: world.driver.feed(MessageArrived(name, failed)))


def a_daemon_is_killed(world: World, member: str) -> None:
    world.feed(lambda: world.driver.feed(NodeLost(member, "connection lost")))


def a_daemon_stops(world: World, member: str) -> None:
    """Or its line is cut."""
    pass_time(world, world.core.settings.lease_s + 1, member)


def an_engine_is_killed(world: World, member: str) -> None:
    published = world.core.fleet.published
    assert published is not None
    died = WeightsFailed(published.policy_version, "engine killed by SIGKILL")
    world.feed(lambda: world.driver.feed(MessageArrived(member, died)))
    ends(world, member)


def an_engine_stops(world: World, member: str) -> None:
    """The trainer reports it when nothing moves."""
    if members(world, "forming"):
        pass_time(world, 2 * world.core.settings.weights_timeout_s + 1)
    else:
        ends(world, "t")


def a_rank_is_killed(world: World, _: str) -> None:
    """The trainer begins anew, and is another one."""
    world.incarnation += 1
    world.greet_trainer()


def the_trainer_is_killed(world: World, _: str) -> None:
    world.lose_trainer()


def the_trainer_stops(world: World, _: str) -> None:
    world.has_trainer = False
    for forgotten in (world.untaken, world.to_train):
        forgotten.clear()
    world.broadcasts.forget("t")
    pass_time(world, world.core.settings.lease_s + 1, "t")


def the_coordinator_is_killed(world: World, _: str) -> None:
    world.restart_coordinator()


FAULTS = (
    *(a_daemon_is_killed, a_daemon_stops, an_engine_is_killed, an_engine_stops),
    *(a_rank_is_killed, the_trainer_is_killed, the_trainer_stops, the_coordinator_is_killed),
)


ONE, FEW = range(5000, 5001), pytest.param(range(5001, 5002), marks=pytest.mark.e2e)
MORE = pytest.param(range(5100, 5200), marks=pytest.mark.slow)


@pytest.mark.parametrize("seeds", [ONE, FEW, MORE], ids=["one", "few", "more"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_at_any_stage_of_a_broadcast_the_others_go_on(
    fault: Callable[[World, str], None], stage: str, seeds: range
):
    for seed in seeds:
        world = at(stage, seed)
        number = world.core.fleet.broadcasts.num_groups
        assert world.core.fleet.broadcasts.group is not None
        fault(world, world.rng.choice(members(world, stage)))
        assert not members(world, *STAGES), "somebody waits for a group that is over"
        now = world.core.fleet.broadcasts
        assert now.group is None or now.num_groups != number
        world.settle()
        world.live(60).settle()
        world.heal()
        check_end(world)
