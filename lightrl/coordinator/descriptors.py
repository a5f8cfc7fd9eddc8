"""Refuse nodes, in one line, for which no file descriptors are left.

Without a free descriptor ZeroMQ accepts no connection, reports nothing and keeps trying.
"""

import errno
import os
from collections.abc import Callable

from lightrl.config.schema import Config
from lightrl.errors import ConfigError
from lightrl.system import open_files

BASE = 40  # of a coordinator without nodes or reward workers: files, pipes, ZeroMQ's own
OF_WORKER = 2  # its pipe, and one to start it
FOR_TOOLS = 10  # connections of tools, and of peers that are no nodes of the run (yet)


class Descriptors:
    """Counts descriptors, and reports when they run out."""

    def __init__(
        self, report: Callable[[str], None], num_connections: Callable[[], tuple[int, int]]
    ) -> None:
        """`num_connections` returns those of authenticated and of unauthenticated peers."""
        self._report = report
        self._num_connections = num_connections
        self._num_checks = 0  # in a row without a free descriptor
        self._others: int | None = None  # not connections; None: not counted yet

    def check(self) -> None:
        """Report when two checks in a row find no descriptor, and when some are free again.

        A single check may fail while unauthenticated connections are being closed.
        """
        before = sum(self._num_connections())
        if (num_open := open_files.num_open()) is not None:
            # if some are opened or closed just now, too many are better than a node refused
            self._others = num_open - max(before, sum(self._num_connections()))
        if _are_out():
            self._num_checks += 1
            if self._num_checks == 2:
                none = "no free file descriptors: nobody can connect until there are some"
                self._report(f"WARNING: {none} ({_how()})")
        else:
            if self._num_checks >= 2:
                self._report("there are free file descriptors again")
            self._num_checks = 0

    def why_no_room(self, num_nodes: int) -> str | None:
        """Return one line why a node that has just connected is refused, or None.

        `num_nodes` are in the run. Other nodes that are connected do not count: if many come at
        once, the first of them have room.
        """
        if self._others is None or self._others + num_nodes + FOR_TOOLS < open_files.soft_limit():
            return None
        why = f"no file descriptors for more nodes ({_how()})"
        self._report(f"WARNING: {why}: new nodes are refused")
        return f"the coordinator has {why}"


def require_room(config: Config) -> None:
    """Raise ConfigError if the nodes of this config need more descriptors than are allowed."""
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
