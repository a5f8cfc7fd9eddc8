"""A core made again from its journal goes on where the old one was, and nodes that lived on go on
with it."""

from dataclasses import replace

import pytest

from lightrl.core.commands import CloseRound, CloseStep, DrawPrompts, ScoreResponse
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import MessageArrived, NodeLost
from lightrl.core.log_entries import LogEntry, SnapshotBegan, TokensTaken
from lightrl.core.recovery import recover, take_snapshot
from lightrl.core.responses.responses import MAX_UNRECORDED
from lightrl.core.settings import Tail
from lightrl.errors import InvariantViolation, JournalError
from lightrl.messages.responses import Abort, Generate, ResponseTokens, TokenChunk
from lightrl.messages.training import TrainShard
from lightrl.messages.weights import PublishWeights
from tests.core.conftest import SETTINGS, Driver, ids, logprobs, of_kind, sent
from tests.core.test_worlds import settings
from tests.core.world import World
from tests.support import invariants


def test_running_responses_continue_from_their_tokens(driver: Driver):
    driver.start("a", slots=2)
    driver.tokens("p0@0#0", 7, 8)
    driver.restart()
    driver.join("t", "trainer")
    driver.publish(0)
    driver.join("b", slots=2)
    [(_, generate)] = sent(driver.confirm("b", 0), Generate)
    assert [(r.response, r.prefix, r.max_new_tokens) for r in generate.requests] == [
        ("p0@0#0", ids(7, 8), 8),
        ("p0@0#1", b"", 10),
    ]


def test_finished_response_is_scored_but_not_generated_again(driver: Driver):
    driver.start("a", slots=4)
    driver.finish("p0@0#0")
    driver.tokens("p0@0#1", 5, finish="stop")  # its score was not there yet
    commands = driver.restart()
    assert [c.response.id for c in of_kind(commands, ScoreResponse)] == ["p0@0#1"]
    driver.join("t", "trainer")
    driver.publish(0)
    driver.join("a", slots=4)
    [(_, generate)] = sent(driver.confirm("a", 0), Generate)
    assert [r.response for r in generate.requests] == ["p1@0#0", "p1@0#1"]
    assert of_kind(commands, DrawPrompts) == []


def test_a_step_that_was_open_is_timed_from_the_restart(driver: Driver):
    driver.start("a", slots=4)
    driver.now = 1000.0
    for _ in range(2):  # the second time from a snapshot
        driver.restart()
    driver.join("t", "trainer")
    driver.publish(0)
    driver.join("a", slots=4)
    driver.confirm("a", 0)
    driver.now = 1003.0
    driver.finish_round()
    [done] = of_kind(driver.next_step(), CloseStep)
    assert done.rollout_s == 3.0


def test_node_that_lived_on_is_ready_at_once_and_goes_on(driver: Driver):
    driver.start("a", slots=4)
    driver.tokens("p0@0#0", 7)
    running = dict.fromkeys(driver.running(), 1)
    driver.restart()
    commands = driver.join("a", slots=4, serves=0, running=running)
    assert sent(commands, Generate) == sent(commands, Abort) == sent(commands, PublishWeights) == []
    assert driver.running() == list(running)
    # It says again what it has sampled since its attempt began.
    driver.tokens("p0@0#0", 7, 8, 9, offset=0, node="a", attempt=1)
    assert list(driver.held("p0@0#0").tokens) == [7, 8, 9]


def test_what_nobody_wants_any_more_is_aborted(driver: Driver):
    driver.start("a", slots=4)
    driver.finish("p0@0#0")
    driver.restart()
    commands = driver.join("a", slots=4, serves=0, running={"p0@0#0": 1, "p0@0#1": 1, "old@0#0": 3})
    assert sent(commands, Abort) == [("a", Abort((("p0@0#0", 1), ("old@0#0", 3))))]
    [(_, generate)] = sent(commands, Generate)
    assert [r.response for r in generate.requests] == ["p1@0#0", "p1@0#1"]


