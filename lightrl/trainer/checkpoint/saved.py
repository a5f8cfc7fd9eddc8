"""The checkpoints of a run on the disk: their names, the newest one, leftovers of killed saves.

Must not import torch: daemons look for the newest one.

    checkpoints/latest              name of the newest complete checkpoint
    checkpoints/step_N/trainer.json SavedStep; contents.py has the rest
    checkpoints/step_0              of another run, with which this one begins (initial.py)
    checkpoints/step_N.damaged      corrupt; not used
    checkpoints/step_N.rewound      undone by `resume --from-checkpoint`; not used
    checkpoints/.step_N.draft       being written
    checkpoints/.step_N.old         being replaced by a draft that is complete
    checkpoints/.step_N.gone        being removed
"""

import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightrl.config.schema import CHECKPOINTS as CHECKPOINTS
from lightrl.config.sections import Checkpoint
from lightrl.errors import TrainerError
from lightrl.system import files
from lightrl.wire import from_json

STEP_FILE = "trainer.json"  # in a checkpoint
EXPORT = "hf"  # users may edit or remove it: nothing is restored from it
STATE = "state"  # what ranks restore
LAYOUT_FILE, MODEL = "layout.json", "model"  # see layout.py
DAMAGED, REWOUND = "damaged", "rewound"  # reasons for which one is set aside

_SET_ASIDE = re.compile(rf"step_(\d+)\.(?:{DAMAGED}|{REWOUND})", re.ASCII)


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint's metadata. Example: SavedStep(step=50, policy_version=50, digest="9f3a...")."""

    # optimizer steps done
    step: int
    policy_version: int
    # of the published version; restored weights must have it, in the same dtype
    digest: str
    # false before the first update
    has_optimizer: bool = True
    # of the published parameters; "" in old checkpoints
    dtype: str = ""
    # steps of the learning-rate schedule before step 0, in the run that this one began from
    steps_before: int = 0
    # train.optim.name of the state; "" = not known, or none
    optimizer: str = ""
    # responses and tokens of the running mean, see learner/token_mean.py
    token_sums: tuple[float, float] = (0.0, 0.0)
    # path in the checkpoint -> digest
    files: dict[str, str] = field(default_factory=dict[str, str])
    # digest of all the above, see checksums.py
    seal: str = ""

    def require_digest(self, digest: str, dtype: str, has_adapters: bool = False) -> None:
        """Raise TrainerError if the restored weights, published in `dtype`, are not those saved. In
        another dtype they are not comparable. The digest of adapters covers the model beside them.
        """
        if dtype == self.dtype and digest != self.digest:
            why = ", as they have beside another model than they were trained with"
            raise TrainerError(
                f"checkpoint of step {self.step}: the restored weights have another digest"
                + (why if has_adapters and self.step == 0 else "")
            )


