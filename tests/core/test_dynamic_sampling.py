"""Groups without signal are replaced, as many as needed and no more."""

import random

import pytest

from lightrl.core.commands import CloseRound, DrawPrompts
from lightrl.core.rounds.rounds import MAX_REDRAWS
from lightrl.core.settings import Tail
from tests.core.conftest import Driver, held_out, of_kind


def rewards(*flat: str):
    """Both responses of these prompts get the same reward, those of all others differ."""
    return lambda name: 1.0 if name.split("@")[0] in flat else float(name[-1])


def dynamic(**changes: object) -> Driver:
    d = Driver(**{"dynamic_sampling": True, "slots": 99, "foresight": False} | changes)
    d.start("a")
    return d


def test_flat_group_is_dropped_and_another_prompt_takes_its_place():
    d = dynamic()
    d.finish("p0@0#0", 1.0)
    commands = d.finish("p0@0#1", 1.0)
    assert of_kind(commands, DrawPrompts) == [DrawPrompts("train", 1)]
    assert list(d.round.groups) == ["p0@0", "p1@0", "p2@0"]
    [closed] = of_kind(d.decode(lambda _: 1, rewards()), CloseRound)
    assert [g.id for g in closed.round.accepted] == ["p1@0", "p2@0"]
    assert d.core.table.counters.groups_dropped == 1


def test_flat_group_is_trained_without_dynamic_sampling():
    d = dynamic(dynamic_sampling=False)
    [closed] = of_kind(d.decode(lambda _: 1, rewards("p0")), CloseRound)
    assert [g.id for g in closed.round.accepted] == ["p0@0", "p1@0"]


def test_group_without_rewards_is_replaced_too():
    d = dynamic()
    [closed] = of_kind(
        d.decode(lambda _: 1, lambda n: None if n[:2] == "p0" else float(n[-1])), CloseRound
    )
    assert [g.id for g in closed.round.accepted] == ["p1@0", "p2@0"]


def test_step_is_smaller_when_nothing_has_signal_in_many_draws():
    d = dynamic()
    [closed] = of_kind(d.decode(lambda _: 1, lambda _: 0.0), CloseRound)
    assert (len(closed.round.groups), closed.round.accepted) == (2 * MAX_REDRAWS, [])


def test_no_more_is_drawn_than_an_epoch_has():
    d = dynamic(num_prompts=5)
    [closed] = of_kind(d.decode(lambda _: 1, lambda _: 0.0), CloseRound)
    assert [g.id for g in closed.round.groups.values()] == [f"p{i}@0" for i in range(5)]


def test_evaluation_keeps_its_flat_groups():
    d = dynamic(eval_sets=held_out(2, samples=2))
    [closed] = of_kind(d.decode(lambda _: 1, lambda _: 0.0)[:20], CloseRound)[:1]
    assert closed.round.kind == "eval"
    assert {str(g.state) for g in closed.round.groups.values()} == {"complete"}


def test_surplus_of_a_race_replaces_flat_groups_before_anything_is_drawn():
    d = dynamic(tail=Tail(1.5))
    assert len(d.round.groups) == 3
    length = {"p0": 1, "p1": 2, "p2": 5}
    [closed] = of_kind(d.decode(lambda n: length[n[:2]], rewards("p0")), CloseRound)
    assert {g.id: str(g.state) for g in closed.round.groups.values()} == {
        "p0@0": "dropped",
        "p1@0": "accepted",
        "p2@0": "accepted",
    }


def test_race_draws_more_when_its_surplus_is_flat_too():
    d = dynamic(tail=Tail(1.5))
    [closed] = of_kind(d.decode(lambda _: 2, rewards("p0", "p2")), CloseRound)
    assert [g.id for g in closed.round.accepted] == ["p1@0", "p3@0"]


def test_flat_group_that_would_have_lost_the_race_is_put_off():
    d = dynamic(tail=Tail(1.5))
    length = {"p0": 1, "p1": 2, "p2": 3}
    for name in ("p2@0#0", "p2@0#1"):  # it is complete before the others
        d.tokens(name, 9, 9, 9, finish="stop")
        d.score(name, 1.0)
    [closed] = of_kind(d.decode(lambda n: length[n[:2]], rewards()), CloseRound)
    assert [g.id for g in closed.round.groups.values() if g.state == "deferred"] == ["p2@0"]


@pytest.mark.parametrize("seed", range(30))
def test_what_a_race_draws_and_trains_does_not_depend_on_the_order_of_arrival(seed: int):
    chance = random.Random(seed % 3)
    n = {f"p{i}": chance.randint(1, 9) for i in range(20)}
    reward = rewards(*chance.sample(sorted(n), 9))
    d = dynamic(tail=Tail(1.5, 1.5), deterministic=True, prompts_per_step=4)
    rng = random.Random(seed)
    closed = []
    while not closed:
        name = rng.choice(d.running())
        closed = of_kind(d.tokens(name, *[9] * n[name.split("@")[0]], finish="stop"), CloseRound)
        if not closed and not d.held(name).resolved:
            closed = of_kind(d.score(name, reward(name)), CloseRound)
    again = dynamic(tail=Tail(1.5, 1.5), deterministic=True, prompts_per_step=4)
    [expected] = of_kind(again.decode(lambda name: n[name.split("@")[0]], reward), CloseRound)
    assert [g.id for g in closed[0].round.accepted] == [g.id for g in expected.round.accepted]
    assert list(closed[0].round.groups) == list(expected.round.groups)
