"""`lightrl eval CHECKPOINT CONFIG`: a run that evaluates once and trains nothing, in a directory
that is gone afterwards.

The coordinator, the engines and the rewards are those of any run; in place of a trainer one process
publishes the weights as they are. So figures are those that a run finds at the same step.
"""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.client import ask
from lightrl.client.address import relative
from lightrl.client.find_run import final_snapshot
from lightrl.config.schema import Config
from lightrl.coordinator import samples
from lightrl.core.state import RunState
from lightrl.errors import ConfigError, LightRLError, PeerUnreachable
from lightrl.launch.checks import Setup
from lightrl.launch.daemons import RunFailed
from lightrl.launch.eval_config import evaluation
from lightrl.launch.eval_report import Progress, as_json, last_lines, result_of, table
from lightrl.launch.eval_target import EvalTarget, find_target
from lightrl.launch.local import LocalRun
from lightrl.launch.report import repeated_warnings, stop_reason
from lightrl.launch.run import cancel, configure_log, judged, to_its_end
from lightrl.system.files import replacing
from lightrl.system.json_lines import read_rows
from lightrl.system.output import never_fail, print_error, print_lines, show
from lightrl.system.temporary import temporary_folder

SNAPSHOT_EVERY_S = 0.5
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """`config`: None = that of the run. `sets`: their names, () = all. `samples`: where responses
    go as text, if anywhere."""

    config: Path | None
    overrides: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    samples: Path | None = None
    as_json: bool = False


async def evaluate(checkpoint: str, options: EvalOptions) -> int:
    """The exit status: 0 only if there are figures. Raises LightRLError, one line."""
    never_fail()
    # what machines read is alone on stdout
    tell = print_error if options.as_json else print_lines
    target = find_target(checkpoint)
    if (file := options.samples) is not None:
        _require_free(file)
    with temporary_folder("eval") as folder:
        config = evaluation(target, options.config, options.overrides, options.sets, folder)
        setup = Setup(config, starts=True)
        found = await judged(setup, tell)
        assert setup.config is not None
        config = setup.config
        gpus = [finding.text for finding in found if finding.is_note and finding.subject == "gpu"]
        for line in (*_notes(target, config), *gpus):
            tell(line)
        try:
            return await _evaluate(target, setup, options, tell)
        except RunFailed as e:
            raise _with_logs(e, config.run_dir / "logs") from None


def _with_logs(failed: RunFailed, logs: Path) -> RunFailed:
    """Nobody knows why, so the logs that its text names are kept, if there is room."""
    try:
        kept = Path(tempfile.mkdtemp(prefix="lightrl-eval-logs-")) / "logs"
        shutil.move(logs, kept)
    except OSError:
        return failed
    return RunFailed(str(failed).replace(relative(logs), relative(kept)))


def _require_free(file: Path) -> None:
    if file.is_symlink() or file.exists():
        raise ConfigError(f"--samples {file}: exists already; nothing is overwritten")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--samples {file}: no such directory {file.absolute().parent}")


def _notes(target: EvalTarget, config: Config) -> Sequence[str]:
    what = f"evaluating {_shown(target.path)}"
    step = f", step {target.step}," if target.step else ""
    lines = [f"{what}{step} on {', '.join(one.name for one in config.eval_sets)}"]
    if (adapters := target.adapters) is not None and adapters.base:
        given = config.model.path
        if Path(adapters.base).resolve() != Path(given).resolve():
            lines.append(
                f"these adapters are for {adapters.base}, by their own word; they are put beside "
                f"model.path = {given}"
            )
    return lines


def _shown(path: str) -> str:
    return relative(Path(path)) if Path(path).is_absolute() else path


async def _evaluate(
    target: EvalTarget, setup: Setup, options: EvalOptions, tell: Callable[[str], None]
) -> int:
    assert setup.config is not None
    config = setup.config
    configure_log(config)
    local = LocalRun(config, resume=False, report=tell, gpus=setup.gpus)
    progress = Progress()
    try:
        interrupted = await to_its_end(local, _live(local, progress, tell), tell)
    except RunFailed as e:
        raise _reason(local, e) from None
    for line in repeated_warnings(local.run_dir):
        tell(line)
    for line in local.lost:
        tell(f"failed meanwhile: {line}")
    last = final_snapshot(local.run_dir)
    if interrupted or last is None or last.state == RunState.STOPPED:
        tell(f"interrupted{progress.last and f' at {progress.last}'}; nothing is left of it")
        return 1
    result = result_of(target, config, local.run_dir)
    if options.samples is not None:
        written = local.run_dir / samples.FILE_NAME
        _copy(written, options.samples)
        missing = result.num_responses - sum(1 for _ in read_rows(written, dict[str, Any]))
        if missing > 0:
            tell(f"--samples {options.samples}: {missing:,} responses could not be written")
    if options.as_json:
        show([as_json(result, options.samples)])
    else:
        show([*table(result), "", *last_lines(result, options.samples)])
    return 0


def _reason(local: LocalRun, failed: RunFailed) -> LightRLError:
    """What the run has failed for, in one line, or a daemon that gave a reason; else a log may
    tell."""
    if not local.run_dir.exists():  # its input was refused: the text is the reason
        return LightRLError(str(failed))
    last = final_snapshot(local.run_dir)
    if last is not None and last.state == RunState.FAILED:
        said = [stop_reason(local.run_dir)]
    else:
        said = [d.last_line() for d in local.daemons.values() if d.gave_a_reason]
    reason = next(filter(None, said), "")
    for speaker in ("trainer node trainer-0: ", "lightrl-rank-0: "):
        reason = reason.removeprefix(speaker)
    return LightRLError(reason) if reason else failed


def _copy(file: Path, to: Path) -> None:
    """All at once: whoever finds `to` finds all of it. Raises LightRLError."""
    try:
        with replacing(to, lasting=False) as draft, open(draft, "wb", closefd=False) as copy:
            if file.exists():  # else the disk has refused all of it
                with file.open("rb") as source:
                    shutil.copyfileobj(source, copy)
    except OSError as e:
        raise LightRLError(f"--samples {to}: cannot be written: {e.strerror}") from None


async def _live(local: LocalRun, progress: Progress, tell: Callable[[str], None]) -> None:
    """Starts the daemons and says how far they are until they have ended."""
    await local.start()
    watching = asyncio.create_task(_watch(local, progress, tell), name="view")
    try:
        await local.until_over()
    finally:
        await cancel(watching)


async def _watch(local: LocalRun, progress: Progress, tell: Callable[[str], None]) -> None:
    while True:
        # whoever supervises the coordinator says why it is gone
        with contextlib.suppress(PeerUnreachable):
            stream = ask.watch(local.address, SNAPSHOT_EVERY_S, local.key)
            async with contextlib.aclosing(stream) as snapshots:
                async for snapshot in snapshots:
                    if line := progress.line(snapshot, time.monotonic()):
                        tell(line)
        await asyncio.sleep(RETRY_S)
