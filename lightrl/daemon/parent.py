"""End a daemon that cannot end in order, or whose parent process is gone, however that one ended,
and describe in the log why a daemon leaves.

The parent holds the other end of the daemon's stdin. When it closes, the daemon gets SIGTERM, on
which it drains. If it still runs after its grace time, it exits, and its children with it.
"""

import logging
import os
import signal
import sys
import threading
import time

from lightrl.messages.nodes import ENDING
from lightrl.system.output import flush

logger = logging.getLogger(__name__)

AFTER_GRACE_S = 5.0
SIGNALS = {
    "SIGTERM": "this process was asked to end (SIGTERM)",
    "SIGINT": "ctrl-C (SIGINT)",
    "SIGUSR1": "notice that this machine will be taken away (SIGUSR1)",
    "SIGHUP": "its terminal is gone (SIGHUP)",
}


def leave_when_stdin_closes(grace_s: float) -> None:
    """Start a thread that waits for the end of stdin: the event loop itself may hang."""
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
    """Exit this process from a thread: even a hanging event loop ends within the grace time."""
    logger.error("did not end in time: ended by force")
    flush()  # nothing else does before such an end
    os._exit(1)  # the kernel ends the children; the next daemon removes what is left in scratch


def describe_reason(reason: str) -> str:
    """Describe `reason`, which is the name of a signal or the text of the coordinator's Drain."""
    if reason == ENDING or reason.startswith("run "):
        return reason
    return SIGNALS.get(reason, f"the run lets this node go ({reason})")
