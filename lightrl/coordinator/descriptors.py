"""Whether this process may still open something: without that, ZeroMQ lets nobody in, says nothing,
and does not stop trying. So the last ones are kept from nodes: one that is too many is told so.
"""

import errno
import os
import time
from collections.abc import Callable

from lightrl.config.schema import Config
from lightrl.errors import ConfigError
from lightrl.system import open_files

BASE = 40  # of a coordinator without nodes or reward workers: files, pipes, ZeroMQ's own
OF_WORKER = 2  # its pipe, and what starts it
FOR_TOOLS = 10  # connections of those who look on, or are yet to say who they are
TELL_AGAIN_S = 60.0


class Descriptors:
    def __init__(
        self, report: Callable[[str], None], num_connections: Callable[[], tuple[int, int]]
    ) -> None:
        """`num_connections`: of nodes and tools, and of those who have not said yet who they
        are."""
        self._report = report
        self._num_connections = num_connections
        self._num_looks = 0  # in a row, at which there were none
        self._told_at = float("-inf")
        self._has_told = False
        self._told_full_at = float("-inf")
        self._others: int | None = None  # not connections; None: not counted yet

    def look(self) -> None:
        """Reports it when they have run out, and when there are some again. To be called now and
        then.

        Once may be an attack that is being ended.
        """
        if (num_open := open_files.num_open()) is not None:
            self._others = num_open - sum(self._num_connections())
        self._num_looks = self._num_looks + 1 if _are_out() else 0
        now = time.monotonic()
        if self._num_looks >= 2 and not self._has_told and now - self._told_at > TELL_AGAIN_S:
            self._told_at, self._has_told = now, True
            self._report(
                "WARNING: no free file descriptors: nobody can connect until there are "
                f"some ({_how()})"
            )
        elif self._num_looks == 0 and self._has_told:
            self._has_told = False
            self._report("there are free file descriptors again")

    def why_no_room(self) -> str | None:
        """In one line, why a node that has just connected cannot be taken in; None if it can."""
        num_known, _ = self._num_connections()
        if self._others is None or self._others + num_known + FOR_TOOLS <= open_files.soft_limit():
            return None
        now = time.monotonic()
        why = f"no file descriptors for more nodes ({_how()})"
        if now - self._told_full_at > TELL_AGAIN_S:
            self._told_full_at = now
            self._report(f"WARNING: {why}: those that come now are refused")
        return f"the coordinator has {why}"


def require_room(config: Config) -> None:
    """Raises ConfigError if the nodes of this config need more connections than this process may
    have."""
    limit = open_files.raised_limit()
    workers = config.reward.workers * OF_WORKER
    needed = BASE + workers + FOR_TOOLS + config.rollout.nodes + 1
    if needed > limit:
        raise ConfigError(
            f"rollout.nodes = {config.rollout.nodes}: the coordinator needs {needed} open files, "
            f"and {limit} are allowed; raise the hard limit (ulimit -Hn "
            f"{needed + open_files.RESERVED})"
        )


def _how() -> str:
    return f"limit {open_files.soft_limit()}: ulimit -Hn, before the coordinator's start, raises it"


def _are_out() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno in (errno.EMFILE, errno.ENFILE)
    return False
