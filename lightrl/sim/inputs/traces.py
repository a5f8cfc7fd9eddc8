"""When nodes join and leave: spot traces from files.

A trace is a CSV file in the layout of the Bamboo traces
(uclasystem/bamboo, NSDI 2023): rows `milliseconds,add|remove,node`, sorted by time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import SimError
from lightrl.sim.inputs.workload import uniforms


@dataclass(frozen=True, slots=True)
class TraceEvent:
    at_s: float
    node: str
    # False: it is lost without warning
    added: bool


def read_trace(path: Path) -> tuple[TraceEvent, ...]:
    """Raise SimError, with file and line number, for the first invalid row."""
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
    """Raise SimError if it cannot be read."""
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
    """Return the events of this share of the nodes, at least of one, chosen by the seed and their
    names. Raise SimError for a share that is not in (0, 1]."""
    if not 0 < share <= 1:
        raise SimError(f"--trace-share {share:g}: above 0, at most 1")
    nodes = sorted({e.node for e in trace}, key=lambda n: (uniforms(seed, n, "trace")[0], n))
    chosen = set(nodes[: max(1, round(share * len(nodes)))])
    return tuple(e for e in trace if e.node in chosen)


def cut(
    trace: Sequence[TraceEvent], from_s: float | None, to_s: float | None
) -> tuple[TraceEvent, ...]:
    """Return the segment between these seconds, shifted to begin at 0 with the nodes that are
    present by then. Raise SimError for a segment that the trace does not have."""
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
        raise SimError(f"no node of the trace is present from {begin_s:g} to {until_s:g} s")
    return tuple(segment)


def always_there(count: int) -> tuple[TraceEvent, ...]:
    """Return preemptible nodes that are never preempted."""
    return tuple(TraceEvent(0.0, f"preemptible-{k}", True) for k in range(count))
