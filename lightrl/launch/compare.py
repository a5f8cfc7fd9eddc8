"""`lightrl compare`: what runs were told differently, and what came of each.

Reads run directories; starts nothing and needs no run to be alive.
"""

import json
import math
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lightrl.errors import ConfigError
from lightrl.metrics.sinks import read

LAST_STEPS = 10  # whose mean is shown as where a run ended
OF_THE_RUN = ("run.name", "run.dir", "run.bind")  # differ in any case


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run. `settings`: dotted keys. `figures`: by the names that are shown, None = unknown."""

    name: str
    settings: dict[str, Any]
    figures: dict[str, float | str | None]


def result_of(run_dir: Path) -> RunResult:
    """Raises ConfigError, one line, for a folder that is no run's."""
    try:
        settings = dict(_flat(tomllib.loads((run_dir / "config.toml").read_text())))
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: is no run directory: it has no config.toml") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{run_dir / 'config.toml'}: cannot be read: {e}") from None
    return RunResult(run_dir.resolve().name, settings, _figures(run_dir))


def differences(runs: Sequence[RunResult]) -> dict[str, list[Any]]:
    """Keys of which some runs have other values than others; None where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in OF_THE_RUN)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if any(v != each[0] for v in each)}


def as_json(runs: Sequence[RunResult]) -> str:
    return json.dumps(
        {
            "runs": [run.name for run in runs],
            "settings": differences(runs),
            "figures": {name: [run.figures[name] for run in runs] for name in runs[0].figures},
        }
    )


def as_table(runs: Sequence[RunResult]) -> Table:
    """A column for each run: what it was told differently, then what came of it."""
    table = Table("", *(run.name for run in runs), box=box.SIMPLE_HEAD)
    for key, values in differences(runs).items():
        table.add_row(key, *("-" if v is None else str(v) for v in values))
    table.add_section()
    for name in runs[0].figures:
        table.add_row(name, *(_shown(run.figures[name]) for run in runs))
    return table


def _figures(run_dir: Path) -> dict[str, float | str | None]:
    records = read(run_dir)
    steps = [r for r in records if "reward/mean" in r]
    last = steps[-LAST_STEPS:]
    scores = [v for r in records for k, v in r.items() if k.startswith("eval/") and "/avg@" in k]
    try:
        summary = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        summary = {}  # it is still running, or was killed

    def mean(name: str) -> float | None:
        values = [r[name] for r in last if name in r]
        return statistics.fmean(values) if values else None

    seconds = [r["timing_s/step"] for r in steps]
    return {
        "state": summary.get("state", "not over"),
        "steps": float(len(steps)),
        "evaluation, first": scores[0] if scores else None,
        "evaluation, last": scores[-1] if scores else None,
        "evaluation, best": max(scores, default=None),
        "reward/mean": mean("reward/mean"),
        "response_length/mean": mean("response_length/mean"),
        "entropy": mean("entropy"),
        "kl/ref": mean("kl/ref"),
        "seconds": math.fsum(seconds) if seconds else None,
        "seconds of a step, median": statistics.median(seconds) if seconds else None,
        "rollout tokens": summary.get("rollout_tokens"),
        "rollout tokens a second": mean("perf/rollout_tokens_per_s"),
        "US$": mean("cost/usd"),
    }


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
