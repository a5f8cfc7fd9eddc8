"""Nodes that will leave the rollout before it is over take the shortest of what is there for all,
so that few responses have to move."""

import random
from dataclasses import replace
from typing import Any

import pytest

from lightrl.core.placement import slots_by_pace
from lightrl.core.queue import WorkQueue
from lightrl.core.state import Response, ResponseState
from tests.core.conftest import SETTINGS, Driver, held_out
from tests.core.test_handover import parked, released, shared
from tests.core.test_placement import node, waiting

LONG = "p1"


def second_epoch(*names: str, others: str = "b", **changes: Any) -> Driver:
    """A round whose prompts were all sampled before: those of p1 took 8 tokens, the others 2. The
    nodes are told of its version one after the other, those that share devices first."""
    settings = {"prompts_per_step": 2, "num_prompts": 2, "slots": 4, **changes}
    d, _ = shared(*names, others=others, **settings)
    d.complete(lambda response: 8 if response.startswith(LONG) else 2)
    for name in names:
        released(d, name)
    parked(d)
    d.train(0)
    for name in (*names, *others):
        d.confirm(name, 1)
    return d


def longs(d: Driver) -> dict[str, list[bool]]:
    """Of each node, whether its responses are expected to be long."""
    nodes = d.core.fleet.ready
    return {name: [r.startswith(LONG) for r in nodes[name].running] for name in "ab"}


def test_long_responses_start_on_nodes_that_go_on_and_short_ones_on_those_that_leave():
    assert longs(second_epoch("a")) == {"a": [False, False], "b": [True, True]}


def test_where_sides_change_between_steps_alone_nobody_leaves():
    d = second_epoch("a", offload="off")
    assert longs(d)["a"] == [True, True]  # it loads first, and the queue begins with the longest


def test_without_shared_devices_the_longest_go_first_to_whoever_is_there():
    d = second_epoch(others="ab")
    assert longs(d)["a"] == [True, True]


def test_while_more_waits_than_there_is_room_for_the_longest_go_first():
    d = second_epoch("a", slots=1)
    assert longs(d) == {"a": [True], "b": [True]}


def test_in_an_evaluation_nobody_leaves():
    d, _ = shared("a", others="b", eval_interval=1, eval_sets=held_out(2, samples=2))
    assert d.core.table.is_evaluating
    assert not d.core.colocation.may_leave


def test_steps_stay_as_short_as_they_can_be():
    nodes = [node("fast", 0.01, 0.01, slots=99), node("slow", 0.02, 0.02, slots=99)]
    taken = [n.name for n in slots_by_pace(nodes, 30)]
    assert taken.count("fast") == pytest.approx(20, abs=1)
    held = waiting(9)
    busy = node("busy", slots=9, running=held[:5])
    assert [n.name for n in slots_by_pace([busy, node("empty", slots=9)], 5)] == ["empty"] * 5
    # no more than there is room for
    assert len(slots_by_pace([busy, node("full", running=held[5:9])], 99)) == 4


def queued(lengths: list[int]) -> tuple[WorkQueue, list[Response]]:
    """Responses with these lengths, in that order, in a queue."""
    responses = waiting(len(lengths))
    expected = {r.id: float(n) for r, n in zip(responses, lengths, strict=True)}
    for r in responses:
        r.state = ResponseState.QUEUED
    return WorkQueue(replace(SETTINGS), lambda r: expected[r.id]), responses


def test_a_queue_has_two_ends():
    queue, (a, b, c, d) = queued([3, 9, 1, 5])
    for r in (a, b, c, d):
        queue.push(r)
    assert queue.pop() is b
    assert queue.pop(shortest=True) is c
    queue.push(c)
    assert len(queue) == 3
    assert queue.pop(shortest=True) is c
    queue.push(b, resumed=True)  # comes first, from both ends
    assert queue.pop(shortest=True) is b
    assert [queue.pop(), queue.pop(), queue.pop()] == [d, a, None]
    assert (len(queue), queue.tokens) == (0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_each_response_leaves_a_queue_once_whichever_end_it_is_taken_from(seed: int):
    rng = random.Random(seed)
    queue, outside = queued([rng.randint(1, 9) for _ in range(20)])
    inside: list[Response] = []
    for _ in range(300):
        if rng.random() < 0.5 and outside:
            queue.push(response := outside.pop(rng.randrange(len(outside))))
            inside.append(response)
        elif rng.random() < 0.1 and inside:  # given up, and taken up once more later
            response = inside.pop(rng.randrange(len(inside)))
            response.queued_as = 0
            outside.append(response)
        else:
            taken = queue.pop(shortest=rng.random() < 0.5)
            assert (taken is None) == (not inside)
            if taken is not None:
                inside.remove(taken)
                outside.append(taken)
        assert len(queue) >= len(inside)
        assert sorted(r.id for r in queue.waiting()) == sorted(r.id for r in inside)
    while inside:
        inside.remove(queue.pop(shortest=True))
    assert queue.pop(shortest=True) is None
    assert len(queue) == 0
