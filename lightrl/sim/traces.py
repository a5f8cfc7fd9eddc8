"""When nodes come and go: spot traces from files, or made up from a seed.

Owns the format and its validation. A trace is a CSV file in the layout of the Bamboo traces
(uclasystem/bamboo, NSDI 2023): rows `milliseconds,add|remove,node`, sorted by time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import SimError
from lightrl.sim.workload import uniforms


@dataclass(frozen=True, slots=True)
class TraceEvent:
    at_s: float
    node: str
    # else it is gone, without warning
    added: bool


def read_trace(path: Path) -> tuple[TraceEvent, ...]:
    """Raises SimError with file and line number for the first row that cannot be."""
    text = read_text(path)
    events: list[TraceEvent] = []
    present: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            event = _row(line)
            if events and event.at_s < events[-1].at_s:
                raise ValueError(f"goes back in time, from {1000 * events[-1].at_s:.0f} ms")
            if event.added == (event.node in present):
                raise ValueError(
                    f"node {event.node} is " + ("there already" if event.added else "not there")
                )
        except ValueError as e:
            raise SimError(f"{path}:{number}: {line.strip()[:60]!r}: {e}") from None
        (present.add if event.added else present.discard)(event.node)
        events.append(event)
    if not events:
        raise SimError(f"{path}: the trace is empty; rows are milliseconds,add|remove,node")
    return tuple(events)


def read_text(path: Path) -> str:
    """Raises SimError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise SimError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _row(line: str) -> TraceEvent:
    fields = [f.strip() for f in line.split(",")]
    if len(fields) != 3 or fields[1] not in {"add", "remove"} or not fields[2]:
        raise ValueError("a row is milliseconds,add|remove,node")
    try:
        milliseconds = float(fields[0])
    except ValueError:
        raise ValueError(f"{fields[0]!r} is not a number of milliseconds") from None
    if not math.isfinite(milliseconds) or milliseconds < 0:
        raise ValueError(f"{fields[0]} milliseconds cannot be")
    return TraceEvent(milliseconds / 1000, fields[2], fields[1] == "add")


def sample(trace: Sequence[TraceEvent], share: float, seed: int) -> tuple[TraceEvent, ...]:
    """What becomes of this share of the nodes, at least of one; chosen by the seed and their names
    alone. Raises SimError."""
    if not 0 < share <= 1:
        raise SimError(f"--trace-share {share:g}: above 0, at most 1")
    nodes = sorted({e.node for e in trace}, key=lambda n: (uniforms(seed, n, "trace")[0], n))
    chosen = set(nodes[: max(1, round(share * len(nodes)))])
    return tuple(e for e in trace if e.node in chosen)


def cut(
    trace: Sequence[TraceEvent], from_s: float | None, to_s: float | None
) -> tuple[TraceEvent, ...]:
    """The segment between these seconds, which begins at 0 with the nodes that are there by then.

    Whoever is there at its end stays. Raises SimError for a segment that the trace does not have.
    """
    end_s = trace[-1].at_s
    for option, value in (("--trace-from", from_s), ("--trace-to", to_s)):
        if value is not None and not 0 <= value <= end_s:
            raise SimError(f"{option} {value:g}: the trace goes from 0 to {end_s:g} s")
    begin_s, until_s = from_s or 0.0, end_s if to_s is None else to_s
    if begin_s >= until_s:
        raise SimError(f"the segment of the trace from {begin_s:g} to {until_s:g} s has no length")
    there: dict[str, None] = {}
    for event in trace:
        if event.at_s <= begin_s:
            there[event.node] = None
            if not event.added:
                del there[event.node]
    segment = [TraceEvent(0.0, node, True) for node in there]
    segment += [
        TraceEvent(e.at_s - begin_s, e.node, e.added) for e in trace if begin_s < e.at_s <= until_s
    ]
    if not segment:
        raise SimError(f"no node of the trace is there from {begin_s:g} to {until_s:g} s")
    return tuple(segment)


def always_there(count: int) -> tuple[TraceEvent, ...]:
    """Nodes that could go at any time, and do not."""
    return tuple(TraceEvent(0.0, f"preemptible-{k}", True) for k in range(count))


def synthetic_trace(
    num_nodes: int, duration_s: float, up_s: float, down_s: float, seed: int = 0
) -> tuple[TraceEvent, ...]:
    """Each node by itself is there for `up_s` and away for `down_s` on average, both exponential.

    At the start, each is there with the chance that it is there at any other time.
    """
    if num_nodes < 1 or min(duration_s, up_s, down_s) <= 0:
        raise SimError("a synthetic trace needs at least one node and positive times")
    events: list[TraceEvent] = []
    for k in range(num_nodes):
        node, at = f"spot-{k}", 0.0
        up = uniforms(seed, node, "first")[0] < up_s / (up_s + down_s)
        for n in range(1_000_000):
            if n > 0 or up:
                events.append(TraceEvent(at, node, up))
            at -= math.log(uniforms(seed, node, n)[0]) * (up_s if up else down_s)
            up = not up
            if at >= duration_s:
                break
    return tuple(sorted(events, key=lambda e: (e.at_s, e.node)))