def test_two_nodes_that_both_have_a_response_do_not_both_keep_it(driver: Driver):
    driver.start("a", slots=4)
    driver.restart()
    driver.join("a", slots=4, serves=0, running={"p0@0#0": 1})
    commands = driver.join("b", slots=4, serves=0, running={"p0@0#0": 2})
    assert sent(commands, Abort) == [("b", Abort((("p0@0#0", 2),)))]


def test_node_with_older_weights_gives_its_responses_back(driver: Driver):
    driver.start("a", slots=4)
    driver.finish_round()
    driver.train(0)
    driver.restart()
    driver.join("t", "trainer")
    driver.publish(1)
    commands = driver.join("a", slots=4, serves=0, running={"p0@0#0": 1})
    assert sent(commands, Abort) == [("a", Abort((("p0@0#0", 1),)))]
    assert [n for n, _ in sent(commands, PublishWeights)] == ["a"]


def test_attempt_of_a_round_that_put_the_prompt_off_is_not_taken_back():
    """Its tokens are those of older weights, though the response has the same name."""
    d = Driver(prompts_per_step=1, group_size=1, tail=Tail(2.0, 1.0), num_prompts=2)
    d.start("a", slots=4)
    d.finish("p0@0#0")
    d.tokens("p1@0#0", 3)  # it loses the race, and the node does not hear that it is to stop
    d.train(0)
    d.confirm("a", 1)
    assert (d.round.kind, list(d.round.groups)) == ("long", ["p1@0"])
    commands = d.join("a", slots=4, serves=1, running={"p1@0#0": 1})
    assert ("a", Abort((("p1@0#0", 1),))) in sent(commands, Abort)
    [(_, generate)] = sent(commands, Generate)
    assert [(r.response, r.attempt) for r in generate.requests] == [("p1@0#0", 3)]


def test_order_that_was_lost_with_the_connection_is_given_to_somebody(driver: Driver):
    driver.start("a", slots=2)
    commands = driver.join("a", slots=2, serves=0, running={"p0@0#0": 1})
    assert ("a", Abort((("p0@0#1", 1),))) in sent(commands, Abort)
    [(_, generate)] = sent(commands, Generate)
    assert [(r.response, r.attempt) for r in generate.requests] == [("p0@0#1", 2)]


def test_response_that_a_silent_node_finished_is_taken_when_it_comes_back(driver: Driver):
    driver.start("a", slots=4)
    driver.tokens("p0@0#0", 7)
    driver.feed(NodeLost("a", "silent"))
    driver.join("a", slots=4, serves=0, running={})
    driver.feed(NodeLost("a", "once more"))  # p0@0#0 waits, and is nowhere
    driver.join("a", slots=1, serves=0)
    waiting = next(r for r in driver.core.table.responses.values() if r.state == "queued")
    item = ResponseTokens(waiting.id, 1, 0, ids(7, 8), logprobs(2), "stop")
    commands = driver.feed(MessageArrived("a", TokenChunk(0, "digest-0", (item,))))
    assert [c.response.id for c in of_kind(commands, ScoreResponse)] == [waiting.id]
    assert list(waiting.tokens) == [7, 8]


def test_what_a_silent_node_finished_under_older_weights_is_ignored_and_costs_it_nothing():
    d = Driver(prompts_per_step=1, group_size=1, tail=Tail(2.0, 1.0), num_prompts=2)
    d.start("a", slots=4)
    d.finish("p0@0#0")
    d.tokens("p1@0#0", 3)  # it loses the race, and the node does not hear that it is to stop
    d.train(0)
    d.join("b", slots=4)
    d.confirm("b", 1)
    d.feed(NodeLost("b", "killed"))
    waiting = d.held("p1@0#0")  # in the long round, where its attempts go on
    assert (d.round.kind, waiting.state, waiting.attempt > 1) == ("long", "queued", True)
    item = ResponseTokens(waiting.id, 1, 0, ids(7, 8), logprobs(2), "stop")
    d.feed(MessageArrived("a", TokenChunk(0, "digest-0", (item,))))
    assert (list(waiting.tokens), d.core.table.counters.chunks_ignored) == ([], 1)
    assert "a" in d.core.fleet.nodes


