"""What speculation brought in a finished run: from its metrics.jsonl, for simulations of that run.

Owns the meaning of those figures. A step counts as one with history if all its prompts came for the
second time or later, as one without if all came for the first time, by its round in lengths.jsonl;
others say nothing. What a run does not say, and lines that cannot be read, change nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lightrl.history import lengths
from lightrl.metrics import sinks
from lightrl.sim.engine_profile import SimSpeculation
from lightrl.system.append_file import read_rows

ACCEPTANCE = "speculation/acceptance"  # accepted / drafted tokens
TOKENS = "speculation/tokens_per_forward"
MOST = 0.99  # likely that a token is the sampled one, at most; the model needs less than 1


def measured(run_dir: Path, assumed: SimSpeculation) -> SimSpeculation | None:
    """`assumed` with what the run measured; None if it did not speculate."""
    steps = _steps(run_dir)
    found: dict[
        bool, list[tuple[int, float, float]]
    ] = {}  # with history? -> (tokens, acceptance, per forward)
    for step, epochs, tokens in _rounds(run_dir):
        if step in steps and tokens and (min(epochs) > 0 or max(epochs) == 0):
            found.setdefault(min(epochs) > 0, []).append((tokens, *steps[step]))
    if not found:
        return None
    changes = {
        ("acceptance" if late else "first_acceptance"): _of(rows) for late, rows in found.items()
    }
    return replace(assumed, **cast("Any", changes))


def _of(rows: list[tuple[int, float, float]]) -> float:
    """Of steps together: means, by their tokens."""
    total = sum(tokens for tokens, _, _ in rows)
    acceptance = sum(tokens * a for tokens, a, _ in rows) / total
    return chance(acceptance, sum(tokens * t for tokens, _, t in rows) / total)


def chance(acceptance: float, tokens_per_forward: float) -> float:
    """How likely a drafted token is the sampled one, if those before it were: the model's
    acceptance.

    Accepted / drafted is less, since all that follows the first wrong token was drafted in vain. A
    forward pass drafts w = (tokens - 1) / acceptance tokens; sought is a with a + a^2 + ... + a^w =
    tokens - 1.
    """
    accepted = tokens_per_forward - 1
    window = accepted / acceptance if acceptance > 0 else 0.0
    if window <= 1:
        return min(acceptance, MOST)
    low, high = acceptance, MOST
    for _ in range(50):
        middle = (low + high) / 2
        if middle * (1 - middle**window) / (1 - middle) < accepted:
            low = middle
        else:
            high = middle
    return min(high, MOST)


def _steps(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Step of a round -> (acceptance, tokens per forward pass). A record counts the steps done."""
    steps: dict[int, tuple[float, float]] = {}
    for row in sinks.read(run_dir):
        values = [row.get(name) for name in ("step", ACCEPTANCE, TOKENS)]
        if all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            step, acceptance, tokens = cast("list[float]", values)
            if 0 <= acceptance <= 1 <= tokens:
                steps[int(step) - 1] = (acceptance, tokens)
    return steps


def _rounds(run_dir: Path) -> Iterator[tuple[int, set[int], int]]:
    """(step, epochs of its prompts, tokens) of the training rounds of a run."""
    for row in read_rows(run_dir / lengths.FILE_NAME, dict[str, Any]):
        if not isinstance(row.get("step"), int) or row.get("kind") == "eval":
            continue
        responses = cast("list[tuple[str, Any, int, int, bool]]", row.get("responses", []))
        epochs = {epoch for _, epoch, _, _, _ in responses}
        if epochs and all(isinstance(epoch, int) for epoch in epochs):
            yield row["step"], epochs, sum(tokens for _, _, _, tokens, _ in responses)
