"""Joining, leases, draining and losing nodes; work never goes with them."""

import pytest

from lightrl.core.commands import Admit, Finish
from lightrl.core.events import (
    DrainRequested,
    MessageArrived,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeLost,
    TimerFired,
)
from lightrl.core.nodes.fleet import MAX_STALE_NODES, MAX_STALE_OF_NODE
from lightrl.core.state import NodeState
from lightrl.messages.nodes import PROTOCOL, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import Generate
from lightrl.messages.training import TrainShard
from lightrl.messages.weights import PublishWeights, WeightsFailed
from tests.core.conftest import Driver, ids, of_kind, sent


def test_late_node_is_offered_the_published_version_and_works_in_the_same_step(driver: Driver):
    driver.start("a", slots=1)
    joined = driver.join("b", slots=2)
    assert of_kind(joined, Admit) == [Admit("b")]
    [(_, offer)] = sent(joined, PublishWeights)
    assert offer.policy_version == 0
    ready = driver.confirm("b", 0)
    [(node, generate)] = sent(ready, Generate)
    assert node == "b"
    assert len(generate.requests) == 2


def test_lost_node_resumes_from_the_prefix_it_already_paid_for(driver: Driver):
    driver.start("a", slots=1)
    driver.tokens("p0@0#0", 7, 8)
    driver.feed(NodeLost("a", "gone"))
    driver.join("b", slots=1)
    [(_, generate)] = sent(driver.confirm("b", 0), Generate)
    [request] = generate.requests
    assert (request.response, request.attempt) == ("p0@0#0", 2)
    assert (request.prompt, request.prefix) == (ids(1, 2, 0), ids(7, 8))
    assert request.max_new_tokens == 8


def test_tokens_of_an_attempt_that_was_given_up_are_ignored(driver: Driver):
    driver.start("a", slots=1)
    driver.tokens("p0@0#0", 7)
    driver.feed(NodeLost("a", "silent"))
    driver.join("a", slots=1)
    driver.join("b", slots=1)
    driver.confirm("b", 0)
    driver.tokens("p0@0#0", 5, 5, offset=1, node="a", attempt=1)
    assert list(driver.core.table.responses["p0@0#0"].tokens) == [7]
    assert driver.core.table.counters.chunks_ignored == 1


def test_silent_node_is_lost_when_its_lease_runs_out_and_a_heard_one_is_not(driver: Driver):
    driver.start("a", "b", slots=1)
    driver.feed(MessageArrived("b", Heartbeat()), now=4.0)
    driver.feed(MessageArrived("t", Heartbeat()))
    assert driver.core.next_deadline() == 5.0
    driver.feed(TimerFired(), now=5.0)
    assert set(driver.core.fleet.nodes) == {"b", "t"}
    assert driver.core.next_deadline() == 9.0
    assert driver.core.table.counters.nodes_lost == 1


def test_restarted_node_replaces_its_old_incarnation_and_a_ghost_does_not(driver: Driver):
    driver.start("a", slots=2)
    driver.join("a", slots=2, incarnation=2)
    assert driver.core.table.counters.responses_moved == 2
    assert driver.core.fleet.nodes["a"].incarnation == 2
    [(_, refusal)] = sent(driver.join("a", incarnation=1), Welcome)
    assert refusal.refused == "another process has this name now"
    assert driver.core.fleet.nodes["a"].incarnation == 2


def test_as_many_ghosts_are_remembered_as_matter_and_no_more(driver: Driver):
    driver.start("a")
    newest = 3 * MAX_STALE_OF_NODE
    for incarnation in range(2, newest + 1):
        driver.join("a", incarnation=incarnation)
    fleet = driver.core.fleet
    for k in range(MAX_STALE_NODES + 5):
        fleet.stale.add(f"b{k}", 1)
        # who is followed often is not forgotten
        driver.join("a", incarnation=(newest := newest + 1))
    remembered = [k for k in range(1, newest) if ("a", k) in fleet.stale]
    assert remembered == list(range(newest - MAX_STALE_OF_NODE, newest))
    assert len(fleet.stale) == MAX_STALE_NODES
    [(_, refusal)] = sent(driver.join("a", incarnation=newest - 1), Welcome)
    assert refusal.refused == "another process has this name now"