def test_what_a_silent_node_finished_is_refused_if_others_went_on_differently():
    """In asynchronous mode another node may have gone on with newer weights meanwhile."""
    d = Driver(max_staleness=1, prompts_per_step=1, group_size=1)
    d.start("a", slots=1)
    d.tokens("p0@0#0", 7)
    d.feed(NodeLost("a", "silent"))
    d.join("b", slots=1)
    d.confirm("b", 0)
    d.tokens("p0@0#0", 50, 51)
    d.feed(NodeLost("b", "killed"))
    d.join("a", slots=1, serves=0)
    d.feed(NodeLost("a", "again"))
    d.join("a", slots=1, incarnation=2)
    spliced = ResponseTokens("p0@0#0", 1, 0, ids(7, 20, 21, 22), logprobs(4), "stop")
    d.feed(MessageArrived("a", TokenChunk(0, "digest-0", (spliced,))))
    held = d.held("p0@0#0")
    assert (list(held.tokens), held.state) == ([7, 50, 51], "queued")


def test_tokens_of_an_older_version_behind_a_newer_one_are_restated_in_their_order():
    d = Driver(max_staleness=1, prompts_per_step=1, group_size=1, num_steps=9)
    d.start("a", "b", slots=2)
    name = "p1@0#0"  # of the round of step 1, begun before its version
    d.tokens(name, 5)
    d.finish("p0@0#0")
    d.train(0)
    where = d.held(name).node
    assert where is not None
    d.feed(NodeLost(where.name, "gone"))
    d.join("c", slots=2)
    d.confirm("c", 1)
    d.tokens(name, 6, node="c", attempt=d.held(name).attempt, version=1)
    d.tokens(name, 7, node="c", attempt=d.held(name).attempt, version=0)
    assert d.held(name).starts == [(0, 0), (1, 1), (0, 2)]
    again = Coordinator(d.core.settings, 0.0)
    recover(again, take_snapshot(d.core), 0.0)
    assert again.table.responses[name].starts == [(0, 0), (1, 1), (0, 2)]
    assert list(again.table.responses[name].tokens) == [5, 6, 7]


def test_run_cannot_be_resumed_to_end_before_it_is():
    d = Driver(num_steps=9)
    d.start("a", slots=99)
    d.play(lambda name: 2, rounds=3)  # and the fourth is open
    with pytest.raises(JournalError, match="= 3: the run has begun step 4 already"):
        recover(Coordinator(replace(d.core.settings, num_steps=3), 0.0), d.segment, 0.0)


def test_closed_round_reaches_the_trainer_once_it_is_back(driver: Driver):
    driver.start("a", slots=4)
    driver.finish_round()
    commands = driver.restart()
    # for whoever keeps the figures
    assert [c.round.step for c in of_kind(commands, CloseRound)] == [0]
    driver.join("t", "trainer")
    [(_, shard)] = sent(driver.publish(0), TrainShard)
    assert (shard.index, shard.last, shard.num_groups) == (0, True, 2)


def test_what_was_not_written_is_asked_for_again(driver: Driver):
    driver.start("a", slots=4)
    commands = driver.restart(lost=1)  # PromptsDrawn
    assert of_kind(commands, DrawPrompts) == [DrawPrompts("train", 2)]
    assert list(driver.round.groups) == ["p0@0", "p1@0"]


def test_time_of_a_step_counts_from_the_restart(driver: Driver):
    driver.start("a", slots=4)
    driver.tokens("p0@0#0", 7, 8)
    again = Coordinator(driver.core.settings, 0.0)
    recover(again, list(take_snapshot(driver.core)), 5000.0)
    assert again.steps.step_began == 5000.0


