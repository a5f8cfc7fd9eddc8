"""Traces as they are published: read, cut, sampled; and how a wrong one is refused."""

from pathlib import Path

import pytest

from lightrl.errors import SimError
from lightrl.sim.inputs.traces import TraceEvent, always_there, cut, read_trace, sample
from scripts.studies.published_lib.synthetic import synthetic_trace

# Rows as in Bamboo's: whole milliseconds, names without a pattern that means anything.
ROWS = "0,add,node1\n0,add,node2\n60000,remove,node1\n60000,add,node3\n180000,remove,node2\n"


@pytest.fixture
def trace(tmp_path: Path) -> tuple[TraceEvent, ...]:
    file = tmp_path / "p3.csv"
    file.write_text(ROWS)
    return read_trace(file)


def test_a_trace_is_read(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text("# spot\n0,add,a\n1500,add,b\n1500,remove,a\n")
    assert read_trace(file)[1:] == (TraceEvent(1.5, "b", True), TraceEvent(1.5, "a", False))


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("5,add,a\n4,add,b", ":2: '4,add,b': goes back in time"),
        ("5,add,a\n6,remove,b", ":2: '6,remove,b': node b is not there"),
        ("5,add,a\n6,add,a", ":2: '6,add,a': node a is there already"),
        ("x,add,a", "'x' is not a number"),
        ("-1,add,a", "-1 milliseconds cannot be"),
        ("1,start,a", "a row is milliseconds,add|remove,node"),
        ("1,add", "a row is"),
        ("", "the trace is empty"),
    ],
)
def test_an_impossible_trace_is_one_clear_line(tmp_path: Path, rows: str, complaint: str):
    file = tmp_path / "t.csv"
    file.write_text(rows)
    with pytest.raises(SimError) as error:
        read_trace(file)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_file_of_rows_is_refused(tmp_path: Path):
    with pytest.raises(SimError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    file = tmp_path / "t.bin"
    file.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(SimError, match="cannot be read"):
        read_trace(file)


def test_a_segment_begins_with_who_is_there(trace: tuple[TraceEvent, ...]):
    assert cut(trace, 30.0, 90.0) == (
        TraceEvent(0.0, "node1", True),
        TraceEvent(0.0, "node2", True),
        TraceEvent(30.0, "node1", False),
        TraceEvent(30.0, "node3", True),
    )
    # What happens at its first second has happened.
    assert cut(trace, 60.0, None) == (
        TraceEvent(0.0, "node2", True),
        TraceEvent(0.0, "node3", True),
        TraceEvent(120.0, "node2", False),
    )
    assert cut(trace, None, 180.0) == trace


@pytest.mark.parametrize(
    ("segment", "complaint"),
    [
        ((200.0, None), "--trace-from 200: the trace goes from 0 to 180 s"),
        ((None, 181.0), "--trace-to 181: the trace goes from 0 to 180 s"),
        ((-1.0, None), "--trace-from -1"),
        ((None, float("nan")), "--trace-to nan"),
        ((90.0, 30.0), "from 90 to 30 s has no length"),
        ((180.0, None), "from 180 to 180 s has no length"),
    ],
)
def test_a_segment_that_cannot_be_is_refused(
    trace: tuple[TraceEvent, ...], segment: tuple[float | None, float | None], complaint: str
):
    with pytest.raises(SimError) as error:
        cut(trace, *segment)
    assert complaint in str(error.value)


def test_a_segment_without_nodes_is_refused():
    trace = (TraceEvent(100.0, "a", True), TraceEvent(200.0, "a", False))
    with pytest.raises(SimError, match="no node of the trace is present from 10 to 50 s"):
        cut(trace, 10.0, 50.0)


def test_a_share_is_whole_nodes_and_repeats():
    trace = synthetic_trace(40, 20_000, up_s=300, down_s=100, seed=3)
    half = sample(trace, 0.5, seed=1)
    nodes = {e.node for e in half}
    assert len(nodes) == 20
    assert half == tuple(e for e in trace if e.node in nodes) == sample(trace, 0.5, seed=1)
    assert nodes != {e.node for e in sample(trace, 0.5, seed=2)}
    assert nodes > {e.node for e in sample(trace, 0.25, seed=1)}
    assert sample(trace, 1.0, seed=1) == trace
    assert len({e.node for e in sample(trace, 0.001, seed=1)}) == 1


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_that_cannot_be_is_refused(trace: tuple[TraceEvent, ...], share: float):
    with pytest.raises(SimError, match="above 0, at most 1"):
        sample(trace, share, seed=0)


def test_nodes_that_stay_are_there_at_once():
    assert always_there(2) == (
        TraceEvent(0.0, "preemptible-0", True),
        TraceEvent(0.0, "preemptible-1", True),
    )


def test_a_synthetic_trace_repeats_and_is_there_as_often_as_asked(tmp_path: Path):
    trace = synthetic_trace(40, 20_000, up_s=300, down_s=100, seed=3)
    assert trace == synthetic_trace(40, 20_000, up_s=300, down_s=100, seed=3)
    file = tmp_path / "t.csv"
    file.write_text(
        "\n".join(f"{1000 * e.at_s},{'add' if e.added else 'remove'},{e.node}" for e in trace)
    )
    assert len(read_trace(file)) == len(trace)
    there = sum((-e.at_s if e.added else e.at_s) for e in trace)
    last = {e.node: e.added for e in trace}
    there += 20_000 * sum(last.values())
    assert there / (40 * 20_000) == pytest.approx(0.75, abs=0.05)