def read_step(checkpoint: Path) -> SavedStep:
    """Raises OSError or ProtocolError if there is no complete checkpoint."""
    return from_json((checkpoint / STEP_FILE).read_bytes(), SavedStep)


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Example: checkpoint_path(Path("runs/a/checkpoints"), 5) ==
    Path("runs/a/checkpoints/step_5")."""
    return checkpoints / f"step_{step}"


def restored_at(checkpoints: Path, step: int, settings: Checkpoint) -> Path | None:
    """Return what ranks restore that start at `step`; None = they begin with the model."""
    has_any = step > 0 or bool(settings.initial_load_path)
    return checkpoint_path(checkpoints, step) if has_any else None


def step_of(checkpoint: Path) -> int:
    """Read the optimizer steps from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def latest(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    named = _named(checkpoints)
    if named is not None and _is_complete(named):
        return named
    # `latest` is written after the checkpoint: it may be missing, or name one that is gone
    return next((path for path in reversed(by_step(checkpoints)) if _is_complete(path)), None)


def newest_in(folder: Path) -> Path | None:
    """Find the checkpoint that a user means by a directory: itself, or the newest of a run or of a
    folder of checkpoints."""
    if (folder / STEP_FILE).is_file():
        return folder
    return latest(folder / CHECKPOINTS) or latest(folder)


def by_step(checkpoints: Path) -> list[Path]:
    """List all that have the name of a checkpoint, lowest step first."""
    return sorted((p for p in checkpoints.glob("step_*") if _is_numbered(p.name)), key=step_of)


def those_beside(absent: Path) -> str:
    """Return the complete checkpoints beside a missing one, for an error message."""
    whole = [path.name for path in by_step(absent.parent) if _is_complete(path)]
    return f"; there are {', '.join(whole)}" if whole else ""


def oldest_kept(checkpoints: Path, step: int, keep_last: int) -> int:
    """Return the step of the oldest of the `keep_last` newest checkpoints, from which a trainer
    that has saved `step` may have to restart. The model that the run began with counts as step 0.
    """
    whole = [step_of(p) for p in by_step(checkpoints) if _is_complete(p)]
    return [0, *(s for s in whole if s <= step)][-keep_last:][0]


def newest_sound(
    checkpoints: Path, find_corruption: Callable[[Path], str], report: Callable[[str], None]
) -> Path | None:
    """Return the newest complete checkpoint without corruption. Move others aside and `report` each
    in one line. Call while no rank writes a checkpoint.

    Raises TrainerError if one cannot be moved.
    """
    while (path := _newest(checkpoints)) is not None and (problem := find_corruption(path)):
        try:
            aside = set_aside(path, DAMAGED)
            if (other := latest(checkpoints)) is not None:
                point(checkpoints, other)
        except OSError as e:
            raise TrainerError(
                f"{path}: {problem}, and it cannot be moved aside: {e.strerror}"
            ) from None
        where = f"going back to {other.name}" if other is not None else "there is no older one"
        report(f"WARNING: {path}: {problem}; moved aside as {aside.name}, {where}")
    return path


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename it. Return its new path. Raises OSError."""
    aside = checkpoint.with_name(f"{checkpoint.name}.{why}")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    checkpoint.rename(aside)
    return aside


def forget_set_aside(checkpoints: Path, step: int) -> None:
    """Remove what was set aside of steps before `step`, which has a sound checkpoint; of later
    steps the newest of each kind stays."""
    for why in (DAMAGED, REWOUND):
        paths = checkpoints.glob(f"step_*.{why}")
        found = {int(m[1]): path for path in paths if (m := _SET_ASIDE.fullmatch(path.name))}
        newest = max(found, default=0)
        for old in [s for s in found if s < max(step, newest)]:
            shutil.rmtree(found[old], ignore_errors=True)


def point(checkpoints: Path, newest: Path) -> None:
    """Make `latest` name this one, durably. Raises OSError."""
    files.write_whole(checkpoints / "latest", f"{newest.name}\n".encode())


def put_in_place(draft: Path, path: Path, keep_last: int, keep_every: int = 0) -> None:
    """Rename the draft to `path`, the newest checkpoint, once everything in it is on the disk.
    Remove all but the newest `keep_last` and those of each `keep_every` steps, and what was set
    aside of earlier steps. Raises OSError.
    """
    for entry in [*draft.rglob("*"), draft]:
        files.sync(entry)
    if path.exists():  # of the same step, before a resume
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        draft.rename(path)
        files.sync(path.parent)  # before the old files go
        shutil.rmtree(old)
    else:
        draft.rename(path)  # its name lasts once `latest` does, in the same folder
    point(path.parent, path)
    others = [p for p in by_step(path.parent) if p != path]
    older = [p for p in others if step_of(p) < step_of(path)]
    kept = older[1 - keep_last :] if keep_last > 1 else []
    kept += [p for p in older if keep_every and step_of(p) and step_of(p) % keep_every == 0]
    for p in others:  # what is newer is of steps that were undone
        if p not in kept:
            remove(p)
    forget_set_aside(path.parent, step_of(path))


def remove(checkpoint: Path) -> None:
    """Remove it under another name: a part of a checkpoint never has the name of a whole one."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    with contextlib.suppress(OSError):
        shutil.rmtree(gone, ignore_errors=True)
        checkpoint.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def tidy(checkpoints: Path) -> None:
    """Remove leftovers of killed saves. Call while no rank writes a checkpoint."""
    for left in [p for p in checkpoints.glob(".step_*") if p.is_dir()]:
        name, _, state = left.name.removeprefix(".").partition(".")
        path = left.with_name(name)
        if state == "old" and _is_complete(left) and not path.exists():
            with contextlib.suppress(OSError):  # it was not replaced
                left.rename(path)
                continue
        if state in {"old", "draft", "gone"}:
            shutil.rmtree(left, ignore_errors=True)
    for left in checkpoints.glob(".ranks-*"):  # rendezvous of several nodes
        left.unlink(missing_ok=True)
    for left in checkpoints.glob(f"step_*/.{EXPORT}.draft"):
        shutil.rmtree(left, ignore_errors=True)


def _newest(checkpoints: Path) -> Path | None:
    """Return what `latest` names, even if it is incomplete."""
    named = _named(checkpoints)
    return named if named is not None and named.is_dir() else latest(checkpoints)


def _named(checkpoints: Path) -> Path | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = (checkpoints / "latest").read_text().strip()
        return checkpoints / name if _is_numbered(name) else None
    return None


def _is_numbered(name: str) -> bool:
    return re.fullmatch(r"step_\d+", name, re.ASCII) is not None


def _is_complete(path: Path) -> bool:
    return (
        _is_numbered(path.name.removeprefix(".").removesuffix(".old"))
        and (path / STEP_FILE).is_file()
    )
