"""Who receives by broadcast, from boundary to boundary."""

import random

import pytest

from lightrl.core.broadcast_groups import (
    MAX_FAILURES,
    MAX_PAUSE,
    BroadcastGroups,
    Candidate,
    Phase,
    choose,
)


def node(name: str, incarnation: int = 1, **fields) -> Candidate:
    return Candidate(name, incarnation, fields.pop("host", "elsewhere"), 2, **fields)


A, B, C = node("a"), node("b"), node("c")


def form(groups: BroadcastGroups, *members: Candidate) -> str:
    """They all come; the name of the group, which sends now."""
    groups.at_boundary(members)
    assert groups.epoch is not None
    name = f"group {groups.num_epochs}"
    assert groups.opened(groups.num_epochs, name) is groups.epoch
    assert [groups.joined(name, m.name) for m in members] == [False] * len(members)
    assert groups.joined(name, None)
    assert groups.phase is Phase.SENDING
    return name


def send(groups: BroadcastGroups) -> None:
    for name in sorted(groups.receiving):
        assert groups.phase is Phase.SENDING
        groups.received(name)
    groups.check()


def standing(*members: Candidate) -> BroadcastGroups:
    groups = BroadcastGroups(num_ranks=2)
    form(groups, *members)
    send(groups)
    assert groups.phase is Phase.STANDING
    return groups


def test_auto_takes_idle_nodes_of_other_machines():
    nodes = [node("busy", is_busy=True), node("here", host="trainer"), B, A]

    def names(mode) -> list[str]:
        return [c.name for c in choose(nodes, "trainer", False, mode)[0]]

    assert names("auto") == ["a", "b"]
    assert names("always") == ["a", "b", "busy", "here"]
    assert names("off") == []


def test_nccl_is_for_devices_alone_and_never_two_members_on_one():
    cuda, here = node("a", is_cuda=True), node("b", is_cuda=True, host="trainer")
    assert choose([cuda, here], "trainer", True, "always") == ((cuda,), "nccl")
    assert choose([cuda, here], "trainer", False, "always") == ((cuda, here), "gloo")
    assert choose([cuda, here, C], "trainer", True, "always") == ((cuda, here, C), "gloo")


def test_workers_of_all_members_have_places_after_the_training_ranks():
    groups = BroadcastGroups(num_ranks=3)
    groups.at_boundary((Candidate("a", 1, "x", 2), Candidate("b", 1, "y", 4)))
    assert groups.epoch is not None
    assert (groups.epoch.first_ranks, groups.epoch.world) == ((3, 5), 9)


def test_a_group_lives_for_many_versions():
    groups = standing(A, B)
    for _ in range(3):
        groups.at_boundary((A, B))
        assert groups.phase is Phase.SENDING
        assert groups.receiving == {"a", "b"}
        send(groups)
        assert groups.phase is Phase.STANDING
    assert (groups.num_epochs, groups.num_sent, groups.num_lost) == (1, 4, 0)


@pytest.mark.parametrize(
    "members",
    [(A,), (A, B, C), (A, node("b", incarnation=2)), (A, Candidate("b", 1, "elsewhere", 3)), ()],
)
def test_another_membership_is_another_group_from_the_next_boundary_on(members):
    groups = standing(A, B)
    groups.at_boundary(members)
    assert groups.phase is (Phase.OPENING if members else Phase.NONE)
    assert groups.num_epochs == (2 if members else 1)
    assert groups.receiving == {m.name for m in members}
    assert groups.num_lost == 0


def test_another_backend_is_another_group():
    groups = standing(A)
    groups.at_boundary((A,), "nccl")
    assert groups.epoch is not None
    assert (groups.epoch.number, groups.epoch.backend) == (2, "nccl")


def test_news_of_another_epoch_is_not_of_this_one():
    groups = BroadcastGroups(1)
    groups.at_boundary((A,))
    assert groups.opened(7, "x") is None
    assert groups.opened(1, "x") is groups.epoch
    assert groups.opened(1, "y") is None
    assert groups.name == "x"
    for group, name in (("y", "a"), ("y", None), ("", "a"), ("x", "stranger")):
        assert not groups.joined(group, name)
    assert not groups.joined("x", None)
    assert not groups.joined("x", None)
    assert groups.joined("x", "a")
    assert not groups.joined("x", "a")


def test_a_new_version_ends_what_is_under_way_and_the_next_one_forms_anew():
    groups = BroadcastGroups(1)
    for opens in (False, True):
        groups.at_boundary((A, B))
        assert groups.phase is Phase.OPENING
        if opens:
            groups.opened(groups.num_epochs, "x")
        groups.at_boundary((A, B))
        assert groups.phase is Phase.NONE
        assert groups.receiving == set()
        groups._pause = 1  # pyright: ignore[reportPrivateUsage]
    assert groups.num_lost == 2
    form(groups, A, B)
    groups.received("a")
    groups.at_boundary((A, B))
    assert groups.phase is Phase.NONE
    assert groups.num_lost == 3


def test_a_lost_member_sends_those_to_pull_who_were_receiving():
    groups = standing(A, B, C)
    groups.at_boundary((A, B, C))
    groups.received("c")
    assert groups.lost("unknown") == set()
    assert groups.lost("b") == {"a"}
    assert groups.phase is Phase.NONE
    assert groups.lost("a") == set()
    groups.received("a")  # late
    groups.at_boundary((A, C))
    assert groups.epoch is not None
    assert (groups.epoch.number, groups.num_lost) == (2, 1)


