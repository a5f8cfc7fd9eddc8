"""What is recorded of versions on their way: sums of bytes, the slowest node, the worst canary."""

import math

from lightrl.messages.weights import WeightsReady
from lightrl.metrics import display
from lightrl.metrics.totals import WeightsMetrics
from tests.core.conftest import Driver


def ready(version: int = 0, **figures: float) -> WeightsReady:
    return WeightsReady(version, f"digest-{version}", **figures)  # type: ignore[arg-type]


def loaded(*messages: WeightsReady) -> WeightsMetrics:
    """By nodes that have version 0, of 1000 bytes, on its way."""
    d, metrics = Driver(), WeightsMetrics()
    d.start()
    for number, message in enumerate(messages):
        d.join(f"n{number}")
        metrics.received(d.core.fleet, f"n{number}", message)
        d.confirm(f"n{number}", 0)
    return metrics


def test_bytes_add_up_and_seconds_are_those_of_the_slowest():
    figures = loaded(
        ready(num_bytes=1000, pull_s=2.0, load_s=0.1, peer_bytes=400, canary_diff=0.001),
        ready(num_bytes=1000, pull_s=1.0, load_s=0.3, peer_bytes=900, canary_diff=0.002),
        ready(num_bytes=0),  # another node of the machine has pulled it
    ).figures()
    assert figures == {
        "weights/bytes": 2000,
        "weights/full_bytes": 3000,
        "weights/from_peers": 1300,
        "weights/pull_s": 2.0,
        "weights/pause_s": 0.3,
        "weights/canary": 0.002,
    }


def test_nodes_that_were_sent_a_version_are_counted_beside_those_that_pulled():
    pulled = ready(num_bytes=1000, pull_s=2.0)
    received = (ready(broadcast_s=s, load_s=s + 0.1) for s in (0.5, 0.25))
    figures = loaded(pulled, *received).figures()
    assert figures["weights/bytes"] == 3000
    assert figures["weights/broadcast_nodes"] == 2
    assert figures["weights/broadcast_s"] == 0.5
    assert figures["weights/pull_s"] == 2.0
    assert display.weights(figures).endswith(
        "broadcast to 2 in 0.50 s · pulled in 2.00 s · paused 0.60 s"
    )
    assert not any("broadcast" in name for name in loaded(pulled).figures())
    alone = loaded(ready(broadcast_s=0.5)).figures()
    assert display.weights(alone) == "1.0kB moved · broadcast to 1 in 0.50 s · paused 0.00 s"


def test_differences_are_compared_with_what_the_same_nodes_would_have_got():
    figures = loaded(
        ready(num_bytes=20, delta_bytes=20), ready(num_bytes=40, delta_bytes=30), ready()
    ).figures()
    assert figures["weights/delta_ratio"] == 50 / 2000
    assert "weights/canary" not in figures


def test_only_what_a_node_was_to_load_counts_and_once():
    d, metrics = Driver(), WeightsMetrics()
    d.start()
    d.join("a")
    metrics.received(d.core.fleet, "a", ready(7, num_bytes=1))
    metrics.received(d.core.fleet, "a", WeightsReady(0, "another digest", 1))
    metrics.received(d.core.fleet, "stranger", ready(num_bytes=1))
    d.confirm("a", 0)
    metrics.received(d.core.fleet, "a", ready(num_bytes=1))  # it has said so already
    assert metrics.figures() == {}


def test_figures_are_those_since_the_last_ones():
    metrics = loaded(ready(num_bytes=1000))
    assert metrics.figures()["weights/bytes"] == 1000
    assert metrics.figures() == {}


def test_whole_run_adds_bytes_up_and_keeps_the_worst():
    metrics = WeightsMetrics()
    assert metrics.totals.figures() == {}
    news = (
        loaded(
            ready(num_bytes=20, delta_bytes=20, pull_s=1.0, canary_diff=0.0),
            ready(broadcast_s=0.5),
        ),
        loaded(ready(num_bytes=1000, pull_s=3.0, canary_diff=math.inf)),
    )
    for step, publish_s in zip(news, (0.5, 0.25), strict=True):
        metrics._news = step._news
        assert metrics.figures(publish_s)["weights/publish_s"] == publish_s
    assert metrics.totals.figures() == {
        "bytes": 2020,
        "full_bytes": 3000,
        "from_peers": 0,
        "broadcast_nodes": 1,
        "broadcast_s": 0.5,
        "delta_bytes": 20,
        "delta_full_bytes": 1000,
        "delta_ratio": 0.02,
        "publish_s": 0.5,
        "pull_s": 3.0,
        "pause_s": 0.0,
        "canary": 0.0,
    }
