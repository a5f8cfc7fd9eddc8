"""`lightrl compare`: how the settings of runs differ, and the results of each.

Reads run directories; starts nothing and needs no run to be alive.
"""

import json
import math
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from lightrl.client.address import relative
from lightrl.config.values import flat
from lightrl.errors import ConfigError
from lightrl.metrics.sinks import read
from lightrl.wire import to_json

LAST_STEPS = 10  # whose mean is shown as where a run ended
# a set's, not those of its sources
OF_A_SET = re.compile(r"eval/[^/]+/(avg|pass)@\d+")
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
        settings = dict(flat(tomllib.loads((run_dir / "config.toml").read_text("utf-8"))))
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: is no run directory: it has no config.toml") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{run_dir / 'config.toml'}: cannot be read: {e}") from None
    return RunResult(run_dir.resolve().name, settings, _figures(run_dir))


def with_distinct_names(runs: Sequence[RunResult], folders: Sequence[Path]) -> list[RunResult]:
    """Runs with the same name by their path."""
    count = Counter(run.name for run in runs)
    return [
        replace(run, name=relative(folder.resolve())) if count[run.name] > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]


def differences(runs: Sequence[RunResult]) -> dict[str, list[Any]]:
    """Keys of which some runs have other values than others; None where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in OF_THE_RUN)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if any(v != each[0] for v in each)}


def as_json(runs: Sequence[RunResult]) -> str:
    return to_json(
        {
            "runs": [run.name for run in runs],
            "settings": differences(runs),
            "figures": {name: [run.figures.get(name) for run in runs] for name in _names(runs)},
        }
    ).decode()


def as_table(runs: Sequence[RunResult]) -> Table:
    """A column for each run: the settings that differ, then the results. Long texts are folded: cut
    off, two names or paths may look alike."""
    names = ("", *(run.name for run in runs))
    # as Text: what a user wrote may look like rich's markup
    columns = (Column(Text(name), overflow="fold") for name in names)
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for key, values in differences(runs).items():
        table.add_row(Text(key), *(Text("-" if v is None else str(v)) for v in values))
    table.add_section()
    for name in _names(runs):
        table.add_row(Text(name), *(_shown(run.figures.get(name)) for run in runs))
    return table


def _names(runs: Sequence[RunResult]) -> list[str]:
    """Of what any of them has, in the order of those with the most."""
    longest = sorted(runs, key=lambda run: -len(run.figures))
    return list(dict.fromkeys(name for run in longest for name in run.figures))


def _figures(run_dir: Path) -> dict[str, float | str | None]:
    records = read(run_dir)
    steps = [r for r in records if "reward/mean" in r]
    last = steps[-LAST_STEPS:]
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
        **_evaluations(records),
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


def _evaluations(records: Sequence[dict[str, float]]) -> dict[str, float | str | None]:
    """The mean over the sets, and what each came to where there are several."""
    found = [{k: v for k, v in r.items() if OF_A_SET.fullmatch(k)} for r in records]
    averages = [[v for k, v in r.items() if "/avg@" in k] for r in found]
    scores = [statistics.fmean(each) for each in averages if each]
    figures: dict[str, float | str | None] = {
        "evaluation, first": scores[0] if scores else None,
        "evaluation, last": scores[-1] if scores else None,
        "evaluation, best": max(scores, default=None),
    }
    names = list(dict.fromkeys(name for r in found for name in r))
    if max(map(len, averages), default=0) == 1:  # the mean is the only set's
        names = [name for name in names if "/pass@" in name]
    for name in names:
        values = [r[name] for r in found if name in r]
        figures |= {f"{name}, first": values[0], f"{name}, last": values[-1]}
    return figures


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
