"""What a coordinator leaves in the run directory for others: where it listens, and how the run has
ended.

Owns `address`, `summary.json` and `snapshot.json`. Each is there whole or not at all, and the last
two only while the run is over: so no clock has to tell whether it is.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from lightrl.system import files
from lightrl.system.threads import in_thread

ADDRESS, SUMMARY, SNAPSHOT = "address", "summary.json", "snapshot.json"
TRY_AGAIN_S = 1.0
STRANGERS_S = 10.0  # to wait at most for a descriptor: longer than their handshake may take

P = ParamSpec("P")
Result = TypeVar("Result")


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
    """Returns when it is written, however long the disk refuses: nobody can come without it.

    When cancelled it ends after the attempt that is under way: what is removed later does not come
    back.
    """
    told = False
    while True:
        try:
            await _to_its_end(files.write_whole, run_dir / ADDRESS, f"{address}\n".encode())
        except OSError as e:
            if not told:
                report(f"WARNING: {ADDRESS}: cannot write ({e.strerror}); tried again every second")
            told = True
        else:
            return
        await asyncio.sleep(TRY_AGAIN_S)


async def end(
    run_dir: Path, summary: bytes, snapshot: bytes, report: Callable[[str], None]
) -> None:
    """The run is over, also when this is cancelled. What the disk refuses is missing; `report` is
    told."""
    try:
        lines = await _to_its_end(_end, run_dir, summary, snapshot)
    except OSError:  # there is no thread for it, and it does not wait
        lines = _end(run_dir, summary, snapshot)
    for line in lines:
        report(line)


def _end(run_dir: Path, summary: bytes, snapshot: bytes) -> list[str]:
    """Blocks as long as the disk takes. One line for each file that it refuses."""
    lines: list[str] = []
    for name, data in ((SUMMARY, summary), (SNAPSHOT, snapshot)):
        try:
            _write_patiently(run_dir / name, data + b"\n")
        except OSError as e:
            lines.append(f"WARNING: {name}: cannot write ({e.strerror})")
    with contextlib.suppress(OSError):
        (run_dir / ADDRESS).unlink(missing_ok=True)
    return lines


def _write_patiently(path: Path, data: bytes) -> None:
    """Strangers who hold the last descriptors are cut off within seconds."""
    deadline = time.monotonic() + STRANGERS_S
    while True:
        try:
            return files.write_whole(path, data)
        except OSError as e:
            if e.errno != errno.EMFILE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


async def _to_its_end(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """As `in_thread`, but when cancelled it ends only after `act` has."""
    acting = asyncio.ensure_future(in_thread(act, *args, **kwargs))
    try:
        return await asyncio.shield(acting)
    except asyncio.CancelledError:
        await asyncio.wait({acting})
        raise
