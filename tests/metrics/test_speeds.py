"""How large the line of a step is in speeds.jsonl, whatever the size of the fleet."""

import pytest

from lightrl.metrics.speeds import MAX_ALL_STARTS, MAX_STARTS, Decoded, NodeSpeeds, Start, rows
from lightrl.wire import to_json


def a_fleet(num_nodes: int) -> dict[str, NodeSpeeds]:
    """What is told of nodes that began as often as is told of one, and decoded in three sizes."""
    starts = [Start(k / 7, 100 + k, 3, 8) for k in range(MAX_STARTS)]
    decoded = {size: Decoded(size * size / 3, size / 7, 1000) for size in (4, 5, 6)}
    speeds = {f"node-{k}": NodeSpeeds(64, True, decoded, starts, [1 / 3]) for k in range(num_nodes)}
    return rows(speeds)


@pytest.mark.parametrize(
    ("num_nodes", "each"), [(8, 32), (32, 32), (100, 10), (1000, 1), (3000, 1)]
)
def test_fewer_starts_are_told_of_each_of_many_nodes(num_nodes: int, each: int):
    told = a_fleet(num_nodes)
    assert {len(row.starts) for row in told.values()} == {each}
    tokens = [100 + k * MAX_STARTS // each for k in range(each)]  # over the whole step
    assert [start[1] for start in told["node-0"].starts] == tokens
    assert num_nodes * each <= max(MAX_ALL_STARTS, num_nodes)


def test_a_step_of_a_large_fleet_is_a_short_line():
    assert len(to_json(a_fleet(1000))) < 250 * 1000


def test_of_a_node_that_did_nothing_its_slots_are_told():
    assert rows({"idle": NodeSpeeds(4, False)}) == {"idle": NodeSpeeds(4)}
