"""What trainer and members of a broadcast group are told, line by line, and who pulls instead."""

from dataclasses import replace
from typing import Any

import pytest

from lightrl.core.broadcast_groups import MAX_FAILURES, Phase
from lightrl.core.commands import Command, Report, Send
from lightrl.core.events import (
    BroadcastHeard,
    EndpointOpened,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLost,
    TimerFired,
    WeightsConfirmed,
    WeightsPublished,
    WeightsRefused,
)
from lightrl.messages.broadcasts import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastOpened,
    BroadcastSums,
    JoinBroadcast,
    OpenBroadcast,
    SendBroadcast,
    VersionTaken,
)
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL, Heartbeat, Hello
from lightrl.messages.responses import Generate
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsFailed, WeightsReady
from tests.core.conftest import Driver, endpoint_of, of_kind, publication, sent

SUMS = (1, 2)


class Group:
    """A trainer and members that do as they are told, until a test has them do otherwise."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.d = Driver(
            **{"broadcast": "auto", "num_ranks": 2, "num_steps": 50, "lease_s": 1e6, **changes}
        )
        self.groups = self.d.core.fleet.broadcasts.groups
        self.join("t", role="trainer", host="trainer's")
        self.heartbeat("t")
        self.d.publish(0)
        for name in names:
            self.join(name)
            self.d.confirm(name, 0)

    @property
    def name(self) -> str:
        return f"group {self.groups.num_epochs}"

    def join(self, name: str, workers: int = 2, device: str = "cpu", **fields: Any):
        """With an engine that has started, and an endpoint."""
        role = fields.pop("role", "rollout")
        fields = {"incarnation": 1, "host": f"host of {name}", **fields}
        hello = Hello(name, roles=(role,), protocol=PROTOCOL, pid=1, **fields)
        commands = self.d.feed(NodeJoined(hello))
        commands += self.d.feed(EndpointOpened(name, endpoint_of(name, fields["incarnation"])))
        if role == "rollout":
            self.heartbeat(name, workers, device)
        return commands

    def heartbeat(self, name: str, workers: int = 0, device: str = "cpu") -> None:
        self.d.feed(NodeHeard(name, Heartbeat(device=device, num_workers=workers)))

    def hear(self, name: str, message: Any) -> list[Command]:
        return self.d.feed(BroadcastHeard(name, message))

    def publish(self, version: int) -> list[Command]:
        """As at the boundary of a step, where everybody is idle."""
        self.d.decode(lambda _: 2)
        return self.d.train(version - 1)

    def opened(self) -> list[Command]:
        return self.hear("t", BroadcastOpened(self.groups.num_epochs, self.name, "0.0.0.0:7"))

    def form(self) -> list[Command]:
        """All that is said once the last member is there."""
        self.opened()
        assert self.groups.epoch is not None
        commands = self.hear("t", BroadcastJoined(self.name))
        for name in self.groups.epoch.members:
            commands += self.hear(name, BroadcastJoined(self.name))
        return commands

    def sums(self, version: int) -> list[Command]:
        return self.hear("t", BroadcastSums(self.name, version, SUMS))

    def ready(self, name: str, version: int) -> list[Command]:
        """By broadcast."""
        confirmed = WeightsReady(version, f"digest-{version}", broadcast_s=0.1)
        return self.d.feed(WeightsConfirmed(name, confirmed))

    def deliver(self, version: int) -> None:
        """By a group that is formed for it, or stands."""
        self.publish(version)
        if self.groups.phase is Phase.OPENING:
            self.form()
        self.sums(version)
        for name in sorted(self.groups.receiving):
            self.ready(name, version)
        assert self.groups.phase is Phase.STANDING

    def fail(self, name: str, reason: str = "timed out", **fields: Any) -> list[Command]:
        return self.hear(name, BroadcastFailed(self.name, reason, **fields))

    def node(self, name: str):
        return self.d.core.fleet.nodes[name]


def said(commands: list[Command]) -> list[tuple[str, Message]]:
    """Of weights, to whom: what is sent of work and steps left away."""
    weights = PublishWeights | VersionTaken | OpenBroadcast | JoinBroadcast | SendBroadcast
    return [
        (c.node, c.message)
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, weights | BroadcastSums)
    ]


def pulls(commands: list[Command]) -> dict[str, list[str]]:
    """Who is told to pull -> from whom."""
    return {
        n: [s.node for s in m.sources] for n, m in sent(commands, PublishWeights) if not m.group
    }


def warnings(commands: list[Command]) -> list[str]:
    return [r.text for r in of_kind(commands, Report) if r.is_warning]


def test_a_version_goes_out_in_this_order():
    g = Group("a", "b")
    assert said(g.publish(1)) == [("t", VersionTaken(1, True, False)), ("t", OpenBroadcast(1))]
    assert {g.node(n).state for n in "ab"} == {"updating"}
    at = "0.0.0.0:7"
    assert said(g.opened()) == [
        ("t", JoinBroadcast("group 1", at, 0, 2, 6, "gloo")),
        ("a", JoinBroadcast("group 1", at, 2, 2, 6, "gloo")),
        ("b", JoinBroadcast("group 1", at, 4, 2, 6, "gloo")),
    ]
    assert said(g.hear("a", BroadcastJoined("group 1"))) == []
    assert said(g.hear("t", BroadcastJoined("group 1"))) == []
    [to_trainer, (a, offer), (b, _)] = said(g.hear("b", BroadcastJoined("group 1")))
    assert to_trainer == ("t", SendBroadcast("group 1", 1))
    assert (a, b) == ("a", "b")
    assert isinstance(offer, PublishWeights)
    assert (offer.group, offer.policy_version, offer.deltas) == ("group 1", 1, ())
    assert [s.node for s in offer.sources] == ["t"]
    assert said(g.sums(1)) == [(n, BroadcastSums("group 1", 1, SUMS)) for n in "ab"]
    assert sent(g.ready("a", 1), Generate)  # it has work before the other
    g.ready("b", 1)
    assert g.groups.phase is Phase.STANDING
    assert {g.node(n).state for n in "ab"} == {"ready"}
    assert (g.groups.num_sent, g.groups.num_lost) == (1, 0)


def test_a_standing_group_gets_the_next_version_at_once():
    g = Group("a", "b")
    g.deliver(1)
    commands = said(g.publish(2))
    assert commands[:2] == [("t", VersionTaken(2, True, False)), ("t", SendBroadcast("group 1", 2))]
    assert [(n, m.group) for n, m in commands[2:] if isinstance(m, PublishWeights)] == [
        ("a", "group 1"),
        ("b", "group 1"),
    ]


def test_it_is_said_of_each_member_how_far_its_version_is():
    g = Group("a", "b")
    broadcasts, nodes = g.d.core.fleet.broadcasts, g.d.core.fleet.nodes

    def stages() -> list[str]:
        return [broadcasts.stage(nodes[name]) for name in ("a", "b", "t")]

    g.publish(1)
    assert stages() == ["forming", "forming", ""]
    g.form()
    assert stages() == ["sending", "sending", ""]
    g.sums(1)
    assert stages() == ["proving", "proving", ""]
    g.ready("a", 1)
    assert stages() == ["", "proving", ""]
    g.ready("b", 1)
    g.publish(2)
    assert stages() == ["sending", "sending", ""]


def test_sums_that_come_before_a_member_has_all_of_it_are_passed_on_and_only_to_who_receives():
    g = Group("a", "b")
    g.publish(1)
    assert said(g.sums(1)) == []  # of a group that nobody knows yet
    g.form()
    g.ready("a", 1)
    assert [n for n, _ in said(g.sums(1))] == ["b"]
    assert said(g.sums(0)) == said(g.hear("a", BroadcastSums(g.name, 1, SUMS))) == []
    assert said(g.hear("t", BroadcastSums("other", 1, SUMS))) == []


def test_who_joins_in_the_middle_pulls_and_is_a_member_from_the_next_boundary_on():
    g = Group("a")
    g.publish(1)
    assert pulls(g.join("late")) == {"late": ["t"]}
    g.form()
    assert pulls(g.join("later"))["later"] == ["late", "t"]  # not from a member
    g.sums(1)
    g.ready("a", 1)
    assert g.groups.phase is Phase.STANDING
    commands = g.publish(2)
    assert ("t", OpenBroadcast(2)) in said(commands)
    assert g.groups.receiving == {"a", "late", "later"}
    assert pulls(commands) == {}


def test_no_group_waits_again_for_who_stands_still():
    """ "b" is a member once, and is lost to broadcasts until it serves again."""
    g = Group("a", "b")
    g.publish(1)
    g.opened()
    g.fail("t", "members [4, 5] of 6 did not come")
    g.d.confirm("a", 1)
    members: list[tuple[str, ...]] = []
    for version in (2, 3, 4):
        g.publish(version)
        epoch = g.groups.epoch
        members.append(epoch.members if epoch is not None else ())
        if epoch is not None:
            if g.groups.phase is Phase.OPENING:
                g.form()
            g.sums(version)
            g.ready("a", version)
        else:
            g.d.confirm("a", version)
    assert members == [("a",)] * 3
    g.d.confirm("b", 4)
    g.publish(5)
    assert g.groups.epoch is not None
    assert g.groups.epoch.members == ("a", "b")


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
    assert said(commands)[0] == ("t", VersionTaken(1, True, True))  # these have the one before


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
    assert said(g.publish(1))[0] == ("t", VersionTaken(1, False, True))
    g.d.confirm("a", 1)
    g.heartbeat("a", workers=1)
    assert said(g.publish(2))[0] == ("t", VersionTaken(2, True, False))


def test_without_an_address_of_the_trainer_nobody_is_a_member():
    d = Driver(broadcast="auto")
    d.opens_endpoints = False
    d.join("t", "trainer")
    d.join("a")
    d.feed(NodeHeard("a", Heartbeat(num_workers=1)))
    assert sent(d.publish(0), VersionTaken) == [("t", VersionTaken(0, False, False))]


def test_the_first_version_is_broadcast_to_those_that_have_started():
    g = Group()
    d = Driver(broadcast="auto")
    g.d, g.groups = d, d.core.fleet.broadcasts.groups
    g.join("t", role="trainer", host="trainer's")
    g.join("a")
    assert ("t", OpenBroadcast(1)) in said(d.publish(0))
    assert d.core.fleet.nodes["a"].state == "joining"
    g.form()
    assert d.core.fleet.nodes["a"].state == "loading"
    g.sums(0)
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
    assert [m.backend for _, m in sent(g.opened(), JoinBroadcast)] == ["nccl", "nccl"]


# How it ends


def phase(g: Group, name: str) -> None:
    """Version 1, as far as that."""
    g.publish(1)
    if name != "opening":
        g.opened()
    if name == "half":
        g.hear("a", BroadcastJoined(g.name))
    if name in {"sending", "proving", "one left"}:
        g.hear("t", BroadcastJoined(g.name))
        for member in "abc":
            g.hear(member, BroadcastJoined(g.name))
    if name in {"proving", "one left"}:
        g.sums(1)
    if name == "one left":
        g.ready("a", 1)


PHASES = ["opening", "forming", "half", "sending", "proving", "one left"]


@pytest.mark.parametrize("at", ["opening", "forming", "sending"])
def test_the_trainer_does_not_wait_for_its_only_member_that_is_lost(at: str):
    g = Group("a")
    phase(g, at)
    commands = g.d.feed(NodeLost("a", "gone"))
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False, False))]


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
            commands = g.d.feed(WeightsRefused("b", WeightsFailed(1, "canary")))
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
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False, True))]
    assert any("broadcast group 1 is over: b" in line for line in warnings(commands))
    for name in pulls(commands):
        g.d.confirm(name, 1)
    commands = g.publish(2)
    assert ("t", OpenBroadcast(2)) in said(commands)
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
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False, True))]
    for name in missing:
        g.d.confirm(name, 1)
    assert ("t", OpenBroadcast(2)) in said(g.publish(2))


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
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False, True))]
    assert said(g.sums(1)) == said(g.fail("t")) == []


@pytest.mark.parametrize("at", PHASES)
def test_the_trainer_says_that_it_failed(at):
    g = Group("a", "b", "c")
    phase(g, at)
    failed = BroadcastFailed("" if at == "opening" else g.name, "rank 1: timed out")
    commands = g.hear("t", failed)
    assert set(pulls(commands)) == ({"b", "c"} if at == "one left" else {"a", "b", "c"})
    assert g.groups.phase is Phase.NONE
    assert not any(g.groups.excludes(name, 1) for name in "abc")


def test_nowhere_to_meet():
    g = Group("a")
    g.publish(1)
    commands = g.hear("t", BroadcastOpened(1, "", "", "no address"))
    assert set(pulls(commands)) == {"a"}
    assert g.groups.phase is Phase.NONE


def test_a_new_version_ends_what_is_under_way_and_the_next_forms_anew():
    g = Group("a", "b")
    g.join("d", workers=0)
    g.d.confirm("d", 0)
    g.publish(1)
    g.d.confirm("d", 1)  # the run goes on by it alone
    commands = g.publish(2)
    assert said(commands)[0] == ("t", VersionTaken(2, False, True))
    assert set(pulls(commands)) == {"a", "b", "d"}
    assert g.groups.num_lost == 1
    for name in "abd":
        g.d.confirm(name, 2)
    assert ("t", OpenBroadcast(2)) in said(g.publish(3))
    g.form()
    g.sums(3)
    g.ready("a", 3)
    commands = g.publish(4)
    assert set(pulls(commands)) == {"a", "b", "d"}
    assert g.groups.num_lost == 2


@pytest.mark.parametrize("at", PHASES)
def test_a_second_version_in_quick_succession(at):
    """One that the run has got ready for by who pulls alone; nothing of the first one is news."""
    g = Group("a", "b", "c")
    g.join("d", workers=0)
    g.d.confirm("d", 0)
    phase(g, at)
    g.d.confirm("d", 1)
    name = g.name
    commands = g.publish(2)
    assert g.groups.phase is Phase.NONE
    assert said(commands)[0] == ("t", VersionTaken(2, False, True))
    assert set(pulls(commands)) == {*"abcd"}
    for late in (BroadcastJoined(name), BroadcastFailed(name, "not wanted")):
        assert [said(g.hear(who, late)) for who in "tabc"] == [[]] * 4
    assert said(g.hear("t", BroadcastOpened(1, name, "h:1"))) == []
    assert said(g.hear("t", BroadcastSums(name, 1, SUMS))) == []
    assert said(g.ready("b", 1)) == []
    assert g.node("b").state == "updating"
    for member in "abcd":
        g.d.confirm(member, 2)
    g.publish(3)
    assert g.groups.receiving == {*"abc"}  # late once is no reason
    assert (g.groups.num_epochs, g.groups.num_lost) == (2, 1)


def test_a_group_that_does_not_form_in_time_is_over():
    g = Group("a", "b", weights_timeout_s=9.0)
    g.publish(1)
    g.opened()
    g.hear("a", BroadcastJoined(g.name))
    assert g.d.core.next_deadline() == g.d.now + 18.0
    assert said(g.d.feed(TimerFired(), g.d.now + 17.9)) == []
    commands = g.d.feed(TimerFired(), g.d.now + 0.2)
    assert set(pulls(commands)) == {"a", "b"}
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False, True))]
    assert g.groups.num_lost == 1


def test_attempts_that_fail_are_put_off():
    g, tried = Group("a"), []
    for version in range(1, 17):
        if sent(g.publish(version), OpenBroadcast):
            tried.append(version)
            g.opened()
            g.fail("t")
        g.d.confirm("a", version)
    assert tried == [1, 2, 4, 8, 16]


def test_a_node_that_cannot_reach_the_trainer_is_a_member_only_as_another_process():
    g = Group("a", "b")
    g.publish(1)
    g.opened()
    commands = g.fail("a", "no route", is_unreachable=True)
    assert warnings(commands)[-1] == "a cannot reach the trainer: from now on it pulls all weights"
    g.d.confirm("a", 1)
    g.d.confirm("b", 1)
    g.publish(2)
    assert g.groups.receiving == {"b"}
    g.d.feed(NodeLost("a", "gone"))
    g.join("a", serves=(1, "digest-1"))  # the same process
    g.form()
    g.sums(2)
    g.ready("b", 2)
    g.d.confirm("a", 2)
    g.publish(3)
    assert g.groups.receiving == {"b"}


def test_who_says_too_late_that_the_trainer_cannot_be_reached_is_none_either():
    g = Group("a", "b", "s")
    g.publish(1)
    g.opened()
    g.fail("t")
    for _ in range(2):
        lines = warnings(g.fail("a", "no route", is_unreachable=True))
    assert lines == []  # once is enough
    assert warnings(g.fail("stranger", "no route", is_unreachable=True)) == []
    for name in "abs":
        g.d.confirm(name, 1)
    g.publish(2)
    assert g.groups.receiving == {"b", "s"}


def test_a_word_on_a_group_that_is_over_bars_only_who_found_nobody_at_its_address():
    g = Group("a", "b")
    g.publish(1)
    g.opened()
    g.fail("t")
    assert warnings(g.fail("a", "connection refused")) == []
    assert warnings(g.fail("b", "timed out", is_unreachable=True)) != []
    for name in "ab":
        g.d.confirm(name, 1)
    g.publish(2)
    assert g.groups.receiving == {"a"}


def test_who_could_not_reach_the_trainer_is_a_member_of_the_next_process_of_it():
    g = Group("a", "b")
    g.publish(1)
    g.opened()
    g.fail("a", "no route", is_unreachable=True)
    g.d.feed(NodeLost("t", "gone"))
    g.join("t", role="trainer", host="trainer's", incarnation=2)
    g.d.publish(1)
    g.fail("b", "no route", is_unreachable=True)  # it has waited for the one before
    for name in "ab":
        g.d.confirm(name, 1)
    g.publish(2)
    assert g.groups.receiving == {"a", "b"}


def test_a_member_cannot_end_the_broadcasts_of_others_for_ever():
    g, lines = Group("a", "b"), []
    for version in range(1, 20):
        g.publish(version)
        if g.groups.phase is Phase.OPENING:
            g.form()
        if "a" in g.groups.receiving:
            lines += warnings(g.fail("a", "I do not like it"))
        for name in "ab":
            if g.node(name).receives:
                g.ready(name, version)
            else:
                g.d.confirm(name, version)
    assert lines[-1] == f"a ended {MAX_FAILURES} groups: from now on it pulls all weights"
    assert g.groups.num_lost == MAX_FAILURES
    assert g.groups.num_sent > 8


def test_strangers_and_late_news_change_nothing():
    g = Group("a", "b")
    g.join("s", workers=0)
    g.d.confirm("s", 0)
    g.publish(1)
    g.opened()
    for message in (
        BroadcastOpened(1, "other", "h:1"),
        BroadcastSums(g.name, 1, SUMS),
        BroadcastJoined(g.name),
        BroadcastFailed(g.name, "ha"),
    ):
        for name in ("s", "nobody"):
            assert said(g.hear(name, message)) == []
    assert said(g.hear("a", BroadcastFailed("", "of no group"))) == []
    assert said(g.hear("a", BroadcastFailed("group 0", "of another"))) == []
    assert said(g.hear("a", BroadcastOpened(1, "other", "h:1"))) == []
    assert g.groups.phase is Phase.FORMING


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
    commands = g.d.feed(WeightsPublished("t", replace(publication(2), deltas=(delta,))))
    assert {n: m.deltas for n, m in sent(commands, PublishWeights)} == {
        "a": (),
        "b": (),
        "c": (delta,),
        "e": (delta,),
    }


def test_an_engine_that_dies_after_a_broadcast_pulls_and_serves_others_then():
    g = Group("a", "b")
    g.deliver(1)
    commands = g.d.feed(WeightsRefused("a", WeightsFailed(1, "engine died")))
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
    g.form()
    assert set(pulls(g.d.confirm("a", 1, digest="wrong"))) == {"a", "b"}


def test_work_comes_only_when_a_member_is_ready():
    g = Group("a", "b")
    commands = g.publish(1) + g.form() + g.sums(1)
    assert sent(commands, Generate) == []
    assert {n for n, _ in sent(g.ready("a", 1), Generate)} == {"a"}


def test_a_delta_is_wanted_by_those_that_pull_and_have_the_version_before():
    g = Group("a", "b")
    g.join("p", workers=0)
    assert said(g.publish(1))[0] == ("t", VersionTaken(1, True, True))  # p is at version 0
    g.form()
    g.sums(1)
    g.ready("a", 1)
    g.ready("b", 1)
    g.d.feed(NodeLost("p", "gone"))
    assert said(g.publish(2))[0] == ("t", VersionTaken(2, True, False))
    g.sums(2)
    g.ready("a", 2)
    g.ready("b", 2)
    g.join("p", workers=0)
    g.d.confirm("p", 2)
    assert said(g.publish(3))[0] == ("t", VersionTaken(3, True, True))


def test_no_delta_is_wanted_where_they_are_off():
    g = Group("a", deltas=False)
    g.heartbeat("a", workers=0)
    assert said(g.publish(1))[0] == ("t", VersionTaken(1, False, False))


# Sizes, and a coordinator that was made again


def test_one_rank_and_one_member():
    g = Group("a", num_ranks=1)
    g.heartbeat("a", workers=1)
    g.publish(1)
    assert [(m.rank, m.world) for _, m in sent(g.opened(), JoinBroadcast)] == [(0, 2), (1, 2)]
    g.hear("t", BroadcastJoined(g.name))
    g.hear("a", BroadcastJoined(g.name))
    g.sums(1)
    g.ready("a", 1)
    assert g.groups.phase is Phase.STANDING


def test_a_world_of_one_has_no_group():
    """The trainer's own node serves what it has published."""
    g = Group(broadcast="always")
    hello = Hello("t", 1, roles=("trainer", "rollout"), protocol=PROTOCOL, pid=1, host="here")
    g.d = Driver(broadcast="always")
    g.groups = g.d.core.fleet.broadcasts.groups
    g.d.feed(NodeJoined(hello))
    g.d.feed(EndpointOpened("t", endpoint_of("t", 1)))
    g.heartbeat("t", workers=1)
    for version in (0, 1):
        commands = g.publish(version) if version else g.d.publish(0)
        assert said(commands)[0] == ("t", VersionTaken(version, False, version > 0))
        assert set(pulls(commands)) == {"t"}
        g.d.confirm("t", version)
    assert (g.groups.num_epochs, g.groups.phase) == (0, Phase.NONE)


