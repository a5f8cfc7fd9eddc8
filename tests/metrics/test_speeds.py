"""What is stored of a node in a step."""

from lightrl.metrics.speeds import Decoded, NodeSpeeds, Start, _row
from lightrl.wire import to_json


def test_seconds_have_few_digits():
    decoded = {5: Decoded(25 / 3, 5 / 7, 1000)}
    row = _row(NodeSpeeds(64, True, decoded, [Start(1 / 7, 100, 3, 8)], [1 / 3]))
    assert row.starts == [Start(0.142857, 100, 3, 8)]
    assert row.decoded == {5: Decoded(8.333333, 0.714286, 1000)}
    assert row.load_s == [0.333333]
    assert len(to_json(row)) < 250