@pytest.mark.parametrize("tail", [Tail(), Tail(2.0, 1.5)])
def test_restated_core_is_the_same_core(tail: Tail):
    d = Driver(tail=tail, num_prompts=7, num_steps=5)
    d.start("a", slots=99)
    d.play(lambda name: 1 + sum(map(ord, name)) % 9, rounds=2)
    d.tokens(d.running()[0], 5, 6)
    before = list(take_snapshot(d.core))
    again = Coordinator(d.core.settings, 0.0)
    recover(again, before, 0.0)
    invariants.check(again)
    assert plain(list(take_snapshot(again))) == plain(before)


@pytest.mark.parametrize("seed", range(40))
def test_where_a_run_stood_stays_the_same_whatever_happens_before_it_is_written(seed: int):
    world = World(seed, **settings(seed, max_staleness=seed % 3)).live(60)
    standing, told = take_snapshot(world.core), list(take_snapshot(world.core))
    facts, begun = iter(standing), [next(iter(standing))]
    next(facts)
    for fact in facts:  # a piece now and then
        begun.append(fact)
        world.live(5)
    world.live(40)
    assert begun == told
    assert list(standing) == told


def test_long_responses_are_told_in_pieces(monkeypatch):
    monkeypatch.setattr("lightrl.core.recovery.MAX_ENTRY_TOKENS", 4)
    d = Driver()
    d.start("a", slots=4)
    for name in d.running():
        d.tokens(name, 5, 6, 7)
    told = [f for f in take_snapshot(d.core) if isinstance(f, TokensTaken)]
    assert [[i.response for i in f.items] for f in told] == [
        ["p0@0#0", "p0@0#1"],
        ["p1@0#0", "p1@0#1"],
    ]


def plain(facts: list[LogEntry]) -> list[LogEntry]:
    return [
        replace(f, items=tuple(sorted(f.items, key=lambda i: i.response)))
        if isinstance(f, TokensTaken)
        else f
        for f in facts
    ]


def test_score_that_came_too_late_still_does():
    d = Driver(tail=Tail(1.0, 2.0, race="clock"), group_size=1)
    d.start("a", slots=99)
    d.tokens("p0@0#0", 5, finish="stop")
    d.finish("p0@0#1")  # first by the clock
    d.score("p0@0#0")
    again = Coordinator(d.core.settings, 0.0)
    recover(again, take_snapshot(d.core), 0.0)
    assert again.table.round is not None
    assert [r.id for r in again.table.round.groups["p0@0"].kept] == ["p0@0#1"]


def test_facts_with_a_hole_are_refused_not_guessed():
    d = Driver()
    d.start("a")
    hole = TokensTaken(0, (ResponseTokens("p0@0#0", 1, 3, ids(1), logprobs(1)),))
    with pytest.raises(InvariantViolation, match="tokens 0 to 3 are not in the journal"):
        recover(Coordinator(SETTINGS, 0.0), [*d.segment, hole], 0.0)


def test_counters_and_lengths_survive():
    d = Driver()
    d.start("a")
    d.play(lambda name: 3, rounds=1)
    d.restart()
    [stood] = [f for f in d.segment if isinstance(f, SnapshotBegan)]
    assert (stood.counters.groups_trained, stood.counters.rollout_tokens) == (2, 12)
    assert stood.memory.finished == {"p0": 3, "p1": 3}


def test_attempts_given_out_before_a_restart_are_taken_up_if_there_can_have_been_so_many(
    driver: Driver,
):
    """Placements are not in the journal: of those without tokens a coordinator made from it knows
    nothing."""
    driver.start("a", slots=4)
    driver.restart()
    driver.join("t", "trainer")
    driver.publish(0)
    most = MAX_UNRECORDED
    driver.join(
        "a", slots=4, serves=0, running={"p0@0#0": most, "p0@0#1": most + 1, "p1@0#0": 2**31 - 1}
    )
    attempts = {r.id: r.attempt for r in driver.core.fleet.nodes["a"].running.values()}
    assert attempts == {"p0@0#0": most, "p0@0#1": 1, "p1@0#0": 1, "p1@0#1": 1}
