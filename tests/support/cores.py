"""What other work on this machine costs a test: tests may run on a busy one."""

from pathlib import Path


def waited_for_a_core_s() -> float:
    """How long this thread could have run but others did."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
