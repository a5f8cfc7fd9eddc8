"""Responses with a history get several tokens of an engine step; placement knows it and learns how
many."""

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from lightrl.core.events import MessageArrived, TimerFired
from lightrl.core.nodes.chunk_stats import Gain
from lightrl.core.nodes.speed import PRIOR_HALF_BATCH, Speed
from lightrl.core.responses.placement import assign, moves, outlook
from lightrl.core.state import Node, Response
from lightrl.messages.load import Drafting, Load
from lightrl.messages.nodes import Heartbeat
from lightrl.messages.responses import ResponseTokens, TokenChunk
from tests.core.conftest import Driver, ids, logprobs

LIMIT = 4000
BASE, SLOPE = 0.02, 0.02 / PRIOR_HALF_BATCH  # what is assumed of a node that had one size of batch


def fleet(*rollouts: str, prompts: int = 8, speculates: bool = True, **changes: Any) -> Driver:
    """Nodes that serve version 0, and one round of responses that nothing is known of."""
    settings = {
        "group_size": 1,
        "max_response_tokens": LIMIT,
        "slots": 64,
        "lease_s": 1e9,
        "chunk_tokens": 16,
    }
    d = Driver(prompts_per_step=prompts, **settings | changes)
    d.join("t", "trainer")
    d.publish(0)
    for name in rollouts:
        d.join(name)
        if speculates:
            d.feed(MessageArrived(name, Heartbeat(Load(drafting=Drafting()))))
    for name in rollouts:
        d.confirm(name, 0)
    return d


def with_history(d: Driver, *numbers: int) -> None:
    """These prompts were answered before, in a round that put them off."""
    for number, group in enumerate(d.round.groups.values()):
        group.attempts = int(number in numbers)


def node_of(d: Driver, name: str) -> Node:
    return d.core.fleet.nodes[name]