def hello_of(node: str, incarnation: int) -> Hello:
    return Hello(node, incarnation, ("rollout",), PROTOCOL, pid=1, host="h")


def test_hello_of_a_known_process_is_welcomed_again_without_moving_anything(driver: Driver):
    driver.start("a", slots=2)
    running = dict.fromkeys(driver.running(), 1)
    assert driver.join("a", slots=2, serves=0, running=running) == [Admit("a")]
    assert driver.core.table.counters.responses_moved == 0


def test_second_trainer_and_wrong_protocol_are_refused_in_one_line(driver: Driver):
    driver.start("a")
    [(_, refusal)] = sent(driver.join("t2", "trainer"), Welcome)
    assert refusal.refused == "this run has a trainer node already"
    old = Hello("x", 1, ("rollout",), 99, pid=1, host="h")
    [(_, refusal)] = sent(driver.feed(NodeJoined(old)), Welcome)
    assert refusal.refused == f"speaks protocol 99, this run {PROTOCOL}"
    assert set(driver.core.fleet.nodes) == {"t", "a"}


def test_draining_node_gets_no_new_work_and_its_responses_move(driver: Driver):
    driver.start("a", "b", slots=2)
    driver.feed(NodeDraining("a", "SIGTERM"))
    driver.tokens("p0@0#0", 5, finish="abort")  # its last tokens
    [(node, generate)] = sent(driver.finish("p1@0#0"), Generate)
    assert (node, generate.requests[0].response) == ("b", "p0@0#0")
    assert generate.requests[0].prefix == ids(5)
    [(node, generate)] = sent(
        driver.feed(NodeLeft("a", "drained", ok=True)) + driver.finish("p1@0#1"), Generate
    )
    assert (node, generate.requests[0].response) == ("b", "p0@0#1")
    assert "a" not in driver.core.fleet.nodes
    assert driver.core.table.counters.nodes_lost == 0


def test_operator_drain_reaches_the_node_and_an_unknown_name_is_reported(driver: Driver):
    driver.start("a")
    assert sent(driver.feed(DrainRequested("a", "upkeep")), Drain) == [("a", Drain("a", "upkeep"))]
    assert sent(driver.feed(DrainRequested("zzz", "")), Drain) == []


def test_stopping_the_run_asks_every_node_and_finishes_when_all_have_left(driver: Driver):
    driver.start("a")
    drains = sent(driver.feed(DrainRequested("*", "ctrl-C")), Drain)
    assert [node for node, _ in drains] == ["a", "t"]
    assert of_kind(driver.feed(NodeLeft("a", "drained", ok=True)), Finish) == []
    [finish] = of_kind(driver.feed(NodeLeft("t", "drained", ok=True)), Finish)
    assert (str(finish.state), finish.reason) == ("stopped", "ctrl-C")
    assert driver.join("late") == []


def test_run_without_its_trainer_waits_and_fails_when_none_comes(driver: Driver):
    driver.start("a")
    driver.feed(NodeLost("t", "connection lost"), now=1.0)
    assert driver.core.state == "running"
    driver.feed(MessageArrived("a", Heartbeat()), now=58.0)
    assert sent(driver.feed(TimerFired(), now=60.9), Drain) == []
    assert sent(driver.feed(TimerFired(), now=61.0), Drain) == [
        ("a", Drain("a", "run failed: no trainer for 60 s"))
    ]
    [finish] = of_kind(driver.feed(NodeLeft("a", "drained", ok=True)), Finish)
    assert (str(finish.state), finish.reason) == ("failed", "no trainer for 60 s")


