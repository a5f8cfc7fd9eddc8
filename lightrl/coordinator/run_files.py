"""Write `address`, `summary.json` and `snapshot.json` of a run, atomically.

`address` exists while the coordinator listens, the other two only after the run has ended.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from lightrl.system import files
from lightrl.system.threads import in_thread

ADDRESS, SUMMARY, SNAPSHOT = "address", "summary.json", "snapshot.json"
TRY_AGAIN_S = 1.0

P = ParamSpec("P")
Result = TypeVar("Result")


def old_address(run_dir: Path) -> str:
    """Return the last address of this run, to which its nodes reconnect; "" if it has none."""
    try:
        return (run_dir / ADDRESS).read_text().strip()
    except FileNotFoundError:
        return ""


def reopen(run_dir: Path) -> None:
    """Remove the files of a run that has ended. Raises OSError."""
    for name in (SNAPSHOT, SUMMARY):
        (run_dir / name).unlink(missing_ok=True)


async def announce(run_dir: Path, address: str, report: Callable[[str], None]) -> None:
    """Write `address`, and retry until that succeeds.

    When cancelled it returns after the current attempt, so that a later removal is final.
    """
    has_reported = False
    while True:
        try:
            await _to_its_end(files.write_whole, run_dir / ADDRESS, f"{address}\n".encode())
        except OSError as e:
            if not has_reported:
                report(f"WARNING: {ADDRESS}: cannot write ({e.strerror}); tried again every second")
            has_reported = True
        else:
            return
        await asyncio.sleep(TRY_AGAIN_S)


async def end(
    run_dir: Path, summary: bytes, snapshot: bytes, report: Callable[[str], None]
) -> None:
    """Write the files of a run that has ended, also when cancelled; report those that fail."""
    try:
        lines = await _to_its_end(_end, run_dir, summary, snapshot)
    except OSError:  # no thread can be started
        lines = _end(run_dir, summary, snapshot)
    for line in lines:
        report(line)


def _end(run_dir: Path, summary: bytes, snapshot: bytes) -> list[str]:
    """Write the files, and return one line for each one that fails."""
    lines: list[str] = []
    for name, data in ((SUMMARY, summary), (SNAPSHOT, snapshot)):
        try:
            files.write_whole(run_dir / name, data + b"\n")
        except OSError as e:
            lines.append(f"WARNING: {name}: cannot write ({e.strerror})")
    with contextlib.suppress(OSError):
        (run_dir / ADDRESS).unlink(missing_ok=True)
    return lines


async def _to_its_end(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """As `in_thread`, but a cancelled call returns only after `act` has ended."""
    acting = asyncio.ensure_future(in_thread(act, *args, **kwargs))
    try:
        return await asyncio.shield(acting)
    except asyncio.CancelledError:
        await asyncio.wait({acting})
        raise
