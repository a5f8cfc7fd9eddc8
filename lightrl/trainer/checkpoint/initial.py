"""Find the checkpoint from which a trainer begins: its newest, or that of another run as step 0.

The files of the other run are linked where possible, else copied: it may continue, and remove them.
Must not import torch: the daemon imports this file.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.errors import TrainerError
from lightrl.log import reporter
from lightrl.system import files
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread
from lightrl.trainer.checkpoint.checksums import find_corruption, with_checksums, with_seal
from lightrl.trainer.checkpoint.saved import (
    EXPORT,
    STEP_FILE,
    SavedStep,
    checkpoint_path,
    newest_sound,
    put_in_place,
    step_of,
    tidy,
)
from lightrl.wire import from_json, to_json

logger = logging.getLogger(__name__)

GONE = {errno.ENOENT, errno.ENOTDIR}
# Another file system, one without links, files of another user, too many links.
NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


async def where_to_start(config: Config, checkpoints: Path, is_wanted: Callable[[], bool]) -> int:
    """Return the step of the newest sound checkpoint; 0 if the run begins with a model or with
    another run's checkpoint, which is taken over here. Checking takes no longer than `is_wanted`.
    The checkpoint of an evaluation has a step of its own.

    Raises TrainerError if a checkpoint cannot be read: it may be sound.
    """
    if config.eval.checkpoint:
        return config.eval.step
    initial = config.checkpoint.initial_load_path
    find = partial(find_corruption, is_wanted=is_wanted)

    def look() -> Path | None:
        tidy(checkpoints)  # of many gigabytes, maybe
        path = newest_sound(checkpoints, find, reporter(logger))
        return take_over(Path(initial), checkpoints, find) if initial and path is None else path

    try:
        path = await retry_on_resource_limit(
            partial(in_thread, look), "the trainer", logger.warning
        )
    except OSError as e:
        where = e.filename or checkpoints
        raise TrainerError(f"{where}: cannot look for a checkpoint: {e.strerror or e}") from None
    return 0 if path is None else step_of(path)


def take_over(source: Path, checkpoints: Path, find_corruption: Callable[[Path], str]) -> Path:
    """Make `checkpoints`/step_0 of the state in `source`, or nothing if that fails. Call while
    no rank writes a checkpoint.

    Steps count from 0; the schedule continues. Raises TrainerError, one line, or OSError if a later
    try may succeed.
    """
    path = checkpoint_path(checkpoints, 0)
    draft = path.with_name(f".{path.name}.draft")
    try:
        files.make_folder(checkpoints)
        shutil.rmtree(draft, ignore_errors=True)
        _link(source, draft)
        if problem := find_corruption(draft):
            raise TrainerError(f"{source}: {problem}; the run cannot begin with this checkpoint")
        _reset_step(draft)
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
    """Link all of it but exports; copy what cannot be linked. Raises OSError."""
    draft.mkdir()
    for file in (source / STEP_FILE, *sorted(source.rglob("*"))):
        place = file.relative_to(source)
        link, first = draft / place, place.parts[0]
        if first == EXPORT or first.startswith(".") or file.is_dir() or link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        _link_file(file.resolve(), link)


def _link_file(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except OSError as e:
        if e.errno not in NO_LINK:
            raise
        shutil.copyfile(file, link)


def _reset_step(draft: Path) -> None:
    """Make it a checkpoint of 0 steps. Raises OSError."""
    data = (draft / STEP_FILE).read_bytes()
    (draft / STEP_FILE).unlink()  # a link to that of the other run
    then = from_json(data, SavedStep)
    before = then.steps_before + then.step
    now = replace(then, step=0, policy_version=0, steps_before=before)
    # an old checkpoint has no digests
    now = with_seal(now) if now.files else with_checksums(now, draft)
    files.write_whole(draft / STEP_FILE, to_json(now))
