"""Seeded worlds whose devices change sides by the rules of the core: what goes wrong around a
release changes times alone.

Two worlds of one seed are the same until something is done to one of them, so a first one tells
when the second is to be hit.
"""

from collections.abc import Callable
from functools import cache

import pytest

from lightrl.core.events import DrainRequested, NodeLeft, NodeLost
from lightrl.core.state import NodeState
from tests.core.test_worlds import check_against_oracle, check_end, settings
from tests.core.world import World

RULES = ("foreseen", "window")
RESERVED, OTHERS = "ab", "de"
MAX_TURNS = 400
SEEDS = (0, 2, 5, 10)
OVER = {"finishing", "finished"}


def world_of(seed: int, rule: str) -> World:
    """Two nodes share the trainer's devices, two do not; nothing goes wrong by itself."""
    small = {"prompts_per_step": 4, "group_size": 2, "num_prompts": 12, "num_steps": 4, "slots": 2}
    calm = {"dynamic_sampling": False, "eval_sets": (), "eval_interval": 0}
    changes = {**small, **calm, "offload": rule, "release_s": 6.0}
    world = World(seed, True, False, **settings(seed, device_parts=1 + seed % 2, **changes))
    world.train_s = 2.0
    world.driver.opens_endpoints = True
    world.feed(lambda: world.driver.open("t"))
    for name in world.rollouts():
        lose(world, name)
    for name in RESERVED + OTHERS:
        join(world, name)
    return world


def join(world: World, name: str) -> None:
    world.incarnation += 1
    number = world.incarnation
    world.feed(lambda: world.greet(name, incarnation=number, slots=2))
    world.broadcasts.start_engine(name)


def lose(world: World, name: str) -> None:
    world.sharing.lose(name)
    world.feed(lambda: world.driver.feed(NodeLost(name, "gone")))


def others_vanish(world: World) -> None:
    for name in OTHERS:
        lose(world, name)


@cache
def turns_to_release(seed: int, rule: str) -> int:
    """Until a release within a round is ordered."""
    world = world_of(seed, rule)
    for turn in range(MAX_TURNS):
        if world.sharing.num_within:
            return turn
        world.go_on()
    raise AssertionError("nothing was released")


def world_at(seed: int, rule: str, late: int = 0) -> World:
    """So many turns after the release, the order to which has not been carried out."""
    world = world_of(seed, rule)
    for _ in range(turns_to_release(seed, rule) + late):
        world.go_on()
    return world


def finish(world: World) -> None:
    """With those who are there, and nobody else."""
    for _ in range(MAX_TURNS):
        if world.core.state in OVER:
            break
        world.go_on()
    assert world.core.state in OVER, f"stuck at step {world.core.step}"
    for name in list(world.core.fleet.nodes):
        world.feed(lambda name=name: world.driver.feed(NodeLeft(name, "drained", ok=True)))
    check_end(world)
    check_against_oracle(world)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("late", [-1, 0, 1], ids=["before", "then", "after"])
def test_all_others_vanish_around_a_release_and_who_shares_finishes_alone(rule: str, late: int):
    """An order a turn: a turn after the release some engines sleep and some do not."""
    for seed in SEEDS:
        world = world_at(seed, rule, late)
        others_vanish(world)
        assert (world.sharing.num_within > 0) == (late >= 0)
        finish(world)


def a_node_joins(world: World) -> None:
    join(world, "c")


def all_reserved_drain(world: World) -> None:
    for name in RESERVED:
        world.feed(lambda name=name: world.driver.feed(DrainRequested(name, "upkeep")))


def the_trainer_is_away(world: World) -> None:
    world.lose_trainer()
    for _ in range(6):
        world.go_on()
    world.return_trainer()


def the_coordinator_dies(world: World) -> None:
    world.restart_coordinator()
    for _ in range(6):
        world.go_on()


def an_engine_dies(world: World) -> None:
    world.sharing.die_asleep()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "happens",
    [
        a_node_joins,
        all_reserved_drain,
        the_trainer_is_away,
        the_coordinator_dies,
        an_engine_dies,
    ],
)
def test_what_happens_while_engines_are_half_asleep(rule: str, happens: Callable[[World], None]):
    num_halves = 0
    for seed in SEEDS:
        world = world_at(seed, rule)
        world.sharing.obey()
        states = {world.core.fleet.nodes[name].state for name in RESERVED}
        num_halves += NodeState.RELEASED in states and NodeState.RELEASING in states
        happens(world)
        world.return_trainer()
        for name in OTHERS:
            if name not in world.core.fleet.nodes:
                join(world, name)
        finish(world)
    assert num_halves > 0


@pytest.mark.parametrize("rule", RULES)
def test_others_that_flap_every_second_lose_nothing(rule: str):
    num_within = 0
    for seed in SEEDS:
        world = world_of(seed, rule)
        for turn in range(MAX_TURNS):
            if world.core.state in OVER:
                break
            name = OTHERS[turn // 3 % 2]
            if turn % 3 == 0:  # turns of a third of a second
                lose(world, name) if name in world.core.fleet.nodes else join(world, name)
            world.go_on(1 / 3)
        num_within += world.sharing.num_within
        finish(world)
    assert num_within > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by", [1e6, -1e6])
def test_a_clock_that_jumps_while_engines_are_half_asleep_loses_nothing(rule: str, by: float):
    for seed in SEEDS:
        world = world_at(seed, rule)
        world.sharing.obey()
        world.driver.now += by
        world.go_on()
        for name in RESERVED:
            if name not in world.core.fleet.nodes:  # it kept its devices for so long
                world.sharing.lose(name)
                join(world, name)
        finish(world)


@pytest.mark.parametrize("rule", RULES)
def test_steps_that_take_the_trainer_no_time_are_trained_as_ever(rule: str):
    for seed in SEEDS:
        world = world_of(seed, rule)
        world.train_s = 0.0
        finish(world)
        assert world.core.policy.memory().training.means()[1] == 0.0
