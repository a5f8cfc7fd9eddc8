"""What scripts/gpu prints at its end: a table, the figures, one JSON line. Pure text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_lib.probe import advice
from gpu_lib.runner import Result


def table(machine: dict[str, Any], results: Sequence[Result]) -> str:
    """Several lines: the machine, a line for each part, a line for each figure."""
    versions = {k: v for k, v in machine["versions"].items() if v}
    gpu = machine.get("gpu") or f"no GPU to use ({machine['why_no_cuda']})"
    lines = [
        f"Python {machine['python']}, {', '.join(f'{k} {v}' for k, v in versions.items())}",
        f"{gpu}, driver {machine['driver'] or 'not found'}",
    ]
    if machine["missing"]:
        lines.append(advice(machine["missing"]))
    lines.append(
        f"\n{'part':20} {'state':8} {'s':>5} {'passed':>7} {'failed':>7} {'skipped':>8}  about it"
    )
    for r in results:
        counts = (
            f"{r.passed:7} {len(r.failed):7} {len(r.skipped):8}"
            if r.passed or r.failed or r.skipped
            else " " * 24
        )
        lines.append(
            f"{r.part.name:20} {r.state:8} {r.seconds:5.0f} {counts}  {r.why or r.part.what}"
        )
    if late := [r.part.name for r in results if r.lacked_time]:
        lines.append(f"\nfor what had no time left: scripts/gpu --only {','.join(late)}")
    figures = [(r.part.name, name, value) for r in results for name, value in r.figures.items()]
    if figures:
        lines.append("\nfigures")
        lines += [f"{part:20} {name:60} {_shown(value)}" for part, name, value in figures]
    return "\n".join(lines)


def as_json(machine: dict[str, Any], results: Sequence[Result], device: str, log: Path) -> str:
    """One line."""
    parts = {
        r.part.name: {
            "state": r.state,
            "why": r.why,
            "seconds": round(r.seconds, 1),
            "passed": r.passed,
            "failed": r.failed,
            "skipped": r.skipped,
            "figures": r.figures,
        }
        for r in results
    }
    return json.dumps(
        {"device": device, "machine": machine, "parts": parts, "log": str(log.resolve())}
    )


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
