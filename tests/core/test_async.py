"""Steps that overlap: admission, order, versions, evaluations."""

import pytest

from lightrl.core.commands import CloseRound, CloseStep
from lightrl.core.events import DrainRequested, NodeLost
from lightrl.core.rounds.rounds import staleness
from lightrl.messages.responses import Generate
from lightrl.messages.training import TrainShard
from tests.core.conftest import Driver, held_out, ids, of_kind, sent


def overlapping(max_staleness: int = 1, **changes: object) -> Driver:
    settings = {
        "prompts_per_step": 2,
        "group_size": 1,
        "num_steps": 6,
        "slots": 99,
        "foresight": False,
    }
    d = Driver(max_staleness=max_staleness, **settings | changes)
    d.start("a")
    return d


def steps(d: Driver) -> list[int]:
    return [r.step for r in d.core.table.rounds]


def load(d: Driver, node: str, version: int) -> list:
    """It gives up what runs there, and then serves the new version."""
    commands = []
    for name in list(d.core.fleet.nodes[node].running):
        commands += d.tokens(name, finish="abort", node=node)
    return commands + d.confirm(node, version)


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_as_many_steps_are_under_way_as_staleness_allows(k: int):
    assert steps(overlapping(k)) == list(range(k + 1))


def test_next_step_opens_when_a_version_appears_not_when_one_is_finished():
    d = overlapping(1)
    d.finish("p0@0#0")
    d.finish("p1@0#0")
    assert steps(d) == [0, 1]  # step 0 is closed, but version 1 is not there
    d.train(0)
    assert steps(d) == [1]  # nobody serves it yet
    load(d, "a", 1)
    assert steps(d) == [1, 2]


def test_response_that_goes_on_under_a_new_version_has_both_in_its_spans():
    d = overlapping(1)
    d.tokens("p2@0#0", 5, 6)
    d.finish("p0@0#0")
    d.finish("p1@0#0")
    d.train(0)
    [request] = [
        r for _, g in sent(load(d, "a", 1), Generate) for r in g.requests if r.response == "p2@0#0"
    ]
    assert (request.attempt, request.prefix) == (2, ids(5, 6))
    d.tokens("p2@0#0", 7)
    assert list(d.held("p2@0#0").spans) == [(0, 2), (1, 1)]
    assert staleness(d.held("p2@0#0").spans, 1) == (2, 0, 1)


def test_tokens_older_than_allowed_are_not_taken():
    d = overlapping(1)
    for step in range(2):
        for name in [f"p{2 * step}@0#0", f"p{2 * step + 1}@0#0"]:
            d.finish(name)
        d.train(step)
        load(d, "a", step + 1)
    assert steps(d) == [2, 3]
    d.tokens("p6@0#0", 5, version=1)  # step 3 may have versions 2 and 3
    assert len(d.held("p6@0#0").tokens) == 0
    assert "a" not in d.core.fleet.nodes


def test_slow_prompt_is_never_dropped_and_holds_up_what_comes_after():
    d = overlapping(2, num_steps=9)
    for name in [n for n in d.running() if n != "p0@0#0"]:
        d.finish(name)
    assert steps(d) == [0, 1, 2]
    assert d.running() == ["p0@0#0"]
    shards = sent(d.finish("p0@0#0"), TrainShard)
    assert {s.step for _, s in shards} == {0}


def test_rounds_that_finish_early_are_trained_in_their_order():
    d = overlapping(2)
    trained = []
    for name in ("p4@0#0", "p5@0#0", "p2@0#0", "p3@0#0", "p1@0#0", "p0@0#0"):
        trained += sent(d.finish(name), TrainShard)
    assert {s.step for _, s in trained} == {0}
    second = sent(d.train(0), TrainShard)
    assert [(s.step, s.last, len(s.groups)) for _, s in second] == [(1, True, 2)]
    third = sent(load(d, "a", 1) + d.train(1), TrainShard)
    assert [(s.step, s.last) for _, s in third] == [(2, True)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_token_is_older_than_allowed_over_a_whole_run(k: int):
    d = overlapping(k, num_steps=8)
    commands = []
    while d.core.state != "finishing":
        for name in sorted(d.running(), reverse=True):  # the newest first
            last = len(d.held(name).tokens) == int(name[1]) % 5
            commands += d.tokens(name, 9, finish="stop" if last else None)
            if last:
                commands += d.score(name)
        if d.round.state == "closed":
            step = d.round.step
            commands += d.train(step) + load(d, "a", step + 1)
    closed = [c.round for c in of_kind(commands, CloseRound)]
    gaps = [
        staleness(r.spans, c.step).oldest_gap for c in closed for g in c.accepted for r in g.kept
    ]
    assert len(gaps) == 16
    assert max(gaps) == k
    assert [c.step for c in of_kind(commands, CloseStep)] == list(range(8))


def test_every_other_step_goes_by_ascending_length():
    d = overlapping(1, num_prompts=4, foresight=True, num_steps=8)
    lengths = {"p0": 2, "p1": 9, "p2": 3, "p3": 8}
    starts = []
    while d.core.step < 3:
        commands = d.decode(lambda name: lengths[name[:2]])
        step = d.round.step
        commands += d.train(step) + load(d, "a", step + 1)
        starts += [[r.response for r in g.requests] for _, g in sent(commands, Generate)]
    assert ["p1@1#0", "p0@1#0"] in starts  # step 2: longest first
    assert ["p2@1#0", "p3@1#0"] in starts  # step 3: shortest first


def test_evaluation_waits_for_its_version_and_the_next_step_for_the_evaluation():
    d = overlapping(2, eval_sets=held_out(1), eval_interval=2)
    assert [r.kind for r in d.core.table.rounds] == ["eval"]
    d.finish("e/0@eval0#0")
    assert steps(d) == [0, 1]  # step 2 would be generated by an older version than is evaluated
    for step in range(2):
        d.decode(lambda _: 1)
        assert d.round.step == step
        d.train(step)
        load(d, "a", step + 1)
    assert [(r.kind, r.step) for r in d.core.table.rounds] == [("eval", 2)]
    d.finish("e/0@eval2#0")
    assert steps(d) == [2, 3]


def test_three_times_of_each_step_add_up_to_the_time_that_passed():
    d = overlapping(1)
    commands = []
    while d.core.state != "finishing":
        for name in d.running():
            d.now += 0.25
            commands += d.finish(name)
        step = d.round.step
        d.now += 1.0
        commands += d.train(step) + load(d, "a", step + 1)
    times = [(s.rollout_s, s.train_s, s.weights_s) for s in of_kind(commands, CloseStep)]
    assert all(t >= 0 for step in times for t in step)
    assert sum(map(sum, times)) == pytest.approx(d.now)


def test_stopped_run_sends_nothing_of_a_later_step_when_the_trainer_finishes_one():
    d = overlapping(1)
    d.decode(lambda _: 1)
    d.feed(DrainRequested("*", "down"))
    assert sent(d.train(0), TrainShard) == []
    d.feed(NodeLost("t", "gone"))
    assert d.core.step == 1
