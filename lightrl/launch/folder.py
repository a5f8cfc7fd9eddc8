"""The directory of a run, with its config and its keys, and `latest` beside it."""

import os
import shutil
from pathlib import Path

from lightrl.config.run_file import CONFIG_FILE, to_toml
from lightrl.config.schema import Config
from lightrl.errors import ConfigError
from lightrl.journal.disk import FOLDER
from lightrl.keys import write_keys
from lightrl.system import files
from lightrl.trainer.checkpoint.on_disk import CHECKPOINTS

SLURM_CONFIG = "run.toml"  # in it, the config that was submitted
SLURM_FOLDER = "slurm"  # scripts and output of batch jobs, there before the run is


def create_run_dir(config: Config) -> Path:
    """Make a run directory with its resolved config and new keys, where `is_new`. Raises
    ConfigError."""
    run_dir = config.run_dir.resolve()
    checkpoints = config.checkpoints(run_dir)
    is_elsewhere = checkpoints != run_dir / CHECKPOINTS
    if is_elsewhere:  # first: nothing is left behind where it cannot be made
        try:
            files.make_folder(checkpoints)
        except OSError as e:
            raise _not_made(f"checkpoint.dir = {config.checkpoint.dir!r}", e) from None
    try:
        files.make_folder(run_dir)  # may hold SLURM_FOLDER
        (run_dir / "logs").mkdir()
        files.write_whole(run_dir / CONFIG_FILE, to_toml(config).encode())
        write_keys(run_dir)
        if is_elsewhere:  # they are found in the run directory, too
            (run_dir / CHECKPOINTS).symlink_to(checkpoints)
    except OSError as e:
        where = f"run.dir = {config.run.dir!r}, run.name = {config.run.name!r}"
        raise _not_made(where, e) from None
    return run_dir


def _not_made(keys: str, e: OSError) -> ConfigError:
    return ConfigError(f"{keys}: cannot make this directory: {e.strerror}: {e.filename}")


def is_new(run_dir: Path) -> bool:
    """Return whether no run has begun there."""
    if not os.path.lexists(run_dir):
        return True
    return run_dir.is_dir() and os.listdir(run_dir) == [SLURM_FOLDER]


def has_begun(run_dir: Path) -> bool:
    """Return whether a run can continue there: from a checkpoint, or a journal with entries."""
    from lightrl.journal.read import is_blank  # numpy comes with it

    return any((run_dir / CHECKPOINTS).glob("*")) or not is_blank(run_dir / FOLDER)


def remove_run_dir(run_dir: Path) -> None:
    """Remove the files of a run that never began, except the output of its batch job."""
    if has_begun(run_dir):
        return
    for entry in run_dir.iterdir() if run_dir.is_dir() else ():
        if entry.name == SLURM_FOLDER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if run_dir.is_dir() and not os.listdir(run_dir):
        run_dir.rmdir()


def rewrite_config(config: Config) -> None:
    """Write the config of a resumed run for its daemons. Raises ConfigError."""
    file = config.run_dir.resolve() / CONFIG_FILE
    try:
        files.write_whole(file, to_toml(config).encode())
    except OSError as e:
        raise ConfigError(f"{file}: cannot be written: {e.strerror}") from None


def point_latest(run_dir: Path) -> None:
    """Point `latest` beside the run directory at it, atomically. Raises ConfigError."""
    latest, fresh = run_dir.parent / "latest", run_dir.parent / f".latest-{os.getpid()}"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run_dir.name)
        fresh.replace(latest)
    except OSError as e:
        fresh.unlink(missing_ok=True)
        raise ConfigError(f"run.dir: cannot make the link {latest}: {e.strerror}") from None
