"""Messages to the trainer and the members of a broadcast group, and which nodes pull instead."""

from dataclasses import replace
from typing import Any

import pytest

from lightrl.core.commands import Command, Report, Send
from lightrl.core.events import MessageArrived, NodeDraining, NodeJoined, NodeLost, TimerFired
from lightrl.core.weights.broadcasts import MAX_FAILURES, Broadcasts, Phase
from lightrl.messages.broadcasts import (
    BroadcastGroup,
    BroadcastOrder,
    BroadcastStatus,
    VersionTaken,
)
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL, Heartbeat, Hello
from lightrl.messages.responses import Generate
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsFailed, WeightsReady
from tests.core.conftest import Driver, endpoint_of, of_kind, publication, sent

AT = "0.0.0.0:7"


class Group:
    """A trainer and members that do as they are told, until a test has them do otherwise."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.d = Driver(**{"broadcast": "auto", "num_steps": 50, "lease_s": 1e6, **changes})
        self.groups: Broadcasts = self.d.core.fleet.broadcasts
        self.join("t", role="trainer", host="trainer's")
        self.heartbeat("t")
        self.d.publish(0)
        for name in names:
            self.join(name)
            self.d.confirm(name, 0)

    @property
    def name(self) -> str:
        return f"group {self.groups.num_groups}"

    @property
    def version(self) -> int:
        published = self.d.core.fleet.published
        assert published is not None
        return published.policy_version

    def join(self, name: str, workers: int = 2, device: str = "cpu", **fields: Any):
        """With an engine that has started, and an endpoint."""
        role = fields.pop("role", "rollout")
        fields = {"incarnation": 1, "host": f"host of {name}", **fields}
        hello = Hello(name, roles=(role,), protocol=PROTOCOL, pid=1, **fields)
        commands = self.d.feed(NodeJoined(hello))
        commands += self.d.feed(MessageArrived(name, endpoint_of(name, fields["incarnation"])))
        if role == "rollout":
            self.heartbeat(name, workers, device)
        return commands

    def heartbeat(self, name: str, workers: int = 0, device: str = "cpu") -> None:
        self.d.feed(MessageArrived(name, Heartbeat(device=device, num_workers=workers)))

    def hear(self, name: str, message: Any) -> list[Command]:
        return self.d.feed(MessageArrived(name, message))

    def publish(self, version: int) -> list[Command]:
        """As at the boundary of a step, where everybody is idle."""
        self.d.decode(lambda _: 2)
        return self.d.train(version - 1)

    def open(self) -> list[Command]:
        return self.hear("t", BroadcastStatus(self.version, self.name, AT))

    def ready(self, name: str, version: int) -> list[Command]:
        """By broadcast."""
        confirmed = WeightsReady(version, f"digest-{version}", broadcast_s=0.1)
        return self.d.feed(MessageArrived(name, confirmed))

    def deliver(self, version: int) -> None:
        """By a group that is formed for it, or stands."""
        self.publish(version)
        if self.groups.phase is Phase.OPENING:
            self.open()
        for name in sorted(self.groups.receiving):
            self.ready(name, version)
        assert self.groups.phase is Phase.IDLE

    def fail(self, name: str, reason: str = "timed out") -> list[Command]:
        return self.hear(name, BroadcastStatus(self.version, self.name, reason=reason))

    def node(self, name: str):
        return self.d.core.fleet.nodes[name]


def said(commands: list[Command]) -> list[tuple[str, Message]]:
    """Of weights, to whom: what is sent of work and steps left away."""
    weights = PublishWeights | VersionTaken
    return [
        (c.node, c.message)
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, weights)
    ]


def pulls(commands: list[Command]) -> dict[str, list[str]]:
    """Who is told to pull -> from whom."""
    return {
        n: [s.node for s in m.sources] for n, m in sent(commands, PublishWeights) if not m.group
    }


def warnings(commands: list[Command]) -> list[str]:
    return [r.text for r in of_kind(commands, Report) if r.is_warning]


def order(group: str = "", world: int = 5, backend: Any = "gloo") -> BroadcastOrder:
    return BroadcastOrder(group, world, backend)


def orders(commands: list[Command]) -> list[BroadcastOrder | None]:
    return [m.broadcast for _, m in sent(commands, VersionTaken)]


def opens(commands: list[Command]) -> bool:
    """Whether the trainer is to open a new group."""
    [wanted] = orders(commands)
    return wanted is not None and wanted.group == ""


def wants_delta(commands: list[Command]) -> list[bool]:
    return [m.wants_delta for _, m in sent(commands, VersionTaken)]


def places(commands: list[Command]) -> dict[str, BroadcastGroup]:
    return {n: m.group for n, m in sent(commands, PublishWeights) if m.group}


def test_a_version_goes_out_in_this_order():
    g = Group("a", "b")
    assert said(g.publish(1)) == [("t", VersionTaken(1, False, order()))]
    assert {g.node(n).state for n in "ab"} == {"updating"}
    commands = g.open()
    assert places(commands) == {
        "a": BroadcastGroup("group 1", AT, 1, 5, "gloo"),
        "b": BroadcastGroup("group 1", AT, 3, 5, "gloo"),
    }
    [(_, offer), _] = said(commands)
    assert isinstance(offer, PublishWeights)
    assert (offer.policy_version, offer.deltas) == (1, ())
    assert [source.node for source in offer.sources] == ["t"]
    assert sent(g.ready("a", 1), Generate)  # it has work before the other
    g.ready("b", 1)
    assert g.groups.phase is Phase.IDLE
    assert {g.node(n).state for n in "ab"} == {"ready"}
    assert (g.groups.num_sent, g.groups.num_lost) == (1, 0)


def test_a_standing_group_gets_the_next_version_at_once():
    g = Group("a", "b")
    g.deliver(1)
    commands = g.publish(2)
    assert said(commands)[0] == ("t", VersionTaken(2, False, order("group 1")))
    assert {name: place.name for name, place in places(commands).items()} == {
        "a": "group 1",
        "b": "group 1",
    }
    assert g.groups.num_groups == 1


def test_it_is_said_of_each_member_how_far_its_version_is():
    g = Group("a", "b")

    def stages() -> list[str]:
        return [g.groups.stage(g.node(name)) for name in ("a", "b", "t")]

    g.publish(1)
    assert stages() == ["forming", "forming", ""]
    g.open()
    assert stages() == ["sending", "sending", ""]
    g.ready("a", 1)
    assert stages() == ["", "sending", ""]
    g.ready("b", 1)
    g.publish(2)
    assert stages() == ["sending", "sending", ""]


def test_who_joins_in_the_middle_pulls_and_is_a_member_from_the_next_boundary_on():
    g = Group("a")
    g.publish(1)
    assert pulls(g.join("late")) == {"late": ["t"]}
    g.open()
    assert pulls(g.join("later"))["later"] == ["late", "t"]  # not from a member
    g.ready("a", 1)
    assert g.groups.phase is Phase.IDLE
    commands = g.publish(2)
    assert opens(commands)
    assert g.groups.receiving == {"a", "late", "later"}
    assert pulls(commands) == {}


def test_off_says_nothing_of_broadcasts():
    g = Group("a", broadcast="off")
    commands = g.publish(1)
    assert [(n, type(m)) for n, m in said(commands)] == [("a", PublishWeights)]
    assert pulls(commands) == {"a": ["t"]}


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_who_is_no_candidate_pulls(mode):
    g = Group("fit", broadcast=mode)
    g.join("none", workers=0)
    g.join("spot", is_preemptible=True)
    g.join("here", host="trainer's")
    for name in ("none", "spot", "here"):
        g.d.confirm(name, 0)
    commands = g.publish(1)
    assert g.groups.receiving == ({"fit"} if mode == "auto" else {"fit", "here"})
    assert set(pulls(commands)) == {"none", "spot", "here"} - g.groups.receiving
    assert wants_delta(commands) == [True]  # these have the one before


def test_busy_nodes_are_members_only_always():
    for mode in ("auto", "always"):
        g = Group("a", "b", broadcast=mode, max_staleness=1)
        for _ in range(20):
            if g.d.core.steps.has_closed(0):
                break
            [first, *_] = [r for r in g.d.running() if g.d.held(r).group.round.step == 0]
            g.d.finish(first)
        assert g.d.core.steps.has_closed(0)
        busy = {n for n in "ab" if g.node(n).running}
        assert busy
        g.d.train(0)
        assert g.groups.receiving == ({"a", "b"} if mode == "always" else {"a", "b"} - busy)


def test_nobody_fit_is_no_broadcast_and_the_trainer_hears_so():
    g = Group("a")
    g.heartbeat("a", workers=0)
    assert said(g.publish(1))[0] == ("t", VersionTaken(1, True))
    g.d.confirm("a", 1)
    g.heartbeat("a", workers=1)
    assert opens(g.publish(2))


def test_without_an_address_of_the_trainer_nobody_is_a_member():
    d = Driver(broadcast="auto")
    d.opens_endpoints = False
    d.join("t", "trainer")
    d.join("a")
    d.feed(MessageArrived("a", Heartbeat(num_workers=1)))
    assert sent(d.publish(0), VersionTaken) == [("t", VersionTaken(0, False))]


def test_the_first_version_is_broadcast_to_those_that_have_started():
    g = Group()
    d = Driver(broadcast="auto")
    g.d, g.groups = d, d.core.fleet.broadcasts
    g.join("t", role="trainer", host="trainer's")
    g.join("a")
    assert opens(d.publish(0))
    assert d.core.fleet.nodes["a"].state == "joining"
    g.open()
    assert d.core.fleet.nodes["a"].state == "loading"
    assert sent(g.ready("a", 0), Generate)


def test_the_last_version_is_pulled_and_the_trainer_is_told_nothing():
    g = Group("a", num_steps=2)
    g.deliver(1)
    commands = g.publish(2)
    assert said(commands) == sent(commands, PublishWeights)
    assert pulls(commands) == {"a": ["t"]}


def test_devices_speak_nccl():
    g = Group("a", broadcast="always")
    g.heartbeat("t", device="cuda:0")
    g.heartbeat("a", workers=1, device="cuda:0")
    g.join("here", device="cuda:1", host="trainer's")
    g.d.confirm("here", 0)
    g.publish(1)
    assert g.groups.receiving == {"a"}
    assert [place.backend for place in places(g.open()).values()] == ["nccl"]


# How it ends


def phase(g: Group, name: str) -> None:
    """Version 1, as far as that."""
    g.publish(1)
    if name != "opening":
        g.open()
    if name == "one left":
        g.ready("a", 1)


PHASES = ["opening", "sending", "one left"]


def test_a_failure_that_the_trainer_reports_is_one_of_all_that_lack_the_version():
    g = Group("a", "b")
    for version in range(1, MAX_FAILURES + 1):
        assert opens(g.publish(version))
        g.open()
        assert set(pulls(commands := g.fail("t"))) == {"a", "b"}
        for name in "ab":
            g.d.confirm(name, version)
    assert len(warnings(commands)) == 3
    assert warnings(commands)[-1].endswith("from now on it pulls all weights")
    assert orders(g.publish(4)) == [None]
    g.join("t", role="trainer", host="trainer's")  # it may be another process: all are tried again
    g.d.publish(4)
    for name in "ab":
        g.d.confirm(name, 4)
    assert opens(g.publish(5))


def test_nowhere_to_meet():
    g = Group("a")
    g.publish(1)
    commands = g.hear("t", BroadcastStatus(1, "", reason="no address"))
    assert set(pulls(commands)) == {"a"}
    assert orders(commands) == [None]
    assert g.groups.phase is Phase.NONE


def test_a_group_that_is_not_opened_in_time_is_over():
    g = Group("a", "b", weights_timeout_s=9.0)
    g.publish(1)
    assert g.d.core.next_deadline() == g.d.now + 18.0
    assert said(g.d.feed(TimerFired(), g.d.now + 17.9)) == []
    commands = g.d.feed(TimerFired(), g.d.now + 0.2)
    assert set(pulls(commands)) == {"a", "b"}
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, True))]
    assert g.groups.num_lost == 1


def test_a_member_that_fails_in_a_row_is_excluded_and_others_are_not():
    g, lines = Group("a", "b"), []
    for version in range(1, 12):
        g.publish(version)
        if g.groups.phase is Phase.OPENING:
            g.open()
        if "a" in g.groups.receiving:
            lines += warnings(g.fail("a", "I do not like it"))
        for name in "ab":
            if g.node(name).receives:
                g.ready(name, version)
            else:
                g.d.confirm(name, version)
    what = f"was in {MAX_FAILURES} failed broadcasts in a row"
    assert lines[-1] == f"a {what}: from now on it pulls all weights"
    assert g.groups.num_lost == MAX_FAILURES
    assert g.groups.num_sent == 11 - MAX_FAILURES


def test_a_version_that_was_received_ends_the_row():
    g = Group("a", "b")
    for version in range(1, 4 * MAX_FAILURES):
        if version % MAX_FAILURES:
            g.publish(version)
            g.open()
            g.fail("a")
            for name in "ab":
                g.d.confirm(name, version)
        else:
            g.deliver(version)
            g.fail("a", "its engine ended")
    assert g.node("a").broadcast_failures < MAX_FAILURES


@pytest.mark.parametrize("at", PHASES)
def test_a_second_version_in_quick_succession(at):
    """One that the run has got ready for by who pulls alone; nothing of the first one is news."""
    g = Group("a", "b", "c")
    g.join("d", workers=0)
    g.d.confirm("d", 0)
    phase(g, at)
    g.d.confirm("d", 1)
    late = BroadcastStatus(1, g.name, reason="not wanted")
    commands = g.publish(2)
    members = {"a"} if at == "one left" else set()  # that has version 1
    assert g.groups.receiving == members
    assert opens(commands) if members else orders(commands) == [None]
    assert set(pulls(commands)) == {*"abcd"} - members
    assert [said(g.hear(who, late)) for who in "tabc"] == [[]] * 4
    assert said(g.hear("t", BroadcastStatus(1, "group 1", AT))) == []
    assert said(g.ready("b", 1)) == []
    assert g.node("b").state == "updating"
    if members:
        g.open()
        g.ready("a", 2)
    for member in {*"abcd"} - members:
        g.d.confirm(member, 2)
    g.publish(3)
    assert g.groups.receiving == {*"abc"}  # late once is no reason
    assert g.groups.num_lost == 1


def test_strangers_and_late_reports_change_nothing():
    g = Group("a", "b")
    g.join("s", workers=0)
    g.d.confirm("s", 0)
    g.publish(1)
    assert said(g.hear("t", BroadcastStatus(0, "", reason="of the version before"))) == []
    assert g.groups.phase is Phase.OPENING
    g.open()
    for status in (
        BroadcastStatus(1, "other", "h:1"),
        BroadcastStatus(1, g.name, "h:1"),
        BroadcastStatus(1, g.name, reason="ha"),
    ):
        for name in ("s", "nobody"):
            assert said(g.hear(name, status)) == []
    for name in "ta":
        assert said(g.hear(name, BroadcastStatus(1, "", reason="of no group"))) == []
        assert said(g.hear(name, BroadcastStatus(0, "group 0", reason="of another"))) == []
        assert said(g.hear(name, BroadcastStatus(1, "other", "h:1"))) == []
    assert g.groups.phase is Phase.SENDING


@pytest.mark.parametrize("at", ["opening", "sending"])
def test_the_trainer_does_not_wait_for_its_only_member_that_is_lost(at: str):
    g = Group("a")
    phase(g, at)
    commands = g.d.feed(NodeLost("a", "gone"))
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False))]


@pytest.mark.parametrize("at", PHASES)
@pytest.mark.parametrize("how", ["lost", "drains", "hello", "refuses", "fails", "restarts"])
def test_a_member_that_goes_ends_it_for_all_and_who_lacks_the_version_pulls(how, at):
    g = Group("a", "b", "c")
    phase(g, at)
    has_it = {"a"} if at == "one left" else set()
    match how:
        case "lost":
            commands = g.d.feed(NodeLost("b", "gone"))
        case "drains":
            commands = g.d.feed(NodeDraining("b", "upkeep"))
        case "hello":
            commands = g.join("b", serves=(0, "digest-0"))
        case "refuses":
            commands = g.d.feed(MessageArrived("b", WeightsFailed(1, "canary")))
        case "fails" if at == "opening":
            return  # nobody knows its name yet
        case "fails":
            commands = g.fail("b")
        case _:
            commands = g.join("b", incarnation=2)
    assert g.groups.phase is Phase.NONE
    assert g.groups.num_lost == 1
    leaves = how in {"lost", "drains"}
    assert set(pulls(commands)) == {"a", "b", "c"} - has_it - ({"b"} if leaves else set())
    if how != "restarts":  # which others are told of once more
        assert len(sent(commands, PublishWeights)) == len(pulls(commands))
    # a node that holds the version before wants the difference; one that has come anew does not
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, True))]
    assert any("broadcast group 1 is over: b" in line for line in warnings(commands))
    for name in pulls(commands):
        g.d.confirm(name, 1)
    commands = g.publish(2)
    assert opens(commands)
    assert g.groups.receiving == {"a", "b", "c"} - ({"b"} if leaves else set())


@pytest.mark.parametrize("at", PHASES)
def test_the_trainer_goes(at):
    g = Group("a", "b", "c")
    phase(g, at)
    missing = {"b", "c"} if at == "one left" else {"a", "b", "c"}
    commands = g.d.feed(NodeLost("t", "gone"))
    assert g.groups.phase is Phase.NONE
    assert said(commands) == []  # nobody has a file of it
    g.join("t", role="trainer", host="trainer's", incarnation=2)
    commands = g.d.publish(1)
    assert set(pulls(commands)) == missing
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, True))]
    for name in missing:
        g.d.confirm(name, 1)
    assert opens(g.publish(2))


@pytest.mark.parametrize("at", PHASES)
def test_the_trainer_says_hello_again_and_publishes_the_same_version(at):
    g = Group("a", "b", "c")
    phase(g, at)
    missing = {"b", "c"} if at == "one left" else {"a", "b", "c"}
    commands = g.join("t", role="trainer", host="trainer's")
    assert g.groups.phase is Phase.NONE
    assert set(pulls(commands)) == missing
    assert sent(commands, VersionTaken) == []  # it has to say where it stands first
    commands = g.d.publish(1)
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, True))]
    assert said(g.fail("t")) == []


# What members hold


def test_who_received_by_broadcast_is_no_source_and_gets_no_difference():
    g = Group("a", "b")
    g.deliver(1)
    assert pulls(g.join("c")) == {"c": ["t"]}
    assert {g.node(n).base for n in "ab"} == {""}
    g.d.confirm("c", 1)
    assert pulls(g.join("e"))["e"] == ["c", "t"]
    g.d.confirm("e", 1)
    g.d.decode(lambda _: 2)
    delta = DeltaOffer("digest-1", "digest-2", "d", 1, 1)
    for name in "abce":
        g.heartbeat(name, workers=0)  # all pull
    commands = g.d.feed(MessageArrived("t", replace(publication(2), deltas=(delta,))))
    assert {n: m.deltas for n, m in sent(commands, PublishWeights)} == {
        "a": (),
        "b": (),
        "c": (delta,),
        "e": (delta,),
    }


def test_an_engine_that_dies_after_a_broadcast_pulls_and_serves_others_then():
    g = Group("a", "b")
    g.deliver(1)
    commands = g.d.feed(MessageArrived("a", WeightsFailed(1, "engine died")))
    assert pulls(commands) == {"a": ["t"]}
    assert g.groups.phase is Phase.NONE
    assert g.node("b").state == "ready"
    assert pulls(g.join("c"))["c"] == ["a", "t"]  # which is at it
    g.d.confirm("a", 1)
    assert pulls(g.join("e"))["e"] == ["a", "c", "t"]


@pytest.mark.parametrize("has_file", [True, False])
def test_hello_says_whether_there_is_a_file(has_file):
    g = Group("a")
    g.deliver(1)
    g.join("a", serves=(1, "digest-1"), has_file=has_file)
    assert g.node("a").state == "ready"
    assert pulls(g.join("c"))["c"] == (["a", "t"] if has_file else ["t"])
    assert g.node("a").base == ("digest-1" if has_file else "")


def test_a_member_that_has_the_version_otherwise_ends_it():
    g = Group("a", "b")
    g.publish(1)
    assert pulls(g.d.confirm("a", 1)) == {"b": ["a", "t"]}
    assert g.groups.phase is Phase.NONE


def test_a_wrong_digest_after_a_broadcast_is_pulled_again():
    g = Group("a", "b")
    g.publish(1)
    g.open()
    assert set(pulls(g.d.confirm("a", 1, digest="wrong"))) == {"a", "b"}


def test_work_comes_only_when_a_member_is_ready():
    g = Group("a", "b")
    commands = g.publish(1) + g.open()
    assert sent(commands, Generate) == []
    assert {n for n, _ in sent(g.ready("a", 1), Generate)} == {"a"}


def test_a_delta_is_wanted_by_those_that_pull_and_have_the_version_before():
    g = Group("a", "b")
    g.join("p", workers=0)
    g.d.confirm("p", 0)
    assert wants_delta(g.publish(1)) == [True]
    g.open()
    g.ready("a", 1)
    g.ready("b", 1)
    g.d.feed(NodeLost("p", "gone"))
    assert wants_delta(g.publish(2)) == [False]
    g.ready("a", 2)
    g.ready("b", 2)
    g.join("p", workers=0)
    g.d.confirm("p", 2)
    assert wants_delta(g.publish(3)) == [True]


def test_no_delta_is_wanted_where_they_are_off():
    g = Group("a", deltas=False)
    g.heartbeat("a", workers=0)
    assert said(g.publish(1))[0] == ("t", VersionTaken(1, False))


# Sizes, and a coordinator that was made again


def test_a_world_of_one_has_no_group():
    """The trainer's own node serves what it has published."""
    g = Group(broadcast="always")
    hello = Hello("t", 1, roles=("trainer", "rollout"), protocol=PROTOCOL, pid=1, host="here")
    g.d = Driver(broadcast="always")
    g.groups = g.d.core.fleet.broadcasts
    g.d.feed(NodeJoined(hello))
    g.d.feed(MessageArrived("t", endpoint_of("t", 1)))
    g.heartbeat("t", workers=1)
    for version in (0, 1):
        commands = g.publish(version) if version else g.d.publish(0)
        assert said(commands)[0] == ("t", VersionTaken(version, version > 0))
        assert set(pulls(commands)) == {"t"}
        g.d.confirm("t", version)
    assert (g.groups.num_groups, g.groups.phase) == (0, Phase.NONE)


