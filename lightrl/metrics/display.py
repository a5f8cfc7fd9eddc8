"""Numbers as text for people: counts, durations, bars and sparklines, each of a known width."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from lightrl.messages.snapshot import CostRow, NodeRow, Snapshot
from lightrl.messages.weights import WeightsProgress

BLOCKS = "▁▂▃▄▅▆▇█"
NO_BLOCK = "·"  # a value that is not finite
# by the state of a node that shares devices
SIDES = {"ready": "samples", "draining": "samples", "released": "trains"}
CHANGES = "changes"


def count(value: float) -> str:
    """Return at most five characters. Examples: 999, 1.2k, 412k, 3.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def aligned(rows: Sequence[Sequence[str]], is_right: Callable[[int], bool]) -> list[str]:
    """Return rows of a table as lines, in columns two spaces apart; `is_right`: whether a column is
    aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_side = [str.rjust if is_right(i) else str.ljust for i in range(len(widths))]
    columns = list(zip(to_side, widths, strict=True))
    cells = ([to(c, w) for c, (to, w) in zip(row, columns, strict=True)] for row in rows)
    return ["  ".join(line).rstrip() for line in cells]


def duration(seconds: float) -> str:
    """Examples: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def speculation(metrics: Mapping[str, float]) -> str:
    """Return at most 67 characters; "" if no engine speculated.

    Example: 62% of 412k tokens kept · 2.10 tokens a forward · history 640MB
    """
    per_forward = metrics.get("speculation/tokens_per_forward")
    if per_forward is None:
        return ""
    acceptance = metrics.get("speculation/acceptance")
    kept = "nothing drafted"
    if acceptance is not None:
        kept = f"{acceptance:.0%} of {count(metrics.get('speculation/drafted', 0.0))} tokens kept"
    line = f"{kept} · {per_forward:.2f} tokens a forward"
    size = metrics.get("history/bytes")
    return line if size is None else f"{line} · history {count(size)}B"


def sides(nodes: Iterable[NodeRow]) -> list[str]:
    """Return a line for each trainer node whose devices change sides in parts: on which side each
    part is, and for how long.

    Example: trainer-0: part 0 samples 1:02, part 1 trains 0:03
    """
    parts: dict[tuple[str, int], list[NodeRow]] = {}
    for n in nodes:
        if n.part is not None:
            parts.setdefault((n.shares, n.part), []).append(n)
    lines: dict[str, list[str]] = {}
    for (trainer, part), users in sorted(parts.items(), key=lambda item: item[0]):
        found = {SIDES.get(n.state, CHANGES) for n in users}
        side = found.pop() if len(found) == 1 else CHANGES
        since = duration(min(n.state_s or 0.0 for n in users))
        lines.setdefault(trainer, []).append(f"part {part} {side} {since}")
    return [f"{trainer}: {', '.join(parts)}" for trainer, parts in lines.items()]


def pulling(progress: WeightsProgress | None) -> str:
    """Return at most 38 characters; "" if nothing is pulled.

    Example: v12 34% of 15.2GB from 3 sources
    """
    if progress is None:
        return ""
    share = progress.num_bytes / progress.total_bytes if progress.total_bytes else 0.0
    sources = f"{progress.num_sources} source{'' if progress.num_sources == 1 else 's'}"
    return (
        f"v{progress.policy_version} {share:.0%} of {count(progress.total_bytes)}B from {sources}"
    )


def weights(metrics: Mapping[str, float]) -> str:
    """Return how the newest version was distributed; "" before the first one.

    Example: 15.2G moved, 62% from peers · published in 2.1 s · pulled in 3.4 s · paused 0.8 s
    Example: 60.8G moved · published in 2.1 s · broadcast to 4 in 1.4 s · paused 1.5 s
    """
    moved = metrics.get("weights/bytes")
    if moved is None:
        return ""
    parts = [f"{count(moved)}B moved"]
    if moved and (peers := metrics.get("weights/from_peers", 0.0)):
        parts[0] += f", {min(1.0, peers / moved):.0%} from peers"
    if (ratio := metrics.get("weights/delta_ratio")) is not None and ratio < 1:
        parts.append(f"{ratio:.1%} of the whole")
    nodes = metrics.get("weights/broadcast_nodes", 0.0)
    for name, what in (
        ("publish_s", "published in"),
        ("broadcast_s", f"broadcast to {nodes:.0f} in"),
        ("pull_s", "pulled in"),
        ("pause_s", "paused"),
    ):
        seconds = metrics.get(f"weights/{name}")
        if seconds is not None and (seconds or name != "pull_s" or not nodes):
            parts.append(f"{what} {seconds:.2f} s")
    return " · ".join(parts)


