"""Which node gets what, and what moves when it pays."""

import random

import pytest

from lightrl.core.events import TimerFired
from lightrl.core.nodes.speed import Speed
from lightrl.core.responses.placement import assign, choose_migrations
from lightrl.core.settings import Tail
from lightrl.core.state import Node, Response
from lightrl.messages.responses import Abort, Generate
from tests.core.conftest import Driver, ids, sent


def node(
    name: str,
    step_s: float = 0.02,
    slope: float = 0.0001,
    slots: int = 4,
    running: list | None = None,
) -> Node:
    made = Node(
        name,
        1,
        ("rollout",),
        slots,
        0.0,
        pid=1,
        host="h",
        speed=Speed(step_s, slope, num_observed=9),
    )
    for r in running or []:
        made.running[r.id] = r
        r.node = made
    return made


def waiting(count: int) -> list[Response]:
    d = Driver(prompts_per_step=count, group_size=1)
    d.join("t", "trainer")
    d.publish(0)
    d.start("a", slots=count)
    return list(d.core.table.responses.values())


def test_responses_go_to_the_node_that_would_finish_first_with_them():
    counts = {"fast": 0, "slow": 0}
    nodes = [node("fast", 0.01, 0.01, slots=99), node("slow", 0.02, 0.02, slots=99)]
    for _, target in assign(waiting(30), nodes, lambda _: 500.0):
        counts[target.name] += 1
    assert counts["fast"] == pytest.approx(20, abs=1)  # half the speed, half the share


def test_of_equal_nodes_the_name_decides_and_they_take_turns():
    nodes = [node(name, slots=9) for name in ("c", "a", "b")]
    placed = [target.name for _, target in assign(waiting(6), nodes, lambda _: 500.0)]
    assert placed == ["a", "b", "c", "a", "b", "c"]


def test_no_node_gets_more_than_its_free_slots_and_the_rest_is_not_placed():
    responses = waiting(9)
    busy = node("a", slots=3, running=responses[7:9])
    placed = assign(
        responses[:7], [busy, node("b", 9.0, slots=2), node("c", slots=0)], lambda _: 500.0
    )
    assert [r.id for r, _ in placed] == [r.id for r in responses[:3]]
    assert sorted(target.name for _, target in placed) == ["a", "b", "b"]


def test_longest_goes_first_to_the_node_where_it_is_done_earliest():
    responses = waiting(3)
    n = dict(zip([r.id for r in responses], (900.0, 500.0, 400.0), strict=True))
    nodes = [node("a", 0.0, 0.01, slots=9), node("b", 0.0, 0.01, slots=9)]
    placed = [target.name for _, target in assign(responses, nodes, lambda r: n[r.id])]
    assert placed == ["a", "b", "b"]  # as in the classic greedy bound


def test_idle_node_takes_responses_from_one_that_is_above_its_plateau():
    responses = waiting(8)
    full, idle = node("a", 0.001, 0.01, slots=8, running=responses), node("b", 0.001, 0.01, slots=8)
    moved = choose_migrations([full, idle], lambda _: 1000.0)
    assert all(target is idle for _, target in moved)
    assert len(moved) == pytest.approx(4, abs=1)


def test_nothing_moves_between_nodes_that_are_below_their_plateau():
    responses = waiting(4)
    nodes = [node("a", 0.02, 0.0, slots=8, running=responses), node("b", 0.02, 0.0, slots=8)]
    assert choose_migrations(nodes, lambda _: 1000.0) == []


def test_nothing_moves_for_few_remaining_tokens():
    responses = waiting(2)
    nodes = [node("a", 0.2, running=responses), node("b", 0.02)]
    assert choose_migrations(nodes, lambda _: 2.0) == []
    assert [r.id for r, _ in choose_migrations(nodes, lambda _: 1000.0)] != []


def test_long_prefix_makes_a_move_too_dear():
    [response] = waiting(1)
    response.tokens.extend([9] * 200_000)
    nodes = [node("a", 0.03, running=[response]), node("b", 0.02)]
    assert choose_migrations(nodes, lambda _: 200_500.0) == []
    del response.tokens[100:]
    assert choose_migrations(nodes, lambda _: 200_500.0) != []


def test_slow_node_gives_its_longest_to_a_fast_one_and_never_more_than_it_has_room_for():
    responses = waiting(6)
    n = {r.id: 100.0 * (i + 1) for i, r in enumerate(responses)}
    slow, fast = node("a", 0.5, slots=6, running=responses), node("b", 0.02, slots=2)
    moved = [r.id for r, _ in choose_migrations([slow, fast], lambda r: n[r.id])]
    assert moved == [responses[5].id, responses[4].id]


def test_moving_twice_in_a_row_changes_nothing_more():
    responses = waiting(8)
    nodes = [node("a", 0.001, 0.01, slots=8, running=responses), node("b", 0.001, 0.01, slots=8)]
    for response, target in choose_migrations(nodes, lambda _: 1000.0):
        del nodes[0].running[response.id]
        target.running[response.id] = response
    assert choose_migrations(nodes, lambda _: 1000.0) == []


def running_at(d: Driver, name: str) -> int:
    return len(d.core.fleet.nodes[name].running)


def busy_node(**changes: object) -> Driver:
    """One node decodes 16 responses and is above its plateau."""
    settings = {"prompts_per_step": 8, "group_size": 2, "max_response_tokens": 2000, "slots": 16}
    d = Driver(**settings | changes)
    d.start("a")
    d.core.fleet.nodes["a"].speed = Speed(0.001, 0.01, num_observed=9)
    return d


