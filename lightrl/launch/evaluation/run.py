"""`lightrl eval CHECKPOINT CONFIG`: a run of 0 steps in a temporary directory.

It is an ordinary run, which evaluates at its start; one process publishes the weights in place of a
trainer. So figures are those that a run finds at the same step.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.client.address import relative
from lightrl.client.find_run import final_snapshot
from lightrl.config.schema import Config
from lightrl.coordinator import samples
from lightrl.core.state import RunState
from lightrl.errors import ConfigError, LightRLError
from lightrl.launch.checks.checklist import Launch
from lightrl.launch.daemons import RunFailed
from lightrl.launch.evaluation.config import evaluation
from lightrl.launch.evaluation.report import as_json, last_lines, result_of, table
from lightrl.launch.evaluation.target import EvalTarget, find_target
from lightrl.launch.report import stop_reason
from lightrl.launch.run import run_checks, run_to_end
from lightrl.system.append_file import read_rows
from lightrl.system.files import replacing
from lightrl.system.output import print_error, print_lines, show
from lightrl.system.temporary import temporary_folder


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """`config`: None = that of the run. `sets`: their names, () = all. `samples`: the file that
    responses are written to as text."""

    config: Path | None
    overrides: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    samples: Path | None = None
    as_json: bool = False


async def evaluate(checkpoint: str, options: EvalOptions) -> int:
    """Return the exit status: 0 only if there are figures. Raises LightRLError, one line."""
    # only the JSON for machines goes to stdout
    report = print_error if options.as_json else print_lines
    target = find_target(checkpoint)
    if (file := options.samples) is not None:
        _require_free(file)
    with temporary_folder("eval") as folder:
        config = evaluation(target, options.config, options.overrides, options.sets, folder)
        launch = Launch(config, starts=True)
        found = await run_checks(launch, report)
        gpus = [each.text for each in found if each.is_note and each.subject == "gpu"]
        notes = [*_notes(target, launch.require_config()), *gpus]
        try:
            run_dir, _ = await run_to_end(launch, notes, report)
        except RunFailed as e:
            raise _reason(config.run_dir, e) from None
        last = final_snapshot(run_dir)
        if last is None or last.state != RunState.FINISHED:
            report("interrupted; nothing is left of it")
            return 1
        result = result_of(target, launch.require_config(), run_dir)
        if file is not None:
            written = run_dir / samples.FILE_NAME
            _copy(written, file)
            missing = result.num_responses - sum(1 for _ in read_rows(written, dict[str, Any]))
            if missing > 0:
                report(f"--samples {file}: {missing:,} responses could not be written")
    lines = [*table(result), "", *last_lines(result, file)]
    show([as_json(result, file)] if options.as_json else lines)
    return 0


def _require_free(file: Path) -> None:
    if file.is_symlink() or file.exists():
        raise ConfigError(f"--samples {file}: exists already; nothing is overwritten")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--samples {file}: no such directory {file.absolute().parent}")


def _notes(target: EvalTarget, config: Config) -> Iterator[str]:
    path = relative(Path(target.path)) if Path(target.path).is_absolute() else target.path
    step = f", step {target.step}," if target.step else ""
    yield f"evaluating {path}{step} on {', '.join(one.name for one in config.eval_sets)}"
    base, model = target.adapters.base if target.adapters is not None else "", config.model.path
    if base and Path(base).resolve() != Path(model).resolve():
        yield f"these adapters name {base} as their model; they are added to model.path = {model}"


def _reason(run_dir: Path, failed: RunFailed) -> LightRLError:
    """Return why the run failed, in one line. Without a reason its logs are kept."""
    last = final_snapshot(run_dir)
    is_over = last is not None and last.state == RunState.FAILED
    if reason := stop_reason(run_dir) if is_over else failed.reason:
        return LightRLError(reason)
    logs = run_dir / "logs"
    try:
        kept = Path(tempfile.mkdtemp(prefix="lightrl-eval-logs-")) / "logs"
        shutil.move(logs, kept)
    except OSError:
        return failed
    return RunFailed(str(failed).replace(relative(logs), relative(kept)))


def _copy(file: Path, to: Path) -> None:
    """Copy the responses; `to` appears once it is complete. Raises LightRLError."""
    try:
        with replacing(to, lasting=False) as draft, open(draft, "wb", closefd=False) as copy:
            if file.exists():  # else the disk has refused all of it
                with file.open("rb") as source:
                    shutil.copyfileobj(source, copy)
    except OSError as e:
        raise LightRLError(f"--samples {to}: cannot be written: {e.strerror}") from None
