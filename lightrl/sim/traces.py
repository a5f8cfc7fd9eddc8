"""When nodes come and go: spot traces from files, or made up from a seed.

Owns the format and its validation. A trace is a CSV file in the layout of the Bamboo traces
(uclasystem/bamboo, NSDI 2023): rows `milliseconds,add|remove,node`, sorted by time.
"""

import math
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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise SimError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
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
