"""Find the run that a user selects; check whether it is over and whether it answers.

Another run may listen at the address of a coordinator that was killed: a user who names a run gets
that run or an error. Changes no files and no run.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from lightrl.client.address import accepts, find, relative
from lightrl.client.ask import watch
from lightrl.core.state import OVER
from lightrl.errors import LightRLError, PeerUnreachable, ProtocolError, WrongKey
from lightrl.keys import KEY_FILE, find_key, read_key, require_full
from lightrl.messages.snapshot import Snapshot
from lightrl.wire import from_json


@dataclass(frozen=True)
class Target:
    """The run that a user selects with ADDR and --key FILE."""

    # None: no coordinator has listened yet, or the run is over
    address: str | None
    # None: only the address is known
    run_dir: Path | None
    key_file: Path | None = None

    @property
    def name(self) -> str:
        return relative(self.run_dir) if self.run_dir is not None else str(self.address)

    def key(self) -> str:
        """Return the key of the run. Its own key file takes precedence over the environment. Raises
        ConfigError."""
        if (
            self.key_file is None
            and self.run_dir is not None
            and os.access(self.run_dir / KEY_FILE, os.R_OK)
        ):
            return read_key(self.run_dir / KEY_FILE)
        return require_full(
            find_key(self.key_file, self.run_dir), "status, top, drain and down need"
        )

    def last(self) -> Snapshot | None:
        return final_snapshot(self.run_dir) if self.run_dir is not None else None


def resolve_target(addr: str | None, key_file: Path | None = None) -> Target:
    """Resolve an address, a run directory, a name or nothing (the latest run). Raises
    ConfigError."""
    return Target(*find(addr), key_file)


async def one_snapshot(target: Target) -> Snapshot:
    """Return the snapshot of a run. Without a coordinator it is made from the journal, with the
    state "interrupted".

    Raises LightRLError if the run neither answers nor has a journal.
    """
    return target.last() or await _ask(target, or_journal=True)


async def live_run(target: Target) -> tuple[str, Snapshot]:
    """Return address and snapshot of a run that is not over. Raises LightRLError if it is over or
    does not answer."""
    if target.last() is not None:
        raise LightRLError(f"{target.name}: this run is over")
    snapshot = await _ask(target)
    if target.address is None or snapshot.state in OVER:
        raise LightRLError(f"{snapshot.run}: this run is over")
    return target.address, snapshot


async def ask(address: str, key: str) -> Snapshot:
    """Request one snapshot from `address`. Raises PeerUnreachable or WrongKey."""
    async with contextlib.aclosing(watch(address, 0.0, key)) as snapshots:
        async for snapshot in snapshots:
            return snapshot
    raise PeerUnreachable(f"{address}: closed the connection without an answer")


async def _ask(target: Target, or_journal: bool = False) -> Snapshot:
    """Return the snapshot of exactly this run."""
    address, run_dir = target.address, target.run_dir
    if address is None:
        if or_journal and run_dir is not None and (left := _interrupted(run_dir)) is not None:
            return left
        raise PeerUnreachable(
            f"{target.name}: its coordinator has not started; see {target.name}/logs"
        )
    why = f"no answer from {address}"
    if run_dir is None or accepts(address):  # a closed port needs no key
        try:
            snapshot = await ask(address, target.key())
        except PeerUnreachable:
            if run_dir is None:
                raise
        except WrongKey:
            if run_dir is None or target.key_file is not None:
                raise
            why = f"another run answers at {address}"
        else:
            if run_dir is None or is_same(snapshot, run_dir):
                return snapshot
            why = f"another run answers at {address}"
    assert run_dir is not None
    if (last := final_snapshot(run_dir)) is not None:  # the run has just ended
        return last
    left = _interrupted(run_dir)
    if or_journal and left is not None:
        return left
    hint = f"; continue the run with: lightrl resume {target.name}" if left is not None else ""
    raise PeerUnreachable(f"{target.name}: its coordinator is gone ({why}){hint}")


def _interrupted(run_dir: Path) -> Snapshot | None:
    """Return the snapshot at the end of the journal. Imports the journal reader here, since live
    runs do not need it."""
    from lightrl.replay.log import interrupted

    return interrupted(run_dir)


def is_same(snapshot: Snapshot, run_dir: Path) -> bool:
    return Path(snapshot.run_dir).resolve() == run_dir.resolve()


def require_same(snapshot: Snapshot, run_dir: Path | None, address: str) -> None:
    """Raise LightRLError if another run than the one in `run_dir` answers at `address`."""
    if run_dir is not None and not is_same(snapshot, run_dir):
        raise LightRLError(
            f"{relative(run_dir)}: its coordinator is gone (another run answers at {address})"
        )


def require_drainable(snapshot: Snapshot, node: str) -> None:
    """Raise LightRLError if the run has no such node or cannot continue without it."""
    roles = {n.name: n.roles for n in snapshot.nodes if n.state != "gone"}
    if node not in roles:
        raise LightRLError(f"{node}: no such node; nodes are {', '.join(roles) or 'none'}")
    for role in ("coordinator", "trainer"):
        if role in roles[node]:
            raise LightRLError(f"{node} is the {role}; use lightrl down to stop the run")


def final_snapshot(run_dir: Path) -> Snapshot | None:
    """Return the snapshot at the end of a run, or None while it runs. Raises LightRLError."""
    file = run_dir / "snapshot.json"  # a resumed coordinator removes it
    try:
        return from_json(file.read_bytes(), Snapshot)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise LightRLError(f"{file}: cannot be read: {e.strerror}") from None
    except ProtocolError as e:
        raise LightRLError(f"{file}: {e}") from None
