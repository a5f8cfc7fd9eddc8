"""Who wins a round: the shortest, whatever comes first; and when that is known."""

import random

import pytest

from lightrl.core.commands import CloseRound, ScoreResponse
from lightrl.core.events import MessageArrived, NodeLost
from lightrl.core.settings import Tail
from lightrl.messages.responses import Abort, Generate, ResponseTokens, TokenChunk
from lightrl.messages.training import TrainShard
from tests.core.conftest import Driver, ids, logprobs, of_kind, sent

LENGTHS = {"p0": (2, 6, 4), "p1": (9, 1, 8), "p2": (3, 5, 5)}  # finish at 4, 8 and 5 tokens


def length(name: str) -> int:
    return LENGTHS[name[:2]][int(name[-1])]


def race(**changes: object) -> Driver:
    """Three prompts with three responses each run; two of each are kept."""
    settings = {"tail": Tail(1.5, 1.5), "slots": 9, "foresight": False} | changes
    d = Driver(**settings)
    d.start("a")
    return d


def pair(**changes: object) -> Driver:
    """Three prompts with one response each run; two are kept."""
    return race(**{"tail": Tail(1.5, 1.0), "group_size": 1} | changes)


def run_to(d: Driver, response: str, num_tokens: int, finish: str | None = None) -> list:
    """All tokens up to this number in one chunk; a score if that is its end."""
    commands = d.tokens(response, *[9] * (num_tokens - len(d.held(response).tokens)), finish=finish)
    if finish is not None and of_kind(commands, ScoreResponse):
        commands += d.score(response)
    return commands


def accepted(d: Driver) -> list[str]:
    return [r.id for g in d.round.accepted for r in g.kept]


@pytest.mark.parametrize("seed", range(30))
def test_the_shortest_win_whatever_the_order_in_which_they_arrive(seed: int):
    d = race(deterministic=True)
    names = random.Random(seed).sample(d.running(), 9)
    for name in names:
        if d.held(name).state == "running":
            run_to(d, name, length(name), "stop")
    assert d.round.state == "closed"
    assert accepted(d) == ["p0@0#0", "p0@0#2", "p2@0#0", "p2@0#1"]


@pytest.mark.parametrize("order", [list, lambda names: names[::-1]])
def test_lock_step_decoding_gives_the_same_winners(order):
    d = race(deterministic=True)
    d.decode(length, order=order)
    assert accepted(d) == ["p0@0#0", "p0@0#2", "p2@0#0", "p2@0#1"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_of_responses_of_one_length_the_first_of_the_group_win(order: tuple[int, int, int]):
    d = race(prompts_per_step=1, tail=Tail(1.0, 1.5))
    for index in order:
        run_to(d, f"p0@0#{index}", 3, "stop")
    assert accepted(d) == ["p0@0#0", "p0@0#1"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (2, 0, 1)])
def test_of_groups_that_finish_together_the_first_drawn_win(order: tuple[int, int, int]):
    d = pair()
    for position in order:
        run_to(d, f"p{position}@0#0", 3, "stop")
    assert sorted(accepted(d)) == ["p0@0#0", "p1@0#0"]


def test_sibling_is_aborted_with_the_token_at_which_it_has_lost_and_not_before():
    d = race()
    run_to(d, "p0@0#0", 2, "stop")
    run_to(d, "p0@0#1", 4, "stop")
    assert sent(run_to(d, "p0@0#2", 3), Abort) == []
    assert sent(run_to(d, "p0@0#2", 4), Abort) == [("a", Abort((("p0@0#2", 1),)))]


def test_sibling_that_has_too_many_tokens_already_is_aborted_when_the_others_are_scored():
    d = race()
    run_to(d, "p0@0#2", 5)
    run_to(d, "p0@0#0", 2, "stop")
    d.tokens("p0@0#1", 9, 9, 9, finish="stop")
    assert d.held("p0@0#2").state == "running"  # the other may get no score
    assert sent(d.score("p0@0#1"), Abort) == [("a", Abort((("p0@0#2", 1),)))]


def test_response_that_ends_behind_those_kept_is_not_even_scored():
    d = race()
    run_to(d, "p0@0#0", 2, "stop")
    run_to(d, "p0@0#1", 4, "stop")
    assert of_kind(d.tokens("p0@0#2", 9, 9, 9, 9, finish="stop"), ScoreResponse) == []


def test_response_that_ends_before_one_that_was_ahead_takes_its_place():
    d = race()
    run_to(d, "p0@0#1", 4, "stop")
    run_to(d, "p0@0#2", 6, "stop")
    run_to(d, "p0@0#0", 4, "stop")
    assert [r.id for r in d.round.groups["p0@0"].kept] == ["p0@0#0", "p0@0#1"]


