"""An order is cut into messages of bounded size; all of it is placed all the same."""

import pytest

from lightrl.core.responses import responses as cutting
from lightrl.core.responses.responses import orders
from lightrl.messages.responses import Generate, ResponseRequest, Sampling
from tests.core.conftest import Driver, sent


def request(name: str, size: int) -> ResponseRequest:
    return ResponseRequest(name, 1, 9, bytes(size // 2), bytes(size - size // 2), 5)


def test_messages_stay_within_their_limit_and_keep_the_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cutting, "MAX_ORDER_BYTES", 1000)
    monkeypatch.setattr(cutting, "OF_REQUEST", 0)
    parts = list(
        orders(
            4, Sampling(0.5), [request(f"r{k}", n) for k, n in enumerate([400, 600, 1, 5000, 9, 9])]
        )
    )
    assert [[r.response for r in part.requests] for part in parts] == [
        ["r0", "r1"],
        ["r2"],
        ["r3"],
        ["r4", "r5"],
    ]
    assert {(part.policy_version, part.sampling) for part in parts} == {(4, Sampling(0.5))}
    assert list(orders(4, Sampling(), [])) == []


def test_a_node_is_told_of_all_its_responses_in_as_many_messages_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(cutting, "MAX_ORDER_BYTES", 2 * cutting.OF_REQUEST + 100)
    d = Driver(prompts_per_step=4, group_size=2)
    generated = sent(d.start("a", slots=8), Generate)
    assert [len(message.requests) for _, message in generated] == [2, 2, 2, 2]
    assert {r.response for _, message in generated for r in message.requests} == set(
        d.core.table.responses
    )
