"""How much memory a process has. Linux; elsewhere nothing is known."""

import resource
from pathlib import Path


def resident_bytes(pid: int | None = None) -> int:
    """Of this process, or of another one; 0 if that is not to be known."""
    try:
        fields = Path(f"/proc/{pid or 'self'}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0