def test_group_is_aborted_with_the_token_at_which_it_is_behind_the_cut_and_not_before():
    d = pair()
    run_to(d, "p0@0#0", 2, "stop")
    run_to(d, "p1@0#0", 5, "stop")
    assert sent(run_to(d, "p2@0#0", 4), Abort) == []
    closing = run_to(d, "p2@0#0", 5)
    assert sent(closing, Abort) == [("a", Abort((("p2@0#0", 1),)))]
    assert d.round.groups["p2@0"].state == "deferred"


def test_siblings_of_a_response_behind_the_cut_are_aborted_too_when_all_of_them_are_needed():
    d = race(tail=Tail(1.5, 1.0))
    run_to(d, "p2@0#0", 7)
    run_to(d, "p2@0#1", 1)
    run_to(d, "p0@0#0", 1, "stop")
    run_to(d, "p0@0#1", 2, "stop")
    run_to(d, "p1@0#0", 3, "stop")
    closing = run_to(d, "p1@0#1", 4, "stop")
    assert [a.attempts[0][0] for _, a in sent(closing, Abort)] == ["p2@0#0", "p2@0#1"]
    assert d.round.state == "closed"


def test_siblings_go_on_while_one_more_than_is_needed_may_be_behind_the_cut():
    d = race(prompts_per_step=1, tail=Tail(2.0, 1.5))
    run_to(d, "p1@0#0", 7)
    run_to(d, "p0@0#0", 3, "stop")
    run_to(d, "p0@0#1", 4, "stop")
    aborts = sent(run_to(d, "p0@0#2", 4), Abort)
    assert [a.attempts[0][0] for _, a in aborts] == ["p0@0#2", "p1@0#0"]
    assert [d.held(f"p1@0#{k}").state for k in (1, 2)] == ["running", "running"]
    assert d.round.cut == 4


def test_loser_that_waits_for_a_slot_is_never_started_again():
    d = pair()
    run_to(d, "p2@0#0", 5)
    run_to(d, "p0@0#0", 2, "stop")
    d.tokens("p1@0#0", 9, 9, 9, 9, finish="stop")
    d.feed(NodeLost("a", "gone"))
    d.score("p1@0#0")
    assert (d.held("p2@0#0").state, d.round.state) == ("aborted", "closed")
    d.join("b")
    assert sent(d.confirm("b", 0), Generate) == []


def test_loser_whose_node_gives_it_up_is_not_started_elsewhere():
    d = race()
    run_to(d, "p0@0#0", 2, "stop")
    run_to(d, "p0@0#1", 4, "stop")
    assert sent(run_to(d, "p0@0#2", 5, "abort"), Generate) == []
    assert d.held("p0@0#2").state == "aborted"


def test_rewards_of_the_surplus_are_not_trained():
    d = race(prompts_per_step=1, tail=Tail(1.0, 1.5))
    commands = []
    for index, (n, reward) in enumerate([(5, 1.0), (1, 0.0), (2, 0.5)]):
        d.tokens(f"p0@0#{index}", *[9] * n, finish="stop")
        commands += d.score(f"p0@0#{index}", reward)
    [group] = [g for _, s in sent(commands, TrainShard) for g in s.groups]
    assert [(r.response, r.reward) for r in group.responses] == [("p0@0#1", 0.0), ("p0@0#2", 0.5)]


def test_response_without_a_reward_has_not_finished():
    d = race(prompts_per_step=1, tail=Tail(1.0, 1.5))
    d.finish("p0@0#0", None)
    run_to(d, "p0@0#1", 4, "stop")
    assert d.held("p0@0#2").state == "running"
    run_to(d, "p0@0#2", 9, "stop")
    assert accepted(d) == ["p0@0#1", "p0@0#2"]


@pytest.mark.parametrize("early", [True, False])
def test_group_with_too_few_rewards_is_put_off_whether_that_is_known_before_or_after_the_cut(
    early: bool,
):
    d = pair()
    d.tokens("p2@0#0", *[9] * 6, finish="stop")
    if early:
        d.score("p2@0#0", None)
    run_to(d, "p0@0#0", 1, "stop")
    run_to(d, "p1@0#0", 2, "stop")
    assert d.round.state == "closed"
    assert [p.prompt.id for p in d.core.backlog.deferred] == ["p2"]


