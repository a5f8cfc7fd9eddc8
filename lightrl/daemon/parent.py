"""How a daemon ends that cannot end in order, and how it notices that the process which started it
is gone, however that ended.

That process holds the other end of the daemon's stdin. A daemon drains on SIGTERM, so that is what
it gets; if it is still there after its grace time it ends at once, and its children with it.
"""

import logging
import os
import signal
import sys
import threading
import time

from lightrl.system.output import flush

logger = logging.getLogger(__name__)

AFTER_GRACE_S = 5.0


def leave_when_stdin_closes(grace_s: float) -> None:
    """Returns at once; a thread waits, since the event loop may be the thing that hangs."""
    threading.Thread(
        target=_watch, args=(sys.stdin.fileno(), grace_s), name="tie", daemon=True
    ).start()


def _watch(descriptor: int, grace_s: float) -> None:
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s + AFTER_GRACE_S)
    os._exit(1)


def end_by_force() -> None:
    """From a thread: whatever hangs, event loop included, must not outlast the grace of who
    leaves."""
    logger.error("did not end in time: ended by force")
    flush()  # nothing else does before such an end
    os._exit(1)  # the kernel ends the children; the next daemon removes what is left in scratch
