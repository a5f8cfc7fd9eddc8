"""`lightrl compare`: how the settings of runs differ, and the results of each.

Reads run directories of runs that may be alive or over.
"""

import contextlib
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
from lightrl.config.run_file import CONFIG_FILE
from lightrl.config.values import flat
from lightrl.errors import ConfigError, LightRLError
from lightrl.launch.report import read_summary
from lightrl.metrics.sinks import read
from lightrl.wire import to_json

LAST_STEPS = 10  # whose means are the result of a run
# a set's, not those of its sources
OF_A_SET = re.compile(r"eval/[^/]+/(avg|pass)@\d+")
OF_THE_RUN = ("run.name", "run.dir", "run.bind")  # differ in any case
MEANS = ("reward/mean", "response_length/mean", "entropy", "kl/ref")

Figures = dict[str, float | str | None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run. `settings`: dotted keys. `figures`: by the names that are shown, None = unknown."""

    name: str
    settings: dict[str, Any]
    figures: Figures


def result_of(run_dir: Path) -> RunResult:
    """Raises ConfigError, one line, for a folder that is no run's."""
    try:
        settings = dict(flat(tomllib.loads((run_dir / CONFIG_FILE).read_text("utf-8"))))
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: is no run directory: it has no {CONFIG_FILE}") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{run_dir / CONFIG_FILE}: cannot be read: {e}") from None
    return RunResult(run_dir.resolve().name, settings, _figures(run_dir))


def with_distinct_names(runs: Sequence[RunResult], folders: Sequence[Path]) -> list[RunResult]:
    """Name runs with the same name by their path."""
    count = Counter(run.name for run in runs)
    return [
        replace(run, name=relative(folder.resolve())) if count[run.name] > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]


def differences(runs: Sequence[RunResult]) -> dict[str, list[Any]]:
    """Map the keys in which runs differ to their values; None if a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in OF_THE_RUN)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if any(v != each[0] for v in each)}


def _figures_of_all(runs: Sequence[RunResult]) -> dict[str, list[float | str | None]]:
    """Map the names that any run has, in the order of those with the most, to their values."""
    longest = sorted(runs, key=lambda run: -len(run.figures))
    names = dict.fromkeys(name for run in longest for name in run.figures)
    return {name: [run.figures.get(name) for run in runs] for name in names}


def as_json(runs: Sequence[RunResult]) -> str:
    names = [run.name for run in runs]
    tables = {"settings": differences(runs), "figures": _figures_of_all(runs)}
    return to_json({"runs": names, **tables}).decode()


def as_table(runs: Sequence[RunResult]) -> Table:
    """A column for each run: the settings that differ, then the results. Long texts are folded, not
    cut, so that two paths never look alike."""
    names = ("", *(run.name for run in runs))
    # as Text: a user's text may look like rich's markup
    table = Table(*(Column(Text(name), overflow="fold") for name in names), box=box.SIMPLE_HEAD)
    for key, values in differences(runs).items():
        table.add_row(Text(key), *(Text("-" if v is None else str(v)) for v in values))
    table.add_section()
    for name, figures in _figures_of_all(runs).items():
        table.add_row(Text(name), *map(_shown, figures))
    return table


def _figures(run_dir: Path) -> Figures:
    records = read(run_dir)
    steps = [r for r in records if "reward/mean" in r]
    summary: dict[str, Any] = {}
    with contextlib.suppress(LightRLError):  # it still runs, or was killed
        summary = read_summary(run_dir)

    def mean(name: str) -> float | None:
        values = [r[name] for r in steps[-LAST_STEPS:] if name in r]
        return statistics.fmean(values) if values else None

    seconds = [r["timing_s/step"] for r in steps]
    return {
        "state": summary.get("state", "not over"),
        "steps": float(len(steps)),
        **_evaluations(records),
        **{name: mean(name) for name in MEANS},
        "seconds": math.fsum(seconds) if seconds else None,
        "seconds of a step, median": statistics.median(seconds) if seconds else None,
        "rollout tokens": summary.get("rollout_tokens"),
        "rollout tokens a second": mean("perf/rollout_tokens_per_s"),
        "US$": mean("cost/usd"),
    }


def _evaluations(records: Sequence[dict[str, float]]) -> Figures:
    """Return the mean over the sets, and the scores of each set if there are several."""
    found = [{k: v for k, v in r.items() if OF_A_SET.fullmatch(k)} for r in records]
    averages = [[v for k, v in r.items() if "/avg@" in k] for r in found]
    scores = [statistics.fmean(each) for each in averages if each]
    figures: Figures = {
        "evaluation, first": scores[0] if scores else None,
        "evaluation, last": scores[-1] if scores else None,
        "evaluation, best": max(scores, default=None),
    }
    is_one = max(map(len, averages), default=0) == 1  # then the mean is its own
    for name in dict.fromkeys(name for r in found for name in r):
        if not is_one or "/pass@" in name:
            values = [r[name] for r in found if name in r]
            figures |= {f"{name}, first": values[0], f"{name}, last": values[-1]}
    return figures


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