def test_a_lost_trainer_and_a_failure_end_it_for_all():
    groups = standing(A, B)
    groups.at_boundary((A, B))
    assert groups.fail() == {"a", "b"}
    groups = standing(A, B)
    assert groups.lost("trainer", is_trainer=True) == set()  # nothing was on its way
    assert groups.phase is Phase.NONE


# Who is no candidate any more


def test_attempts_that_bring_nothing_are_put_off_twice_as_long_each_time():
    groups, tried = BroadcastGroups(1), []
    for boundary in range(40):
        groups.at_boundary((A, B))
        if groups.phase is Phase.OPENING:
            tried.append(boundary)
            groups.opened(groups.num_epochs, "x")
            groups.fail()
    assert tried == [0, 1, 3, 7, 15, 31]
    groups._put_off = 0  # pyright: ignore[reportPrivateUsage]
    form(groups, A, B)
    send(groups)
    groups.fail()
    groups.at_boundary((A, B))
    assert groups.phase is Phase.OPENING  # it had brought a version


def test_a_pause_has_an_end():
    groups, boundary, last = BroadcastGroups(1), 0, 0
    while groups.num_epochs < 12:
        boundary += 1
        groups.at_boundary((A,))
        if groups.phase is Phase.OPENING:
            assert boundary - last <= MAX_PAUSE
            last = boundary
            groups.lost("a")


def test_who_cannot_reach_the_trainer_is_none_as_this_process():
    groups = BroadcastGroups(1)
    groups.at_boundary((A, B))
    groups.fail("a", is_unreachable=True)
    assert groups.excludes("a", 1)
    assert not groups.excludes("a", 2)
    assert not groups.excludes("b", 1)
    groups.lost("b")
    assert groups.excludes("a", 1)  # that was no mistake


def test_another_process_of_the_trainer_may_be_reached():
    """The machine of the one before may have gone: nobody answered there."""
    groups = BroadcastGroups(1)
    groups.trained_by("t", 1)
    groups.at_boundary((A, B))
    groups.opened(1, "x")
    groups.fail("a", is_unreachable=True)
    assert groups.exclude_late("x", "b")
    groups.trained_by("t", 1)
    assert groups.excludes("a", 1)
    assert groups.excludes("b", 1)
    groups.trained_by("t", 2)
    assert not groups.excludes("a", 1)
    assert not groups.excludes("b", 1)
    assert not groups.exclude_late("x", "b")  # of the one before
    assert not groups.excludes("b", 1)


def test_who_ends_groups_in_a_row_is_excluded_after_a_few():
    groups = BroadcastGroups(1)
    for _ in range(MAX_FAILURES):
        assert not groups.excludes("a", 1)
        groups._put_off = 0  # pyright: ignore[reportPrivateUsage]
        form(groups, A, B)
        groups.fail("a")
    assert groups.excludes("a", 1)
    assert not groups.excludes("a", 2)
    assert not groups.excludes("b", 1)


def test_a_version_that_was_received_ends_the_row():
    groups = BroadcastGroups(1)
    for _ in range(2 * MAX_FAILURES):
        groups._put_off = 0  # pyright: ignore[reportPrivateUsage]
        form(groups, A, B)
        groups.fail("a")
        groups._put_off = 0  # pyright: ignore[reportPrivateUsage]
        form(groups, A, B)
        send(groups)
        groups.fail("a")  # it has brought a version: no failure of a
    assert not groups.excludes("a", 1)


def test_a_member_that_reports_the_death_of_another_has_not_failed():
    groups = BroadcastGroups(1)
    for lost in ("b", "t", "b", "t"):
        groups._put_off = 0  # pyright: ignore[reportPrivateUsage]
        form(groups, A, B)
        groups.fail("a")
        assert groups.lost(lost, is_trainer=lost == "t") == set()
    assert not groups.excludes("a", 1)


def test_who_is_late_for_every_version_gets_none_any_more():
    groups = BroadcastGroups(1)
    while not groups.excludes("b", 1):
        if groups.phase is Phase.NONE:
            groups.at_boundary((A, B))
        if groups.phase is Phase.OPENING:
            groups.opened(groups.num_epochs, "x")
            for name in ("a", "b", None):
                groups.joined("x", name)
            groups.received("a")
            groups.at_boundary((A, B))
        assert groups.num_epochs <= MAX_FAILURES
    assert not groups.excludes("a", 1)


@pytest.mark.parametrize("seed", range(100))
def test_random_news_leaves_nobody_waiting(seed):
    """Whoever was told to receive has either received or been told to pull, when the epoch ends."""
    choice = random.Random(seed)
    groups, owed, names = BroadcastGroups(2), set(), ["a", "b", "c", "d"]
    for _ in range(300):
        number, name = groups.num_epochs - choice.randrange(2), choice.choice(names)
        match choice.randrange(8):
            case 0:
                groups.at_boundary(tuple(node(n) for n in names if choice.random() < 0.7))
                owed = set(groups.receiving)
            case 1:
                groups.opened(number, f"x{number}")
            case 2 | 3 | 4:
                groups.joined(f"x{number}", choice.choice([*names, None]))
            case 5:
                groups.received(name)
                if groups.phase in {Phase.SENDING, Phase.STANDING}:
                    owed.discard(name)
            case 6 if choice.random() < 0.1:
                owed -= groups.fail(choice.choice([None, name, "stranger"]))
            case 7 if choice.random() < 0.2:
                owed -= {name, *groups.lost(name)}
        groups.check()
        assert owed == groups.receiving
