"""Which signals ask a process to leave in order."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, ctrl-C, the warning of a batch system, and a terminal that is gone.

    Not the last for who was started with nohup, to outlive its terminal.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    return tuple(n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
