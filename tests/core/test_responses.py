"""What becomes of tokens and scores: fencing, overlaps, holes, bad peers, failed rewards."""

import math
from array import array
from typing import Any

import pytest

from lightrl.core.commands import CloseRound, Report, ScoreResponse
from lightrl.core.events import MessageArrived, NodeLost
from lightrl.core.rounds.rounds import sample_seed
from lightrl.messages.responses import Abort, Generate, ResponseTokens, TokenChunk
from lightrl.messages.training import TrainShard
from tests.core.conftest import Driver, ids, of_kind, sent


def test_overlapping_chunk_is_trimmed(driver: Driver):
    driver.start("a", slots=1)
    driver.tokens("p0@0#0", 3, 4)
    driver.tokens("p0@0#0", 4, 5, offset=1)
    assert list(driver.core.table.responses["p0@0#0"].tokens) == [3, 4, 5]


def test_tokens_of_a_node_where_the_response_does_not_run_are_ignored(driver: Driver):
    driver.start("a", "b", slots=2)
    driver.tokens("p0@0#0", 3, node="b" if driver.requests["p0@0#0"][0] == "a" else "a")
    assert len(driver.held("p0@0#0").tokens) == 0
    assert driver.core.table.counters.chunks_ignored == 1


def test_hole_gives_the_attempt_up_and_resumes_from_what_is_held(driver: Driver):
    driver.start("a", slots=1)
    driver.tokens("p0@0#0", 3)
    commands = driver.tokens("p0@0#0", 9, offset=5)
    assert sent(commands, Abort) == [("a", Abort((("p0@0#0", 1),)))]
    [(_, generate)] = sent(commands, Generate)
    assert (generate.requests[0].attempt, generate.requests[0].prefix) == (2, ids(3))


def test_response_that_the_engine_gave_up_is_resumed(driver: Driver):
    driver.start("a", slots=1)
    [(_, generate)] = sent(driver.tokens("p0@0#0", 3, finish="abort"), Generate)
    assert (generate.requests[0].response, generate.requests[0].prefix) == ("p0@0#0", ids(3))


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        ({"version": 3}, "unconfirmed digest"),
        ({"offset": -1}, "malformed"),
        ({"token_id": 100}, "outside the vocabulary"),
        ({"token_id": -1}, "outside the vocabulary"),
    ],
)
def test_peer_that_breaks_the_protocol_is_lost_and_its_tokens_are_not_taken(
    driver: Driver, chunk: dict[str, int], why: str
):
    driver.start("a", slots=1)
    commands = driver.tokens("p0@0#0", chunk.pop("token_id", 7), **chunk)
    assert any(why in report.text for report in of_kind(commands, Report))
    assert "a" not in driver.core.fleet.nodes
    assert len(driver.core.table.responses["p0@0#0"].tokens) == 0
    assert driver.core.table.counters.bad_chunks == 1


def test_logprob_that_is_not_finite_loses_the_peer(driver: Driver):
    driver.start("a", slots=1)
    item = ResponseTokens("p0@0#0", 1, 0, ids(7), array("f", [math.nan]).tobytes())
    driver.feed(MessageArrived("a", TokenChunk(0, "digest-0", (item,))))
    assert "a" not in driver.core.fleet.nodes


def test_more_tokens_than_allowed_lose_the_peer(driver: Driver):
    driver.start("a", slots=1)
    driver.tokens("p0@0#0", *range(11))
    assert "a" not in driver.core.fleet.nodes


def test_finished_response_is_scored_once_and_a_second_score_changes_nothing(driver: Driver):
    driver.start("a")
    [score] = of_kind(driver.tokens("p0@0#0", 9, finish="stop"), ScoreResponse)
    assert (score.response.id, score.prompt, score.source) == ("p0@0#0", "p0", "train")
    driver.score("p0@0#0", 1.0)
    driver.score("p0@0#0", 0.0)
    assert driver.core.table.responses["p0@0#0"].reward == 1.0


def test_score_of_a_response_that_still_runs_is_ignored(driver: Driver):
    driver.start("a")
    driver.score("p0@0#0", 1.0)
    assert not driver.core.table.responses["p0@0#0"].scored


def test_unscored_response_drops_its_group_and_the_step_goes_on_with_the_rest(driver: Driver):
    driver.start("a")
    driver.tokens("p0@0#1", 4)
    commands = driver.finish("p0@0#0", None)
    assert sent(commands, Abort) == [("a", Abort((("p0@0#1", 1),)))]
    closing = driver.finish_round()
    [closed] = of_kind(closing, CloseRound)
    assert {g.id: str(g.state) for g in closed.round.groups.values()} == {
        "p0@0": "dropped",
        "p1@0": "accepted",
    }
    last = sent(closing, TrainShard)[-1][1]
    assert (last.last, last.num_groups) == (True, 1)
    assert driver.core.table.counters.groups_dropped == 1
    assert driver.core.table.counters.aborted_tokens == 2


