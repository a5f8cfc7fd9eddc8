"""Who receives by broadcast, from boundary to boundary."""

import random

import pytest

from lightrl.core.broadcast_groups import BroadcastGroups, Candidate, Phase, choose


def node(name: str, incarnation: int = 1, **fields) -> Candidate:
    return Candidate(name, incarnation, fields.pop("host", "elsewhere"), 2, **fields)


def standing(*members: Candidate) -> BroadcastGroups:
    groups = BroadcastGroups(num_ranks=2)
    epoch = groups.at_boundary(members)
    assert epoch is not None
    assert [groups.joined(epoch.number, m.name) for m in members] == [False] * len(members)
    assert groups.joined(epoch.number, None)
    return groups


def test_auto_takes_idle_nodes_of_other_machines_that_stay():
    nodes = [
        node("busy", is_busy=True),
        node("here", host="trainer"),
        node("b"),
        node("taken", is_preemptible=True),
        node("joining", is_up=False),
        node("a"),
    ]
    assert [c.name for c in choose(nodes, "trainer", "auto")] == ["a", "b"]
    assert [c.name for c in choose(nodes, "trainer", "always")] == ["a", "b", "busy", "here"]
    assert choose(nodes, "trainer", "off") == ()


def test_workers_of_all_members_have_places_after_the_training_ranks():
    groups = BroadcastGroups(num_ranks=3)
    epoch = groups.at_boundary((Candidate("a", 1, "x", 2), Candidate("b", 1, "y", 4)))
    assert epoch is not None
    assert (epoch.first_ranks, epoch.world) == ((3, 5), 9)


def test_a_group_lives_for_many_versions():
    groups = standing(node("a"), node("b"))
    for _ in range(3):
        assert groups.at_boundary((node("a"), node("b"))) is None
        assert groups.begin_sending() == ("a", "b")
        for name in ("a", "b"):
            assert groups.phase is Phase.SENDING
            groups.received(1, name)
        assert groups.phase is Phase.STANDING
    assert groups.num_epochs == 1


@pytest.mark.parametrize(
    "members",
    [(node("a"),), (node("a"), node("b"), node("c")), (node("a"), node("b", incarnation=2)), ()],
)
def test_another_membership_is_another_group_from_the_next_boundary_on(members):
    groups = standing(node("a"), node("b"))
    epoch = groups.at_boundary(members)
    assert (epoch.number if epoch else None) == (2 if members else None)
    assert groups.num_lost == 0
    assert groups.begin_sending() == ()  # nobody waits for a group that forms


def test_no_boundary_touches_a_group_that_forms_or_sends():
    groups = BroadcastGroups(1)
    assert groups.at_boundary((node("a"),)) is not None
    assert groups.at_boundary((node("a"), node("b"))) is None
    assert groups.begin_sending() == ()
    groups.joined(1, "a")
    groups.joined(1, None)
    assert groups.begin_sending() == ("a",)
    assert groups.at_boundary(()) is None
    assert groups.phase is Phase.SENDING


def test_a_lost_member_sends_those_to_pull_who_were_receiving():
    groups = standing(node("a"), node("b"), node("c"))
    groups.begin_sending()
    groups.received(1, "c")
    assert groups.lost("unknown") == ()
    assert groups.lost("b") == ("a",)
    assert groups.phase is Phase.NONE
    assert groups.lost("a") == ()
    assert groups.begin_sending() == ()
    groups.received(1, "a")  # late
    epoch = groups.at_boundary((node("a"), node("c")))
    assert epoch is not None
    assert epoch.number == 2


def test_a_lost_trainer_and_a_failed_proof_end_it_for_all():
    groups = standing(node("a"), node("b"))
    groups.begin_sending()
    assert groups.failed(7) == ()
    assert groups.failed(1) == ("a", "b")
    groups = standing(node("a"), node("b"))
    assert groups.lost("trainer", is_trainer=True) == ()  # nothing was on its way
    assert groups.phase is Phase.NONE


def test_news_of_another_epoch_is_not_of_this_one():
    groups = BroadcastGroups(1)
    groups.at_boundary((node("a"),))
    assert not groups.joined(1, "a")
    groups.lost("a")
    groups.at_boundary((node("a", incarnation=2),))
    assert not groups.joined(1, None)
    assert not groups.joined(2, None)
    assert not groups.joined(2, "stranger")
    assert groups.joined(2, "a")


@pytest.mark.parametrize("seed", range(50))
def test_random_news_leaves_nobody_waiting(seed):
    """Whoever was told to receive has either received or been told to pull, when the epoch ends."""
    choice = random.Random(seed)
    groups, owed, names = BroadcastGroups(2), set(), ["a", "b", "c", "d"]
    for _ in range(300):
        number, name = groups.num_epochs - choice.randrange(2), choice.choice(names)
        match choice.randrange(6):
            case 0:
                groups.at_boundary(tuple(node(n) for n in names if choice.random() < 0.7))
            case 1:
                groups.joined(number, choice.choice([*names, None]))
            case 2:
                owed |= set(groups.begin_sending())
            case 3:
                groups.received(number, name)
                if number == groups.num_epochs:
                    owed.discard(name)
            case 4 if choice.random() < 0.1:
                owed -= {*groups.failed(number)}
            case 5 if choice.random() < 0.2:
                owed -= {name, *groups.lost(name)}
        groups.check()
        if groups.phase is not Phase.SENDING:
            assert not owed
