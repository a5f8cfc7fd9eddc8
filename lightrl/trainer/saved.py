"""Which checkpoints of a run lie on the disk: their names, the newest one, what a killed save left behind.

Owns the names in a run's folder of checkpoints. Must not import torch: daemons ask where to start.

    checkpoints/latest              name of the newest complete checkpoint
    checkpoints/step_N/trainer.json SavedStep; what else is in there, `trainer.checkpoint` knows
    checkpoints/.step_N.draft       being written
    checkpoints/.step_N.old         being replaced by a draft that is complete
    checkpoints/.step_N.gone        being removed
"""

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SavedStep:
    """What a checkpoint holds. Example: SavedStep(step=50, policy_version=50, digest="9f3a...")."""

    step: int  # optimizer steps done
    policy_version: int
    digest: str  # of the published version: restored weights must give it again
    has_optimizer: bool = True  # there is no state before the first update


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Example: checkpoint_path(Path("runs/a/checkpoints"), 5) == Path("runs/a/checkpoints/step_5")."""
    return checkpoints / f"step_{step}"


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done in a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint of a run, if there is one."""
    with contextlib.suppress(OSError):
        path = checkpoints / (checkpoints / "latest").read_text().strip()
        if _is_complete(path):
            return path
    # The pointer is written after the checkpoint, so that it may be missing, or name one that is gone.
    return next((path for path in reversed(by_step(checkpoints)) if _is_complete(path)), None)


def by_step(checkpoints: Path) -> list[Path]:
    """All that have the name of a checkpoint, lowest step first."""
    return sorted((p for p in checkpoints.glob("step_*") if _is_numbered(p.name)), key=step_of)


def remove(checkpoint: Path) -> None:
    """In two steps, so that half of a checkpoint never has the name of a whole one."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    with contextlib.suppress(OSError):
        shutil.rmtree(gone, ignore_errors=True)
        checkpoint.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def tidy(checkpoints: Path) -> None:
    """Removes what a save that was killed left behind. Call when nobody writes a checkpoint."""
    for left in [p for p in checkpoints.glob(".step_*") if p.is_dir()]:
        name, _, state = left.name.removeprefix(".").partition(".")
        path = left.with_name(name)
        if state == "old" and _is_complete(left) and not path.exists():
            with contextlib.suppress(OSError):  # killed before its successor took its place
                left.rename(path)
                continue
        if state in {"old", "draft", "gone"}:
            shutil.rmtree(left, ignore_errors=True)


def _is_numbered(name: str) -> bool:
    return re.fullmatch(r"step_\d+", name, re.ASCII) is not None


def _is_complete(path: Path) -> bool:
    return (
        _is_numbered(path.name.removeprefix(".").removesuffix(".old")) and (path / "trainer.json").is_file()
    )