def test_unscored_response_gets_the_configured_reward_instead():
    d = Driver(reward_on_failure=-1.0)
    d.start("a")
    d.finish("p0@0#0", None)
    [(_, shard)] = sent(d.finish("p0@0#1", 1.0), TrainShard)
    assert [r.reward for r in shard.groups[0].responses] == [-1.0, 1.0]


def skipping(**changes: Any) -> Driver:
    return Driver(prompts_per_step=1, group_size=3, skips_unscored=True, **changes)


def test_siblings_of_a_skipped_response_are_trained_without_it():
    d = skipping()
    d.start("a")
    assert not sent(d.finish("p0@0#1", None), Abort)
    d.finish("p0@0#0", 1.0)
    shards = sent(d.finish("p0@0#2", 0.0), TrainShard)
    [group] = [g for _, shard in shards for g in shard.groups]
    assert [(r.response, r.reward) for r in group.responses] == [("p0@0#0", 1.0), ("p0@0#2", 0.0)]
    d.train(0)
    d.confirm("a", 1)
    counters = d.core.table.counters
    assert (counters.trained_responses, counters.rewards_failed) == (2, 1)
    assert (counters.groups_trained, counters.groups_dropped) == (1, 0)


@pytest.mark.parametrize(("group_size", "state"), [(3, "dropped"), (2, "dropped"), (1, "accepted")])
def test_a_single_scored_response_is_trained_only_where_it_has_no_siblings(group_size, state):
    d = Driver(prompts_per_step=1, group_size=group_size, skips_unscored=True)
    d.start("a")
    for k in range(1, group_size):
        d.finish(f"p0@0#{k}", None)
    [closed] = of_kind(d.finish("p0@0#0", 1.0), CloseRound)
    assert [str(g.state) for g in closed.round.groups.values()] == [state]


def test_only_the_first_failure_of_a_round_is_told():
    d = skipping()
    d.start("a")
    told = [
        command.text
        for k in range(3)
        for command in of_kind(d.finish(f"p0@0#{k}", None), Report)
        if "no reward" in command.text
    ]
    assert told == ["no reward for p0@0#0: crashed"]


def test_step_whose_groups_are_all_dropped_is_still_a_step(driver: Driver):
    driver.start("a")
    driver.finish("p0@0#0", None)
    [(_, last)] = sent(driver.finish("p1@0#0", None), TrainShard)
    assert (last.last, last.groups, last.num_groups) == (True, (), 0)
    driver.train(0)
    driver.confirm("a", 1)
    assert driver.core.table.round is not None
    assert driver.core.table.round.step == 1


def test_no_node_holds_more_than_its_slots_and_the_rest_waits_for_credit(driver: Driver):
    driver.start("a", slots=3)
    assert len(driver.core.fleet.nodes["a"].running) == 3
    [(_, generate)] = sent(driver.finish("p0@0#0"), Generate)
    assert [r.response for r in generate.requests] == ["p1@0#1"]


def test_seed_of_a_response_depends_on_run_and_name_only():
    assert sample_seed(0, "p0@0#0") == sample_seed(0, "p0@0#0")
    seeds = {sample_seed(s, f"p{i}@0#{k}") for s in range(3) for i in range(50) for k in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert all(0 <= s < 2**63 for s in seeds)


def test_attempt_that_was_never_given_out_is_not_taken_up(driver: Driver):
    """Else the next placement, and every one after it, would have a number that no node can
    have."""
    attempt = 2**31 - 1
    driver.start("a", slots=1)  # p0@0#0 runs there; the others wait
    driver.feed(NodeLost("a", "gone"))
    claims = {"p0@0#0": attempt, "p0@0#1": attempt}
    commands = driver.join("evil", slots=4, serves=0, running=claims)
    assert set(driver.core.fleet.nodes["evil"].running) == set(driver.running())
    aborted = [a for _, m in sent(commands, Abort) for a in m.attempts]
    assert aborted == list(claims.items())
    assert [driver.held(name).attempt for name in claims] == [2, 1]  # placed there, by us


def test_finished_response_of_an_attempt_that_was_never_given_out_is_ignored(driver: Driver):
    attempt = 2**31 - 1
    driver.start("a", slots=1)
    driver.feed(NodeLost("a", "gone"))
    driver.join("evil", slots=0)
    driver.tokens("p0@0#0", 9, finish="stop", node="evil", attempt=attempt)
    assert (driver.held("p0@0#0").state, driver.held("p0@0#0").attempt) == ("queued", 1)
    assert driver.core.table.counters.chunks_ignored == 1


def test_a_response_that_is_queued_again_waits_once(driver: Driver):
    """What it was queued as before is skipped: nobody gets it twice."""
    driver.start("a", slots=1)
    queue = driver.core.table.queue
    waiting = queue.waiting()
    again = waiting[0]
    queue.push(again, resumed=True)
    assert len(queue.waiting()) == len(waiting)
    popped = [queue.pop() for _ in range(len(waiting) + 1)]
    assert popped[0] is again
    assert popped[-1] is None
    assert popped.count(again) == 1
    for response in waiting:
        queue.push(response)
