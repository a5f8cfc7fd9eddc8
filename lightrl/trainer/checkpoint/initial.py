"""The checkpoint of another run that a run begins with: taken over as that of its own step 0.

Owns how it is taken: the files are linked where that can be, else copied, so that the other run may
go on, and remove it. Nothing of the other run is changed. Must not import torch: the daemon imports
this file.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lightrl.errors import TrainerError
from lightrl.system import files
from lightrl.trainer.checkpoint.saved import (
    EXPORT,
    STEP_FILE,
    SavedStep,
    checkpoint_path,
    put_in_place,
)
from lightrl.trainer.checkpoint.seal import resealed, sealed
from lightrl.wire import from_json, to_json

logger = logging.getLogger(__name__)

GONE = {errno.ENOENT, errno.ENOTDIR}
# Another file system, one without links, files of somebody else, too many links.
NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


def take_over(source: Path, checkpoints: Path, damage: Callable[[Path], str]) -> Path:
    """`checkpoints`/step_0, of the state in `source`; `damage` says what of it is not as it was
    saved. Where it fails nothing is left. Call when nobody writes a checkpoint.

    Steps count from 0; how many the schedule had before goes with it. Raises TrainerError, one
    line, or OSError if the same may do later.
    """
    path = checkpoint_path(checkpoints, 0)
    draft = path.with_name(f".{path.name}.draft")
    try:
        files.make_folder(checkpoints)
        shutil.rmtree(draft, ignore_errors=True)
        _link(source, draft)
        # From here on it is ours: what the other run removes stays.
        if problem := damage(draft):
            raise TrainerError(f"{source}: {problem}; the run cannot begin with this checkpoint")
        _begin_anew(draft)
        put_in_place(draft, path, keep_last=1)
    except OSError as e:
        shutil.rmtree(draft, ignore_errors=True)
        if e.errno in GONE:
            raise TrainerError(
                f"{source}: is no complete checkpoint, or none any more, on this machine; a run "
                "needs the one that it begins with until it has taken it over"
            ) from None
        raise
    except TrainerError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    logger.info("begins with %s, which lies in %s from now on", source, path)
    return path


def _link(source: Path, draft: Path) -> None:
    """All of it but an export, which nothing is restored from, and unfinished ones. Raises
    OSError."""
    draft.mkdir()
    num_copied = 0
    for file in (source / STEP_FILE, *sorted(source.rglob("*"))):
        place = file.relative_to(source)
        first = place.parts[0]
        if first == EXPORT or first.startswith(".") or file.is_dir() or (draft / place).exists():
            continue
        (draft / place).parent.mkdir(parents=True, exist_ok=True)
        num_copied += _link_file(file.resolve(), draft / place)
    if num_copied:
        logger.info("%s: copied %d bytes, as they cannot be linked", source, num_copied)


def _link_file(file: Path, link: Path) -> int:
    """Bytes that had to be copied. Raises OSError."""
    try:
        os.link(file, link)
    except OSError as e:
        if e.errno not in NO_LINK:
            raise
        shutil.copyfile(file, link)
        return link.stat().st_size
    return 0


def _begin_anew(draft: Path) -> None:
    """What it says of itself is that of a run of no steps. Raises OSError."""
    data = (draft / STEP_FILE).read_bytes()
    (draft / STEP_FILE).unlink()  # that of the other run has another name yet
    then = from_json(data, SavedStep)
    before = then.steps_before + then.step
    begun = replace(then, step=0, policy_version=0, steps_before=before)
    # one from before there were digests gets them now
    begun = resealed(begun) if begun.files else sealed(begun, draft)
    files.write_whole(draft / STEP_FILE, to_json(begun))