def test_sixty_four_members():
    names = [f"n{i:02}" for i in range(64)]
    g = Group(*names)
    for version in range(1, 4):
        g.deliver(version)
    assert (g.groups.num_epochs, g.groups.num_sent) == (1, 3)
    assert g.groups.epoch is not None
    assert g.groups.epoch.world == 2 + 2 * 64
    commands = g.publish(4)
    assert len([m for _, m in sent(commands, PublishWeights) if m.group]) == 64
    g.sums(4)
    for name in names[:32]:
        g.ready(name, 4)
    assert set(pulls(g.d.feed(NodeLost("n40", "gone")))) == {*names[32:]} - {"n40"}


@pytest.mark.parametrize("at", PHASES)
def test_a_coordinator_that_is_made_again_has_no_group(at):
    g = Group("a", "b", "c")
    phase(g, at)
    g.d.restart()
    old, g.groups = g.groups, g.d.core.fleet.broadcasts.groups
    commands = g.join("t", role="trainer", host="trainer's") + g.d.publish(1)
    assert sent(commands, VersionTaken) == [("t", VersionTaken(1, False, False))]
    for name in "abc":
        has_it = name not in old.receiving
        version = int(has_it)
        commands = g.join(name, serves=(version, f"digest-{version}"), has_file=not has_it)
        assert (name in pulls(commands)) != has_it
    assert said(g.hear("a", BroadcastJoined("group 1"))) == []
    assert said(g.hear("a", BroadcastFailed("group 1", "over"))) == []
    for name in "abc":
        if g.node(name).state != "ready":
            g.d.confirm(name, 1)
    assert ("t", OpenBroadcast(1)) in said(g.publish(2))
    assert g.groups.receiving == {"a", "b", "c"}
