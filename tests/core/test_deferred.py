"""Responses of groups that were put off go on in a later round from the tokens that they have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightrl.core.commands import CloseRound, ScoreResponse
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import NodeLost
from lightrl.core.log_entries import LogEntry, TokensTaken
from lightrl.core.recovery import recover, take_snapshot
from lightrl.core.settings import Tail
from lightrl.core.state import Round
from lightrl.journal.codec import LOG
from lightrl.journal.merge import merge
from lightrl.messages.responses import Generate
from lightrl.messages.training import TrainShard
from tests.core.conftest import Driver, ids, of_kind, sent
from tests.core.test_worlds import check_against_oracle, check_end, settings, sharing
from tests.core.world import MAX_TOKENS, World
from tests.support import invariants
from tests.support.tiers import e2e


def deferred(
    eta_responses: float = 1.0, race: Any = "tokens", how: Any = "continue", **changes: Any
) -> Driver:
    """One prompt a step, of two that are launched; p0 wins."""
    tail = Tail(2.0, eta_responses, race, how)
    fixed = {"prompts_per_step": 1, "num_steps": 6, "slots": 99, "foresight": False}
    d = Driver(tail=tail, **fixed | changes)
    d.start("a")
    return d


def lose(d: Driver) -> None:
    """p1 loses with a finished response that has its score, and one that goes on."""
    d.tokens("p1@0#0", 5, 5)
    d.finish("p1@0#0", 0.25)
    d.tokens("p1@0#1", 6, 6, 6)
    d.finish("p0@0#0")
    d.finish("p0@0#1", 0.0)
    assert [p.prompt.id for p in d.core.backlog.deferred] == ["p1"]


def kept_of(commands: list, step: int) -> list[tuple[str, bytes, float, int]]:
    """(response, tokens, reward, tokens of older versions) of the shards of a step."""
    shards = [s for _, s in sent(commands, TrainShard) if s.step == step]
    responses = [r for s in shards for g in s.groups for r in g.responses]
    return [(r.response, r.token_ids, r.reward, r.num_stale) for r in responses]


@pytest.mark.parametrize("restarts", [(), ("deferred",), ("open",), ("deferred", "open")])
def test_a_response_goes_on_from_its_tokens_and_finished_siblings_are_kept(restarts):
    d = deferred()
    lose(d)
    if "deferred" in restarts:
        d.restart()
        d.join("t", "trainer")
        d.publish(0)
        d.join("a", slots=99, serves=0)
    commands = d.next_step()
    assert (d.round.kind, list(d.round.groups)) == ("long", ["p1@0"])
    [(_, generate)] = sent(commands, Generate)
    [request] = generate.requests
    assert (request.response, request.prefix, request.max_new_tokens) == ("p1@0#1", ids(6, 6, 6), 7)
    assert of_kind(commands, ScoreResponse) == []
    if "open" in restarts:
        d.restart()
        d.join("t", "trainer")
        d.publish(1)
        d.join("a", slots=99, serves=1, running={"p1@0#1": request.attempt})
    response = d.held("p1@0#1")
    assert (response.carried, d.held("p1@0#0").carried) == (3, 3)
    commands = d.tokens("p1@0#1", 8, 8, finish="stop") + d.score("p1@0#1", 1.0)
    assert response.spans == [(0, 3), (1, 2)]
    assert kept_of(commands, 1) == [
        ("p1@0#0", ids(5, 5, 9), 0.25, 3),
        ("p1@0#1", ids(6, 6, 6, 8, 8), 1.0, 3),
    ]
    assert d.core.table.counters.aborted_tokens == 0
    assert d.core.table.counters.rollout_tokens == 2 + 3 + 3 + 2


def test_restarted_ones_begin_from_nothing():
    d = deferred(how="restart")
    lose(d)
    [(_, generate)] = sent(d.next_step(), Generate)
    assert [(r.response, r.prefix) for r in generate.requests] == [("p1@0#0", b""), ("p1@0#1", b"")]
    assert [held.tokens for held in d.round.groups["p1@0"].held] == [ids(5, 5, 9), ids(6, 6, 6)]
    assert d.core.table.counters.aborted_tokens == 6


def test_a_response_without_a_score_is_scored_again_under_a_new_attempt():
    """A result of the first request may still come, and counts for nothing."""
    d = deferred()
    d.tokens("p1@0#0", 5, finish="stop")
    d.tokens("p1@0#1", 5, 6)
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    d.score("p1@0#0", 0.5)  # too late
    [again] = of_kind(d.next_step(), ScoreResponse)
    assert (again.response.id, again.response.attempt) == ("p1@0#0", 2)
    d.score("p1@0#0", 0.0, attempt=1)
    assert not d.held("p1@0#0").scored
    d.score("p1@0#0", 1.0)
    assert d.held("p1@0#0").reward == 1.0


def test_a_group_that_was_finished_but_for_the_race_is_trained_without_another_token():
    d = deferred(race="clock")
    d.tokens("p1@0#0", 5, finish="stop")
    d.finish("p1@0#1")
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    commands = d.next_step() + d.score("p1@0#0", 0.5)
    [closed] = of_kind(commands, CloseRound)
    assert (closed.round.kind, sent(commands, Generate)) == ("long", [])
    assert [r.id for r in closed.round.accepted[0].kept] == ["p1@0#0", "p1@0#1"]
    d.next_step()
    assert d.core.step == 2


def test_a_response_at_its_limit_needs_no_further_token():
    """A node that sends the last token in one message and the end in the next may be cut off
    between them."""
    d = deferred()
    d.tokens("p1@0#0", *[5] * 10)
    d.tokens("p1@0#1", 6)
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    commands = d.next_step()
    assert [c.response.id for c in of_kind(commands, ScoreResponse)] == ["p1@0#0"]
    assert d.held("p1@0#0").finish_reason == "length"
    [(_, generate)] = sent(commands, Generate)
    assert [r.response for r in generate.requests] == ["p1@0#1"]


def test_of_a_surplus_of_responses_the_first_by_number_go_on_however_long_they_are():
    """The shortest would be a selection."""
    d = deferred(eta_responses=1.5)
    d.tokens("p1@0#0", *[5] * 6)
    d.tokens("p1@0#1", *[5] * 7)
    d.finish("p1@0#2")
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    d.tokens("p0@0#2", 9)
    [(_, generate)] = sent(d.next_step(), Generate)
    assert [(r.response, len(r.prefix)) for r in generate.requests] == [
        ("p1@0#0", 24),
        ("p1@0#1", 28),
    ]
    assert d.core.table.counters.aborted_tokens == 1 + 1  # the surplus of both prompts


def test_tokens_that_are_older_than_an_asynchronous_run_allows_are_trained_if_they_were_put_off():
    d = deferred(max_staleness=1, num_prompts=99)
    lose(d)
    closed: list[Round] = []
    while not any(r.kind == "long" for r in closed):
        closed += d.play(lambda name: 10, rounds=1)
    [long] = [r for r in closed if r.kind == "long"]
    assert [r.spans[0] for r in long.accepted[0].kept] == [(0, 3), (0, 3)]
    assert long.accepted[0].since == 0


def test_what_waits_survives_many_restarts_in_a_journal_that_is_read_merged():
    d = deferred()
    lose(d)
    d.next_step()
    d.tokens("p1@0#1", 8)
    before = list(take_snapshot(d.core))
    encoded = [LOG.packed.decode(LOG.encode(entry)) for entry in before]
    again = Coordinator(d.core.settings, 0.0)
    recover(again, merge(encoded), 0.0)
    invariants.check(again)
    assert plain(take_snapshot(again)) == plain(before)
    held = again.table.responses["p1@0#1"]
    assert (held.carried, held.num_new, held.spans) == (3, 1, [(0, 3), (1, 1)])


def plain(entries) -> list[LogEntry]:
    return [
        replace(e, items=tuple(sorted(e.items, key=lambda i: i.response)))
        if isinstance(e, TokensTaken)
        else e
        for e in entries
    ]


class LongWorld(World):
    """Of responses that differ more in length, so that many are in the middle when they lose."""

    def length_of(self, response: str) -> int:
        sets, name = self.core.settings.eval_sets, response.partition("/")[0]
        n = 1 + self.dice("length", response) % MAX_TOKENS
        return min([n, *(s.max_response_tokens for s in sets if s.name == name)])


@pytest.mark.parametrize("kind", [settings, *e2e([sharing])])
@pytest.mark.parametrize(
    "seeds", [range(5000, 5020), *e2e(range(5000 + 20 * k, 5020 + 20 * k) for k in (1, 2))]
)
def test_worlds_that_continue_train_what_the_oracle_says(
    kind: Callable[..., dict[str, Any]], seeds: range
):
    """Nodes, trainers and coordinators that die; draining; evaluations; shared devices."""
    num_continued = 0
    for seed in seeds:
        tail = Tail(2.0, 1.0 + seed % 2 / 2, "tokens", "continue")
        changes = {"tail": tail, "prompts_per_step": 2, "group_size": 2, "num_prompts": 9}
        changes |= {"num_steps": 6, "reward_on_failure": 0.0}
        world = LongWorld(seed, reads_slowly=seed % 5 == 0, **kind(seed) | changes)
        world.live(200).heal()
        check_end(world)
        check_against_oracle(world)
        num_continued += world.num_continued
    assert num_continued > 10


def test_a_node_that_is_lost_in_the_long_round_costs_no_token():
    d = deferred()
    lose(d)
    d.join("b", slots=99)
    d.next_step()
    where = d.held("p1@0#1").node
    assert where is not None
    d.tokens("p1@0#1", 8)
    [(_, generate)] = sent(d.feed(NodeLost(where.name, "gone")), Generate)
    assert [(r.response, r.prefix) for r in generate.requests] == [("p1@0#1", ids(6, 6, 6, 8))]