def test_clock_race_is_won_by_who_is_scored_first_however_long():
    d = race(tail=Tail(1.5, 1.5, race="clock"))
    for name in ("p2@0#0", "p2@0#2", "p1@0#0", "p1@0#2"):
        run_to(d, name, 9, "stop")
    assert d.round.state == "closed"
    assert accepted(d) == ["p2@0#0", "p2@0#2", "p1@0#0", "p1@0#2"]


def test_group_streams_to_the_trainer_at_once_when_too_few_others_can_come_before_it():
    d = pair()
    run_to(d, "p1@0#0", 3)
    [(_, shard)] = sent(run_to(d, "p0@0#0", 3, "stop"), TrainShard)
    assert [g.group for g in shard.groups] == ["p0@0"]
    assert (d.round.state, shard.last) == ("running", False)


def test_group_waits_while_enough_others_could_still_come_before_it():
    d = pair()
    run_to(d, "p1@0#0", 1)
    assert sent(run_to(d, "p0@0#0", 3, "stop"), TrainShard) == []  # p1 could finish at 2, p2 at 1
    [(_, shard)] = sent(run_to(d, "p2@0#0", 2, "stop"), TrainShard)
    assert [g.group for g in shard.groups] == ["p2@0"]
    shards = sent(run_to(d, "p1@0#0", 3), TrainShard)
    assert [g.group for _, s in shards for g in s.groups] == ["p0@0"]


@pytest.mark.parametrize("seed", range(40))
def test_acceptance_before_the_end_of_a_round_is_never_wrong(seed: int):
    """Winners by definition: no response is stopped, all lengths are known."""
    rng = random.Random(seed)
    d = race(tail=Tail(2.0, 1.5), slots=99, prompts_per_step=3)
    n = {name: rng.randint(1, 9) for name in d.running()}
    finish = {g.id: sorted(n[r.id] for r in g.responses)[1] for g in d.round.groups.values()}
    won = sorted(finish, key=lambda g: (finish[g], d.round.groups[g].position))[:3]
    while d.round.state == "running":
        name = rng.choice(d.running())
        tokens = min(n[name], len(d.held(name).tokens) + 2)
        run_to(d, name, tokens, "stop" if tokens == n[name] else None)
        assert {g.id for g in d.round.accepted} <= set(won)
    assert {g.id for g in d.round.accepted} == set(won)


def test_groups_that_are_decided_by_one_chunk_are_judged_together():
    d = race(prompts_per_step=1, group_size=1, tail=Tail(2.0, 2.0))
    run_to(d, "p0@0#0", 3, "stop")
    run_to(d, "p1@0#0", 5, "stop")
    run_to(d, "p0@0#1", 2)
    run_to(d, "p1@0#1", 4)
    items = [ResponseTokens(f"p{i}@0#1", 1, n, ids(9), logprobs(1)) for i, n in ((0, 2), (1, 4))]
    d.feed(MessageArrived("a", TokenChunk(0, "digest-0", tuple(items))))
    assert accepted(d) == ["p0@0#0"]


def test_deterministic_race_sends_its_winners_in_the_order_of_their_prompts():
    d = pair(deterministic=True)
    early = run_to(d, "p2@0#0", 1, "stop") + run_to(d, "p0@0#0", 3, "stop")
    assert sent(early, TrainShard) == []
    shards = sent(run_to(d, "p1@0#0", 3), TrainShard)
    assert [g.group for _, s in shards for g in s.groups] == ["p0@0", "p2@0"]


def test_deterministic_round_without_a_race_streams_as_far_as_it_is_complete_in_order():
    d = Driver(deterministic=True, prompts_per_step=3, group_size=1)
    d.start("a")
    assert sent(d.finish("p1@0#0"), TrainShard) == []
    [(_, shard)] = sent(d.finish("p0@0#0"), TrainShard)
    assert [g.group for g in shard.groups] == ["p0@0", "p1@0"]


def test_closed_round_tells_what_was_put_off_and_what_was_aborted_with_its_tokens():
    d = race()
    [closed] = of_kind(d.decode(length), CloseRound)
    assert [str(g.state) for g in closed.round.groups.values()] == [
        "accepted",
        "deferred",
        "accepted",
    ]
    aborted = {
        r.id: len(r.tokens)
        for g in closed.round.groups.values()
        for r in g.responses
        if r.state == "aborted"
    }
    assert aborted == {"p0@0#1": 4, "p1@0#0": 5, "p1@0#2": 5}
    assert d.core.table.counters.aborted_tokens == 4 + 5 + 1 + 5 + 5
    assert closed.round.cut == closed.round.finishing_tokens == 5
