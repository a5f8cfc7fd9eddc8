"""What a coordinator leaves in the run directory for others: where it listens, and how the run has ended.

Owns `address`, `summary.json` and `snapshot.json`. Each is there whole or not at all, and the last two only
while the run is over: so no clock has to tell whether it is.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

ADDRESS, SUMMARY, SNAPSHOT = "address", "summary.json", "snapshot.json"
TRY_AGAIN_S = 1.0


def old_address(run_dir: Path) -> str:
    """Where nodes that wait for this run look for it; "" if it has not listened anywhere before."""
    try:
        return (run_dir / ADDRESS).read_text().strip()
    except FileNotFoundError:
        return ""


def go_on(run_dir: Path) -> None:
    """The run is not over any more. Raises OSError."""
    for name in (SNAPSHOT, SUMMARY):
        (run_dir / name).unlink(missing_ok=True)


async def announce(run_dir: Path, address: str, report: Callable[[str], None]) -> None:
    """Returns when it is written, however long the disk refuses: nobody can come without it."""
    told = False
    while True:
        try:
            _write(run_dir / ADDRESS, f"{address}\n".encode())
        except OSError as e:
            if not told:
                report(f"WARNING: {ADDRESS}: cannot write ({e.strerror}); tried again every second")
            told = True
        else:
            return
        await asyncio.sleep(TRY_AGAIN_S)


def end(run_dir: Path, summary: bytes, snapshot: bytes, report: Callable[[str], None]) -> None:
    """The run is over. What the disk refuses is missing, and `report` is told."""
    for name, data in ((SUMMARY, summary), (SNAPSHOT, snapshot)):
        try:
            _write(run_dir / name, data + b"\n")
        except OSError as e:
            report(f"WARNING: {name}: cannot write ({e.strerror})")
    with contextlib.suppress(OSError):
        (run_dir / ADDRESS).unlink(missing_ok=True)


def _write(file: Path, data: bytes) -> None:
    draft = file.with_name(f".{file.name}.tmp")
    try:
        draft.write_bytes(data)
        draft.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