def usd(value: float) -> str:
    """Example: 1,234.50, 0.0123"""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def sizes(metrics: Mapping[str, float]) -> str:
    """Return the size of engines in devices, where several sizes take turns; else "".

    Example: 4 devices an engine, 2 in the last round · 12 KV preemptions in it · 3 changes
    """
    if (size := metrics.get("planner/parallel")) is None:
        return ""
    now = metrics.get("planner/next_parallel", size)
    devices = f"{now:.0f} device{'s' if now != 1 else ''} an engine"
    preempted = f"{count(metrics.get('planner/preemptions', 0.0))} KV preemptions in"
    last = "the last round"
    if size != now:
        devices, last = f"{devices}, {size:.0f} in {last}", "it"
    switches = metrics.get("planner/switches", 0.0)
    return f"{devices} · {preempted} {last} · {switches:.0f} change{'s' if switches != 1 else ''}"


def cost(row: CostRow | None) -> str:
    """Return the cost of the run so far; "" if prices are not known.

    Example: 12.30 US$ · 0.41 a step · 3.10 a million tokens
    """
    if row is None or row.usd is None:
        return ""
    parts = [f"{usd(row.usd)} US$"]
    if row.usd_per_step is not None:
        parts.append(f"{usd(row.usd_per_step)} a step")
    if row.usd_per_million_tokens is not None:
        parts.append(f"{usd(row.usd_per_million_tokens)} a million tokens")
    return " · ".join(parts)


def responses(s: Snapshot) -> str:
    """Return the responses of the open rounds by state; only episodes wait."""
    waiting = f"{s.responses_waiting} waiting, " if s.responses_waiting else ""
    running = f"{s.responses_running} running, {s.responses_queued} queued, "
    return f"{running}{waiting}{s.responses_done} done"


def step_lines(s: Snapshot) -> list[tuple[str, str]]:
    """Return labels and lines: drafts, weights and sizes of engines in the last step; cost so
    far."""
    lines = (
        ("drafts", speculation(s.metrics)),
        ("weights", weights(s.metrics)),
        ("sizes", sizes(s.metrics)),
        ("cost", cost(s.cost)),
    )
    return [(label, line) for label, line in lines if line]


def bar(share: float, width: int) -> str:
    """Return `width` characters, of which `share` are filled, in steps of half a character."""
    halves = round(min(max(share, 0.0), 1.0) * width * 2)
    full, half = divmod(halves, 2)
    return ("━" * full + "╸" * half).ljust(width)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` characters, scaled between the smallest and the largest finite value.
    More values than that are averaged: see `shrink`."""
    visible = shrink(values, width)
    if not visible:
        return ""
    finite = [v for v in visible if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = 7 / (high - low) if high - low >= 1e-12 else 0.0
    return "".join(
        # one block of middle height where all are equal
        (BLOCKS[round((v - low) * scale) if scale else 3] if math.isfinite(v) else NO_BLOCK)
        for v in visible
    )


def shrink(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` means over neighbouring values. Example: shrink((1, 3, 5, 7), 2) = [2,
    6]."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def columns(counts: Sequence[int]) -> str:
    """Return one block for each count, scaled to the largest; a blank for zero."""
    top = max(counts, default=0)
    return "".join(" " if not c else BLOCKS[max(0, round(c / top * 8) - 1)] for c in counts)


def cut(text: str, width: int) -> str:
    """Return `text` on one line of at most `width` characters, with an ellipsis if it is longer."""
    flat = printable(" ".join(text.split()))
    return flat if len(flat) <= width else flat[: max(0, width - 1)] + "…"


def printable(text: str) -> str:
    """Return `text` without control characters: it may be from a model or a peer."""
    return "".join(c if c.isprintable() else "·" for c in text)


def chain(scores: Sequence[tuple[int, float]], room: int) -> str:
    """Return the evaluations of a set: the oldest, and as many of the latest as fit."""
    steps = [f"{score:.3f} @{step}" for step, score in scores]
    kept = steps[-1:]
    for text in reversed(steps[1:-1]):
        if len(" → ".join([steps[0], "…", text, *kept])) > room:
            break
        kept.insert(0, text)
    if len(steps) == 1:
        return steps[0]
    gap = [] if len(kept) == len(steps) - 1 else ["…"]
    return cut(" → ".join([steps[0], *gap, *kept]), room)