def test_sixty_four_members():
    names = [f"n{i:02}" for i in range(64)]
    g = Group(*names)
    for version in range(1, 4):
        g.deliver(version)
    assert (g.groups.num_groups, g.groups.num_sent) == (1, 3)
    assert g.groups.group is not None
    assert g.groups.group.world == 1 + 2 * 64
    commands = g.publish(4)
    assert len([m for _, m in sent(commands, PublishWeights) if m.group]) == 64
    for name in names[:32]:
        g.ready(name, 4)
    assert set(pulls(g.d.feed(NodeLost("n40", "gone")))) == {*names[32:]} - {"n40"}


@pytest.mark.parametrize("at", PHASES)
def test_a_coordinator_that_is_made_again_has_no_group(at):
    g = Group("a", "b", "c")
    phase(g, at)
    g.d.restart()
    old, g.groups = g.groups, g.d.core.fleet.broadcasts
    commands = g.join("t", role="trainer", host="trainer's") + g.d.publish(1)
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False))]
    for name in "abc":
        has_it = name not in old.receiving
        version = int(has_it)
        commands = g.join(name, serves=(version, f"digest-{version}"), has_file=not has_it)
        assert (name in pulls(commands)) != has_it
    assert said(g.hear("a", BroadcastStatus(1, "group 1", reason="over"))) == []
    for name in "abc":
        if g.node(name).state != "ready":
            g.d.confirm(name, 1)
    assert opens(g.publish(2))
    assert g.groups.receiving == {"a", "b", "c"}
