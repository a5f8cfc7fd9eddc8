"""Format the result of `lightrl eval` as a table or as JSON. Reads the run directory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightrl.config.schema import Config
from lightrl.errors import LightRLError
from lightrl.launch.evaluation.target import EvalTarget
from lightrl.launch.report import read_summary
from lightrl.metrics import sinks
from lightrl.metrics.display import aligned
from lightrl.wire import to_json

EVAL_SECONDS = "eval/seconds"
COLUMNS = "SET PROMPTS SAMPLES AVG@K PASS@1 PASS@K LENGTH CLIP_RATIO FAILURES"


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation. `figures`: all figures by their names in metrics.jsonl."""

    target: EvalTarget
    config: Config
    figures: Mapping[str, float]
    # by name of the set
    num_prompts: Mapping[str, int]
    # duration without start-up
    seconds: float
    # content of summary.json
    summary: Mapping[str, Any]

    @property
    def num_responses(self) -> int:
        """Return the number of responses to all prompts."""
        sets = self.config.eval_sets
        return sum(self.num_prompts[s.name] * self.config.eval_sampling(s).samples for s in sets)


def result_of(target: EvalTarget, config: Config, run_dir: Path) -> EvalResult:
    """Read the result from the files in `run_dir`. Raises LightRLError if a file is missing."""
    try:
        record = sinks.read(run_dir)[-1]
        seconds = record.pop(EVAL_SECONDS)
        summary = read_summary(run_dir)
    except (LookupError, LightRLError):
        where = f"{run_dir}: has no figures"
        raise LightRLError(f"{where}; if the disk is full, use another: TMPDIR=DIR") from None
    figures = {name: value for name, value in record.items() if name.startswith("eval/")}
    return EvalResult(target, config, figures, summary["eval_prompts"], seconds, summary)


def table(result: EvalResult) -> list[str]:
    """Return a line for each set, followed by a line for each of its sources."""
    return aligned([COLUMNS.split(), *_rows(result)], bool)


def _rows(result: EvalResult) -> Iterator[Sequence[str]]:
    for one in result.config.eval_sets:
        samples, prefix = result.config.eval_sampling(one).samples, f"eval/{one.name}/"
        names = (name[len(prefix) :] for name in result.figures if name.startswith(prefix))
        for source in sorted({"", *(name.rpartition("/")[0] for name in names)}):
            place = f"{prefix}{source}/" if source else prefix
            cells = _cells(result.figures, place, samples)
            if source:
                yield (f"  {source}", "", "", *cells)
            else:
                yield (one.name, f"{result.num_prompts[one.name]:,}", f"{samples}", *cells)


def _cells(figures: Mapping[str, float], prefix: str, k: int) -> list[str]:
    names = (f"avg@{k}", "pass@1", f"pass@{k}", "length", "clip_ratio", "failures")
    forms = (".3f", ".3f", ".3f", ".1f", ".3f", ",.0f")
    return [format(figures[prefix + n], form) for n, form in zip(names, forms, strict=True)]


def last_lines(result: EvalResult, file: Path | None) -> list[str]:
    """Return the lines below the table."""
    summary = result.summary
    digest, total_s = str(summary["weights_digest"])[:16], summary["total_wall_s"]
    tokens = f"{summary['eval_tokens']:,} tokens"
    return [
        f"{result.target.path}, step {result.target.step}, weights {digest}",
        f"{tokens} in {result.seconds:.1f} s, {total_s:.1f} s with start-up",
        *([f"responses: {file}"] if file is not None else []),
    ]


def as_json(result: EvalResult, file: Path | None) -> str:
    """Return one line of JSON. Figures have the same names as in metrics.jsonl."""
    sets = {
        one.name: {
            "path": one.path,
            "prompts": result.num_prompts[one.name],
            **asdict(result.config.eval_sampling(one)),
        }
        for one in result.config.eval_sets
    }
    line = {
        "checkpoint": result.target.path,
        "step": result.target.step,
        "weights_digest": result.summary["weights_digest"],
        "sets": sets,
        "figures": dict(result.figures),
        "tokens": result.summary["eval_tokens"],
        "seconds": result.seconds,
        "samples": str(file) if file is not None else None,
    }
    return to_json(line).decode()