def test_node_that_joins_in_the_middle_of_a_step_gets_its_share_of_what_runs():
    d = busy_node()
    for name in d.running():
        d.tokens(name, *[9] * 100)
    d.join("b")
    d.confirm("b", 0)
    assert running_at(d, "b") == 0
    deadline = d.core.next_deadline()
    assert deadline is not None
    commands = d.feed(TimerFired(), now=deadline)
    assert running_at(d, "b") == pytest.approx(8, abs=1)
    aborted = {a for node, m in sent(commands, Abort) for a in m.attempts if node == "a"}
    started = {
        (r.response, r.attempt - 1)
        for node, g in sent(commands, Generate)
        for r in g.requests
        if node == "b"
    }
    assert aborted == started
    assert d.core.table.counters.migrations == len(started)


def test_response_that_moves_takes_its_tokens_along():
    d = busy_node()
    for name in d.running():
        d.tokens(name, 5, 6)
    d.join("b")
    d.confirm("b", 0)
    commands = d.feed(TimerFired(), now=d.core.next_deadline())
    requests = [r for _, g in sent(commands, Generate) for r in g.requests]
    assert {r.prefix for r in requests} == {ids(5, 6)}
    assert {r.max_new_tokens for r in requests} == {1998}


def test_nothing_moves_when_migration_is_off():
    d = busy_node(migration=False)
    d.join("b")
    d.confirm("b", 0)
    d.feed(TimerFired(), now=1.0)
    assert running_at(d, "b") == 0


def test_nothing_moves_to_a_node_that_still_loads():
    d = busy_node()
    d.join("b")
    d.join("c")
    d.confirm("c", 0)
    d.feed(TimerFired(), now=d.core.next_deadline())
    assert (running_at(d, "b"), running_at(d, "c") > 0) == (0, True)


def test_nodes_that_get_room_at_once_while_another_loads_lose_nothing():
    d = Driver(prompts_per_step=4, group_size=1, tail=Tail(1.0, 4.0), foresight=False)
    d.join("t", "trainer")
    d.publish(0)
    for name, slots in [("a", 3), ("b", 1), ("c", 1)]:
        d.join(name, slots=slots)
        d.confirm(name, 0)
    d.decode(lambda _: 1)
    d.train(0)
    d.confirm("a", 1)
    d.confirm("b", 1)  # c still loads
    assert [list(d.core.fleet.nodes[n].running) for n in "ab"] == [
        [f"p4@0#{k}" for k in range(3)],
        ["p4@0#3"],
    ]
    d.tokens("p4@0#1", 9, 9)
    d.tokens("p4@0#3", 9, 9)
    d.tokens("p4@0#0", 9, 9, finish="stop")
    generates = sent(d.score("p4@0#0"), Generate)  # two siblings have lost, one goes on
    assert {target: len(g.requests) for target, g in generates} == {"a": 1, "b": 1}


def test_busy_node_is_refilled_while_another_loads_but_leaves_it_its_share():
    d = Driver(prompts_per_step=8, group_size=1, foresight=False)
    d.start("a", "b", slots=4)
    d.finish_round()
    d.train(0)
    d.confirm("a", 1)
    for waiting in (4, 4, 3):  # of eight, b's half waits for it; a's is done by and by
        running = d.core.fleet.nodes["a"].running
        assert sum(r.state == "queued" for r in d.core.table.responses.values()) == waiting
        d.finish(next(iter(running)))


def test_each_response_goes_where_it_would_finish_first_also_when_lengths_differ_much():
    nodes = [node(f"n{i}", 0.02 * (1 + i % 2), 0.0002 * (1 + i % 2), slots=400) for i in range(8)]
    rng = random.Random(0)
    lengths = sorted((rng.lognormvariate(5, 1.5) for _ in range(400)), reverse=True)
    responses = waiting(400)
    expected = {r.id: n for r, n in zip(responses, lengths, strict=True)}
    load = {n.name: [0.0, 0.0] for n in nodes}  # longest, sum
    for r, chosen in assign(responses, nodes, lambda r: expected[r.id]):
        n = max(1.0, expected[r.id])
        finish = {
            m.name: m.speed.base * max(load[m.name][0], n) + m.speed.slope * (load[m.name][1] + n)
            for m in nodes
        }
        assert finish[chosen.name] <= 1.3 * min(finish.values())
        load[chosen.name] = [max(load[chosen.name][0], n), load[chosen.name][1] + n]
    ends = [m.speed.base * load[m.name][0] + m.speed.slope * load[m.name][1] for m in nodes]
    assert min(ends) > 0


def test_last_response_on_a_node_that_turns_slow_moves_although_the_first_look_found_no_gain():
    d = Driver(
        prompts_per_step=1, group_size=1, max_response_tokens=1000, chunk_tokens=1, lease_s=1e9
    )
    d.start("a")
    for i in range(4):
        d.now = 0.1 * (i + 1)
        d.tokens("p0@0#0", 7)
    d.join("b")
    d.confirm("b", 0)
    d.feed(TimerFired(), now=0.6)
    assert d.requests["p0@0#0"][0] == "a"
    for i in range(4):  # from now on a token takes ten seconds
        d.now = 10.0 * (i + 1)
        d.tokens("p0@0#0", 7)
        deadline = d.core.next_deadline()
        assert deadline is not None
        d.feed(TimerFired(), now=max(d.now, deadline))
        if d.requests["p0@0#0"][0] == "b":
            return
    raise AssertionError("b stays idle")