def test_trainer_that_says_that_it_failed_fails_the_run(driver: Driver):
    driver.start("a")
    driver.feed(NodeLeft("t", "no such model", ok=False))
    [finish] = of_kind(driver.feed(NodeLeft("a", "drained", ok=True)), Finish)
    assert (str(finish.state), finish.reason) == ("failed", "trainer node t: no such model")


def test_trainer_that_fails_while_the_run_finishes_well_turns_it_into_a_failure():
    d = Driver(num_steps=1)
    d.start("a")
    d.finish_round()
    d.train(0)
    d.feed(NodeLeft("a", "drained", ok=True))
    [finish] = of_kind(d.feed(NodeLeft("t", "disk full", ok=False)), Finish)
    assert (str(finish.state), finish.reason) == ("failed", "trainer node t: disk full")


def test_no_rollout_node_left_means_waiting_not_failing(driver: Driver):
    driver.start("a", slots=4)
    driver.feed(NodeLost("a", "gone"))
    assert sent(driver.feed(TimerFired(), now=1.0), TrainShard) == []
    driver.join("b", slots=4)
    [(_, generate)] = sent(driver.confirm("b", 0), Generate)
    assert [r.response for r in generate.requests] == ["p0@0#0", "p0@0#1", "p1@0#0", "p1@0#1"]


def test_engine_that_died_takes_no_response_with_it_and_its_node_loads_again(driver: Driver):
    driver.start("a", slots=2)
    driver.tokens("p0@0#0", 7)
    commands = driver.feed(MessageArrived("a", WeightsFailed(0, "engine killed by SIGKILL")))
    assert [n for n, _ in sent(commands, PublishWeights)] == ["a"]
    assert driver.core.table.counters.responses_moved == 2
    [(_, generate)] = sent(driver.confirm("a", 0), Generate)
    assert [(r.response, r.prefix) for r in generate.requests] == [
        ("p0@0#0", ids(7)),
        ("p0@0#1", b""),
    ]


@pytest.mark.parametrize("last_words", [True, False])
def test_scores_and_tokens_that_come_after_the_end_change_nothing(last_words: bool):
    d = Driver()
    d.start("a")
    d.finish("p0@0#0")
    d.tokens("p0@0#1", 9, finish="stop")
    d.feed(NodeLeft("t", "disk full", ok=False) if last_words else DrainRequested("*", "down"))
    assert sent(d.score("p0@0#1"), TrainShard) == []
    assert sent(d.tokens("p1@0#0", 3), Generate) == []


def test_hello_with_impossible_slots_is_refused(driver: Driver):
    driver.start("a")
    [(_, refusal)] = sent(driver.join("b", slots=-1), Welcome)
    assert refusal.refused == "offers -1 slots and 1 roles"


def measured(driver: Driver, name: str, step_s: float = 0.5) -> None:
    """A round in which that node says a token every so often, and the others nothing."""
    for _ in range(3):
        driver.now += step_s
        for response in list(driver.core.fleet.nodes[name].running):
            driver.tokens(response, 9)


def test_who_joins_between_two_steps_is_expected_to_be_like_those_that_load():
    driver = Driver(num_steps=9)
    driver.start("a")
    measured(driver, "a")
    driver.finish_round()
    driver.publish(1)
    nodes = driver.core.fleet.nodes
    assert nodes["a"].state is NodeState.UPDATING
    driver.join("b")
    assert nodes["b"].speed.step_s(1) == pytest.approx(nodes["a"].speed.step_s(1), rel=0.2)


def test_who_got_no_work_is_expected_to_be_like_those_that_did():
    driver = Driver(num_steps=9)
    driver.start("a")
    driver.join("b")  # of which nothing is known, as of the other
    measured(driver, "a")
    driver.confirm("b", 0)
    nodes = driver.core.fleet.nodes
    assert nodes["b"].speed.step_s(1) == pytest.approx(nodes["a"].speed.step_s(1), rel=0.2)
