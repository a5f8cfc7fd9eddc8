"""The power fails at any moment of a save: the newest checkpoint that was promised is there, and
whole."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightrl.trainer.checkpoint.saved import (
    CHECKPOINTS,
    checkpoint_path,
    newest_sound,
    step_of,
    tidy,
)
from lightrl.trainer.checkpoint.seal import damage
from lightrl.trainer.protocol import Accumulate, FinishStep, Save, Saved, Staged
from tests.support.power import Recorder, require_every_sync

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_a_checkpoint_that_is_saved_survives(new_rank, samples, tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    rank = new_rank(checkpoint={"keep_last": 2})
    with Recorder(run_dir) as recorder:
        for step in (1, 2, 2):
            if step > rank.step:
                list(rank.perform(Accumulate(step - 1, (tuple(samples[:2]),))))
                list(rank.perform(FinishStep(step - 1, 2, 9, step)))
            path = checkpoint_path(run_dir / CHECKPOINTS, step)
            assert rank.save(Save(step, str(path))) == [Staged(str(path)), Saved(str(path))]
            recorder.promise(step)

    known: dict[tuple[tuple[str, int], ...], str] = {}

    def look(path: Path) -> str:
        """As `damage`, once for the same files: they are the same inodes."""
        files = tuple(
            sorted(
                (str(p.relative_to(path)), p.stat().st_ino) for p in path.rglob("*") if p.is_file()
            )
        )
        if files not in known:
            known[files] = damage(path)
        return known[files]

    def recovers(place: Path, promises: list[Any]) -> None:
        lines: list[str] = []
        tidy(place / CHECKPOINTS)
        path = newest_sound(place / CHECKPOINTS, look, lines.append)
        assert (0 if path is None else step_of(path)) >= max(promises, default=0)
        assert lines == []

    # A torn `latest` names nothing, and then the newest whole checkpoint counts.
    pointer = "files.write_whole < saved.point < saved.put_in_place: checkpoints/.latest.draft"
    # Seven thousand trees of directories: in memory, where there is some, each takes a millisecond.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        require_every_sync(recorder, Path(folder) / "found", recovers, besides=[pointer])