class Decode:
    """What the engines of a fleet would do: all responses of a node are in each of its steps."""

    def __init__(self, d: Driver, length: Callable[[Response], int], gain: float) -> None:
        self.d, self.length, self.gain = d, length, gain
        self.held: dict[str, float] = {}
        self.due = [(0.0, name) for name in sorted(d.core.fleet.ready)]

    def step_s(self, node: Node) -> float:
        return BASE + SLOPE * len(node.running)

    def chunk(self, steps: int) -> None:
        """The next node in time decodes so many steps, or until one of its responses ends."""
        at, name = heapq.heappop(self.due)
        node, items = node_of(self.d, name), []
        if not node.running:
            heapq.heappush(self.due, (at + 1.0, name))
            return
        left = [(self.length(r) - self.at(r)) / self.rate(r) for r in node.running.values()]
        steps = min(steps, max(1, -int(-min(left) // 1)))
        at += steps * self.step_s(node)
        for r in node.running.values():
            upto = min(float(self.length(r)), self.at(r) + steps * self.rate(r))
            self.held[r.id] = upto
            count = int(upto) - len(r.tokens)
            finish = "stop" if upto == self.length(r) else None
            if count or finish:
                items.append(
                    ResponseTokens(
                        r.id, r.attempt, len(r.tokens), ids(*[9] * count), logprobs(count), finish
                    )
                )
        heapq.heappush(self.due, (at, name))
        self.d.feed(
            MessageArrived(name, TokenChunk(0, "digest-0", tuple(items))), now=max(at, self.d.now)
        )

    def at(self, r: Response) -> float:
        return max(float(len(r.tokens)), self.held.get(r.id, 0.0))

    def rate(self, r: Response) -> float:
        return self.gain if r.has_history else 1.0


def test_gain_is_that_of_neighbours_in_the_same_chunks():
    gain = Gain()
    for _ in range(60):
        for _ in range(3):
            gain.observe(True, 12, is_whole=True)
        gain.observe(False, 4, is_whole=True)
        gain.observe(False, 1, is_whole=False)  # it ended in the middle
        mean = gain.close()
    assert gain.tokens == pytest.approx(3.0, rel=0.02)
    assert mean == pytest.approx((3 * 3 + 2) / 5, rel=0.02)


def test_gain_stays_while_a_node_has_one_kind_only_and_is_never_below_one():
    gain = Gain(2.5)
    for _ in range(100):
        gain.observe(True, 50, is_whole=True)
        assert gain.close() == 2.5
        gain.observe(False, 1, is_whole=True)
        assert gain.close() == 1.0
    for _ in range(300):
        gain.observe(True, 1, is_whole=True)
        gain.observe(False, 9, is_whole=True)
        gain.close()
    assert gain.tokens == 1.0


def test_gain_follows_a_batch_that_becomes_smaller():
    gain = Gain(1.0)
    for _ in range(200):
        gain.observe(True, 8, is_whole=True)
        gain.observe(False, 8, is_whole=True)
        assert gain.close() == 1.0
    for _ in range(60):
        gain.observe(True, 16, is_whole=True)
        gain.observe(False, 2, is_whole=True)
        gain.close()
    assert gain.tokens == pytest.approx(8.0, rel=0.4)


def test_node_that_does_not_speculate_has_no_gain_whatever_it_sends():
    d = fleet("a", prompts=4, speculates=False)
    with_history(d, 0, 1)
    decode = Decode(d, lambda _: 2000, gain=4.0)
    for _ in range(40):
        decode.chunk(8)
    node = node_of(d, "a")
    assert node.gain.tokens == 1.0
    assert {node.gain_of(r) for r in node.running.values()} == {1.0}


def test_speed_and_gain_are_told_apart():
    d = fleet("a", prompts=8)
    with_history(d, 0, 1, 2, 3, 4)
    decode = Decode(d, lambda _: 3000, gain=3.0)
    for _ in range(100):
        decode.chunk(8)
    node = node_of(d, "a")
    assert len(node.running) == 8
    assert node.gain.tokens == pytest.approx(3.0, rel=0.02)
    assert node.speed.step_s(8) == pytest.approx(BASE + SLOPE * 8, rel=0.02)


def test_response_that_came_between_two_chunks_does_not_count_until_the_next():
    d = fleet("a", prompts=2)
    with_history(d, 0)
    old, new = d.core.table.responses.values()
    node = node_of(d, "a")

    def chunk(count: int) -> float:
        node.add_tokens(old, 12, goes_on=True)
        node.add_tokens(new, count, goes_on=True)
        node.observe(d.now, 2, 0, 2, 12 + count)
        return node.gain.tokens

    assert chunk(2) == 1.0
    known = chunk(4)
    assert known > 1.0
    new.attempt += 1  # it has moved away and back
    assert chunk(1) == known
    assert chunk(1) > known


def test_node_that_joins_is_expected_to_be_like_the_others():
    d = fleet("a", prompts=8)
    with_history(d, 0, 1, 2, 3, 4)
    decode = Decode(d, lambda _: 3000, gain=3.0)
    for _ in range(60):
        decode.chunk(8)
    d.join("b")
    assert node_of(d, "b").gain.tokens == pytest.approx(node_of(d, "a").gain.tokens)


def end_of_a_node(gain: float, speculates: bool = True) -> tuple[float, float]:
    """(predicted, real) seconds from the middle of a decode to its end."""
    lengths = [3900, 3700, 3200, 3000, 2600, 1600, 1500, 1400]
    d = fleet("a", prompts=8, speculates=speculates)
    with_history(d, 0, 1, 2, 3, 5)
    by_id = {r.id: lengths[i] for i, r in enumerate(d.core.table.responses.values())}
    decode = Decode(d, lambda r: by_id[r.id], gain)
    node = node_of(d, "a")
    for _ in range(60):
        decode.chunk(4)
    assert len(node.running) == 8
    began, predicted = d.now, outlook(node, lambda r: by_id[r.id]).finishes_in()
    while node.running:
        decode.chunk(4)
    return predicted, d.now - began


@pytest.mark.parametrize("gain", [1.0, 2.0, 5.0])
def test_predicted_end_is_when_a_decode_ends(gain: float):
    predicted, real = end_of_a_node(gain)
    assert predicted == pytest.approx(real, rel=0.04)


def test_tokens_taken_for_steps_would_be_far_from_it():
    predicted, real = end_of_a_node(5.0, speculates=False)
    assert predicted < 0.75 * real


def known(
    name: str, gain: float, running: list[Response], slots: int = 8, step_s: float = 0.02
) -> Node:
    node = Node(
        name,
        1,
        ("rollout",),
        slots,
        0.0,
        pid=1,
        host="h",
        load=Load(drafting=Drafting()),
        speed=Speed(step_s, 0.001, num_observed=9),
        gain=Gain(gain),
    )
    for r in running:
        node.running[r.id] = r
        r.node = node
    return node


def responses_of(count: int, *with_a_history: int) -> list[Response]:
    d = fleet("x", prompts=count)
    with_history(d, *with_a_history)
    return list(d.core.table.responses.values())


def test_long_response_without_history_counts_as_slower_than_a_longer_one_with():
    old, new, next_one = responses_of(3, 0)
    nodes = [known("a", 4.0, [old]), known("b", 4.0, [new])]
    tokens = {old.id: 3000.0, new.id: 1500.0, next_one.id: 1500.0}
    ends = [outlook(n, lambda r: tokens[r.id]) for n in nodes]
    assert [o.left for o in ends] == [[750.0], [1500.0]]
    assert [n.name for _, n in assign([next_one], nodes, lambda r: tokens[r.id])] == ["a"]


def test_the_one_without_history_is_moved_first():
    responses = responses_of(4, 0, 1, 2)
    tokens = dict(zip([r.id for r in responses], (3000.0, 2800.0, 2600.0, 2000.0), strict=True))
    slow, fast = known("a", 4.0, responses, step_s=0.2), known("b", 4.0, [], slots=1)
    assert [r for r, _ in moves([slow, fast], lambda r: tokens[r.id])] == [responses[3]]
    slow.gain = fast.gain = Gain()
    assert [r for r, _ in moves([slow, fast], lambda r: tokens[r.id])] == [responses[0]]


def test_a_move_counts_with_the_gain_of_where_it_goes():
    [response, other] = responses_of(2, 0, 1)
    source, target = known("a", 1.0, [response], step_s=0.05), known("b", 4.0, [other])
    tokens = {response.id: 1000.0, other.id: 9600.0}  # 51 s here; there 50 s, and it is not felt
    assert [r for r, _ in moves([source, target], lambda r: tokens[r.id])] == [response]
    target.gain = Gain(1.0)
    assert moves([source, target], lambda r: tokens[r.id]) == []


def test_both_kinds_in_one_queue_go_where_each_would_finish_first():
    responses = responses_of(60, *range(0, 60, 2))
    tokens = {r.id: 2000.0 - 17 * i for i, r in enumerate(responses)}
    gains = {"a": 1.0, "b": 3.0, "c": 6.0}
    nodes = [known(name, gain, [], slots=30) for name, gain in gains.items()]
    load = {name: [0.0, 0.0] for name in gains}  # most steps, sum
    placed = assign(responses, nodes, lambda r: tokens[r.id])
    assert len(placed) == 60
    for r, chosen in placed:
        steps = {n: tokens[r.id] / (g if r.has_history else 1.0) for n, g in gains.items()}
        ends = {n: 0.02 * max(m, steps[n]) + 0.001 * (s + steps[n]) for n, (m, s) in load.items()}
        assert ends[chosen.name] <= 1.3 * min(ends.values())
        most, total = load[chosen.name]
        load[chosen.name] = [max(most, steps[chosen.name]), total + steps[chosen.name]]
    assert placed == assign(responses, nodes, lambda r: tokens[r.id])


def test_full_nodes_get_nothing_more_in_either_order():
    responses = responses_of(12, *range(0, 12, 2))
    nodes = [known("a", 3.0, [], slots=2), known("b", 2.0, [], slots=5)]
    counts = [n.name for _, n in assign(responses, nodes, lambda _: 500.0)]
    assert (counts.count("a"), counts.count("b")) == (2, 5)


def told(seed_gain: float) -> list[tuple[float, str, str]]:
    """A fleet plays with migration; (time, response, node) of whatever was placed."""
    d = fleet("a", "b", prompts=12)
    with_history(d, *range(0, 12, 3))
    by_id = {r.id: 600 + 211 * i for i, r in enumerate(d.core.table.responses.values())}
    decode = Decode(d, lambda r: by_id[r.id], seed_gain)
    story: list[tuple[float, str, str]] = []
    for _ in range(4000):
        if not d.running():
            return story
        decode.chunk(8)
        deadline = d.core.next_deadline()
        if deadline is not None and deadline <= d.now:
            d.feed(TimerFired())
        story += [(d.now, name, d.requests[name][0]) for name in d.running()]
    raise AssertionError("it does not end")


def test_runs_repeat():
    assert told(4.0) == told(4.0)
