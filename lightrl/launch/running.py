"""Which run a user means, whether it is over, and whether it is the one that answers.

An address outlives a coordinator that was killed, and another run may listen there by now: whoever
named a run gets that run or an error. Changes nothing.
"""

import contextlib
from pathlib import Path

from lightrl.core.state import RunState
from lightrl.errors import LightRLError, PeerUnreachable, ProtocolError
from lightrl.launch.address import find, shown
from lightrl.messages import Snapshot
from lightrl.node import client
from lightrl.wire import from_json

OVER = frozenset({str(RunState.FINISHED), str(RunState.STOPPED), str(RunState.FAILED)})


async def one_snapshot(target: str | None) -> Snapshot:
    """How the run stands that ADDR, a run directory or nothing (the latest run) means.

    Raises LightRLError if it neither answers nor has left a last snapshot.
    """
    address, run_dir = find(target)
    last = final_snapshot(run_dir) if run_dir is not None else None
    return last or await _ask(address, run_dir)


async def live_run(target: str | None) -> tuple[str, Snapshot]:
    """The address of a run that is not over, and how it stands. Raises LightRLError if there is none."""
    address, run_dir = find(target)
    if run_dir is not None and final_snapshot(run_dir) is not None:
        raise LightRLError(f"{shown(run_dir)}: this run is over")
    snapshot = await _ask(address, run_dir)
    if address is None or snapshot.state in OVER:
        raise LightRLError(f"{snapshot.run}: this run is over")
    return address, snapshot


async def ask(address: str) -> Snapshot:
    """One snapshot from whoever listens at `address`. Raises PeerUnreachable."""
    async with contextlib.aclosing(client.watch(address, 0.0)) as snapshots:
        async for snapshot in snapshots:
            return snapshot
    raise PeerUnreachable(f"{address}: closed the connection without an answer")


async def _ask(address: str | None, run_dir: Path | None) -> Snapshot:
    """The snapshot of just this run."""
    name = shown(run_dir) if run_dir is not None else address
    if address is None:
        raise PeerUnreachable(f"{name}: this run never listened; see {name}/logs")
    try:
        snapshot = await ask(address)
    except PeerUnreachable:
        if run_dir is None:
            raise
        if (last := final_snapshot(run_dir)) is not None:  # it ended at this moment
            return last
        raise PeerUnreachable(f"{name}: its coordinator is gone (nobody answers at {address})") from None
    require_same(snapshot, run_dir, address)
    return snapshot


def require_same(snapshot: Snapshot, run_dir: Path | None, address: str) -> None:
    """Raises LightRLError if `address` belongs to another run than the one in `run_dir` by now."""
    if run_dir is not None and Path(snapshot.run_dir).resolve() != run_dir.resolve():
        raise LightRLError(f"{shown(run_dir)}: its coordinator is gone (another run answers at {address})")


def require_drainable(snapshot: Snapshot, node: str) -> None:
    """Raises LightRLError if the run has no such node or cannot go on without it."""
    roles = {n.name: n.roles for n in snapshot.nodes if n.state != "gone"}
    if node not in roles:
        raise LightRLError(f"{node}: no such node; there are {', '.join(roles) or 'none'}")
    for role in ("coordinator", "trainer"):
        if role in roles[node]:
            raise LightRLError(f"{node} is the {role}: lightrl down stops the run")


def final_snapshot(run_dir: Path) -> Snapshot | None:
    """The snapshot left at the end of a run; None while it runs (again)."""
    file = run_dir / "snapshot.json"
    ended, listens = _written_at(file), _written_at(run_dir / "address")
    if ended is None or (listens is not None and listens > ended):
        return None
    try:
        return from_json(file.read_bytes(), Snapshot)
    except FileNotFoundError:
        return None
    except ProtocolError as e:
        raise LightRLError(f"{file}: {e}") from None


def _written_at(file: Path) -> float | None:
    """None if there is no such file, or none any more."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None
