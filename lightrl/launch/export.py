"""`lightrl export CHECKPOINT OUT`: a checkpoint as a Hugging Face model directory."""

import errno
import logging
import shutil
import warnings
from pathlib import Path

from lightrl.client.address import run_folder
from lightrl.config.sections import Checkpoint
from lightrl.errors import LightRLError
from lightrl.trainer.checkpoint.checksums import find_corruption
from lightrl.trainer.checkpoint.on_disk import STEP_FILE, newest_in, those_beside

MB = 1_000_000


def export_checkpoint(
    checkpoint: Path, out: Path, shard_mb: int | None, is_merged: bool = False
) -> None:
    """Make `out`, with files of `shard_mb` megabytes; None: as in a run. `is_merged`: merge
    adapters into their model, with its files. Raises LightRLError, one line, and leaves no `out`.
    """
    _require_whole(checkpoint)
    _require_free(out)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    logging.disable(logging.WARNING)  # what transformers finds of torchao, with or without a use
    try:
        from lightrl.trainer.checkpoint.export import export, merge
    finally:
        logging.disable(logging.NOTSET)

    try:
        if is_merged:
            merge(checkpoint, out)
        else:
            export(checkpoint, out, (shard_mb or Checkpoint().shard_mb) * MB)
    except OSError as e:
        free = shutil.disk_usage(out.absolute().parent).free // MB
        room = f", {free:,} MB are free" if e.errno == errno.ENOSPC else ""
        is_read = str(e.filename).startswith(f"{checkpoint}/")
        raise LightRLError(f"{e.filename if is_read else out}: {e.strerror or e}{room}") from None


def find_checkpoint(named: Path) -> Path:
    """Return a checkpoint, or the newest one of a run, by directory or name. Any other path is
    returned unchanged, or below `runs/` if its folder is there."""
    if (folder := run_folder(str(named))) is not None:
        return newest_in(folder) or folder
    of_run = Path("runs", named)
    return of_run if of_run.parent.is_dir() and not named.parent.is_dir() else named


def _require_whole(checkpoint: Path) -> None:
    if not checkpoint.exists():
        raise LightRLError(f"{checkpoint}: no such run or checkpoint{those_beside(checkpoint)}")
    if not (checkpoint / STEP_FILE).is_file():
        raise LightRLError(f"{checkpoint}: is no complete checkpoint")
    try:
        problem = find_corruption(checkpoint)
    except OSError as e:
        raise LightRLError(f"{e.filename or checkpoint}: {e.strerror or e}") from None
    if problem:
        raise LightRLError(f"{checkpoint}: is not what was saved: {problem}")


def _require_free(out: Path) -> None:
    if out.is_symlink() or out.exists():
        raise LightRLError(f"{out}: exists already; nothing is overwritten")
    if not out.absolute().parent.is_dir():
        raise LightRLError(f"{out.absolute().parent}: no such directory")
