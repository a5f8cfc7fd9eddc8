"""Where a trainer begins: looked up by its daemon, in a thread."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.errors import TrainerError
from lightrl.log import reporter
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread
from lightrl.trainer.checkpoint.initial import take_over
from lightrl.trainer.checkpoint.saved import newest_sound, step_of, tidy
from lightrl.trainer.checkpoint.seal import damage

logger = logging.getLogger(__name__)


async def where_to_start(config: Config, checkpoints: Path, is_wanted: Callable[[], bool]) -> int:
    """Steps done in the newest checkpoint that is as it was saved; 0 if there is none: in what the
    run begins with, the model or the checkpoint of another run, which is taken over then. One that
    is not as it was is looked at no longer than `is_wanted` says. What is evaluated alone stands
    where it stands.

    Raises TrainerError if it cannot be told: one that cannot be read may be sound.
    """
    if config.eval.checkpoint:
        return config.eval.step
    initial = config.checkpoint.initial_load_path
    find = partial(damage, is_wanted=is_wanted)

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
