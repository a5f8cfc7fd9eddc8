"""Where a process that a test starts looks for modules."""

import os
from pathlib import Path


def python_path(first: Path) -> str:
    """`first`, then what was there: scripts/mutate names by it the LightRL that has a bug."""
    return os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))
