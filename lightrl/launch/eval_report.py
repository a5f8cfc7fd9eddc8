"""The result of `lightrl eval`: a table for people, JSON for machines.

Reads what the run has left; starts and stops nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightrl.config.schema import Config
from lightrl.errors import LightRLError
from lightrl.launch.eval_target import EvalTarget
from lightrl.metrics import sinks
from lightrl.metrics.display import aligned
from lightrl.wire import from_json, to_json

EVAL_SECONDS = "eval/seconds"
COLUMNS = "SET PROMPTS SAMPLES AVG@K PASS@1 PASS@K LENGTH CLIP_RATIO FAILURES"
INDENT = "  "  # of a source of the set above


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Of an evaluation that has ended. `figures`: of its sets, by their names in metrics.jsonl."""

    target: EvalTarget
    config: Config
    figures: Mapping[str, float]
    # of each set, by its name
    num_prompts: Mapping[str, int]
    # without start-up
    seconds: float
    # summary.json
    summary: Mapping[str, Any]

    @property
    def num_responses(self) -> int:
        """To all prompts."""
        names = {one.name: self.config.eval_sampling(one).samples for one in self.config.eval_sets}
        return sum(self.num_prompts[name] * samples for name, samples in names.items())

    @property
    def num_tokens(self) -> int:
        return int(self.summary["eval_tokens"])


def result_of(target: EvalTarget, config: Config, run_dir: Path) -> EvalResult:
    """Raises LightRLError if the files are not there."""
    try:
        record = sinks.read(run_dir)[-1]
        seconds = record.pop(EVAL_SECONDS)
        summary = from_json((run_dir / "summary.json").read_bytes(), dict[str, Any])
    except (LookupError, OSError):
        where = f"{run_dir}: the figures were not written there"
        raise LightRLError(f"{where}; is there no room left? TMPDIR=DIR moves it") from None
    figures = {name: value for name, value in record.items() if name.startswith("eval/")}
    return EvalResult(target, config, figures, summary["eval_prompts"], seconds, summary)


def table(result: EvalResult) -> list[str]:
    """A line for each set, and below it one for each of its sources."""
    return aligned([COLUMNS.split(), *_rows(result)], bool)


def _rows(result: EvalResult) -> Iterator[Sequence[str]]:
    for one in result.config.eval_sets:
        how = result.config.eval_sampling(one)
        prefix = f"eval/{one.name}/"
        inside = [name[len(prefix) :] for name in result.figures if name.startswith(prefix)]
        sources = sorted({name.rpartition("/")[0] for name in inside} - {""})
        num = f"{result.num_prompts[one.name]:,}"
        yield (one.name, num, f"{how.samples}", *_cells(result.figures, prefix, how.samples))
        for source in sources:
            cells = _cells(result.figures, f"{prefix}{source}/", how.samples)
            yield (f"{INDENT}{source}", "", "", *cells)


def _cells(figures: Mapping[str, float], prefix: str, k: int) -> Iterator[str]:
    for name in (f"avg@{k}", "pass@1", f"pass@{k}"):
        yield f"{figures[prefix + name]:.3f}"
    yield f"{figures[prefix + 'length']:.1f}"
    yield f"{figures[prefix + 'clip_ratio']:.3f}"
    yield f"{figures[prefix + 'failures']:,.0f}"


def last_lines(result: EvalResult, file: Path | None) -> list[str]:
    """The lines below the table."""
    target, version = result.target, result.summary.get("weights_digest")
    total_s = float(result.summary["total_wall_s"])
    took = f"{result.seconds:.1f} s, {total_s:.1f} s with start-up"
    return [
        f"{target.path}, step {target.step}, weights {str(version)[:16]}",
        f"{result.num_tokens:,} tokens in {took}",
        *([f"responses: {file}"] if file is not None else []),
    ]


def as_json(result: EvalResult, file: Path | None) -> str:
    """One line. Figures have the names that they have in metrics.jsonl of a run."""
    settings = {
        one.name: {
            "path": one.path,
            "prompts": result.num_prompts[one.name],
            **asdict(result.config.eval_sampling(one)),
        }
        for one in result.config.eval_sets
    }
    return to_json(
        {
            "checkpoint": result.target.path,
            "step": result.target.step,
            "weights_digest": result.summary.get("weights_digest"),
            "sets": settings,
            "figures": dict(result.figures),
            "tokens": result.num_tokens,
            "seconds": result.seconds,
            "samples": str(file) if file is not None else None,
        }
    ).decode()
