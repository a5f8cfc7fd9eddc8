"""Whether this process may still open something: without that, ZeroMQ lets nobody in and says nothing."""

import errno
import os
import time
from collections.abc import Callable

from lightrl import open_files
from lightrl.config import Config
from lightrl.errors import ConfigError

BASE = 40  # of a coordinator without nodes or reward workers: files, pipes, ZeroMQ's own
OF_WORKER = 2  # its pipe, and what starts it
FOR_TOOLS = 10  # connections of those who look on
TELL_AGAIN_S = 60.0


class Descriptors:
    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._num_looks = 0  # in a row, at which there were none
        self._told_at = float("-inf")
        self._has_told = False

    def look(self) -> None:
        """Reports it when they have run out, and when there are some again. To be called now and then.

        Once may be an attack that is being ended.
        """
        self._num_looks = self._num_looks + 1 if _are_out() else 0
        now = time.monotonic()
        if self._num_looks >= 2 and not self._has_told and now - self._told_at > TELL_AGAIN_S:
            self._told_at, self._has_told = now, True
            limit = open_files.soft_limit()
            self._report(
                f"WARNING: no free file descriptors: nobody can connect until there are some "
                f"(limit {limit}: ulimit -Hn, before the start, raises it)"
            )
        elif self._num_looks == 0 and self._has_told:
            self._has_told = False
            self._report("there are free file descriptors again")


def require_room(config: Config) -> None:
    """Raises ConfigError if the nodes of this config need more connections than this process may have."""
    limit = open_files.raised_limit()
    workers = config.reward.workers * OF_WORKER
    needed = BASE + workers + FOR_TOOLS + config.rollout.nodes + 1
    if needed > limit:
        raise ConfigError(
            f"rollout.nodes = {config.rollout.nodes}: the coordinator needs {needed} open files, and "
            f"{limit} are allowed; raise the hard limit (ulimit -Hn {needed + open_files.SET_ASIDE})"
        )


def _are_out() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno in (errno.EMFILE, errno.ENFILE)
    return False
