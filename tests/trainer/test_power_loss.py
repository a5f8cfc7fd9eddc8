"""The power fails at any moment of a save: the newest checkpoint that was promised is there, and
whole."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.trainer.checkpoint.checksums import find_corruption
from lightrl.trainer.checkpoint.on_disk import (
    CHECKPOINTS,
    checkpoint_path,
    newest_sound,
    step_of,
    tidy,
)
from lightrl.trainer.protocol import Accumulate, Done, Save, Saved, Update
from tests.support.power import Recorder, power_losses, require_every_sync

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def recorder(new_rank, samples, tmp_path: Path) -> Recorder:
    """Of three saves, the last of which replaces a checkpoint of the same step."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    rank = new_rank(checkpoint={"keep_last": 2})
    with Recorder(run_dir) as recorder:
        for step in (1, 2, 2):
            if step > rank.step:
                list(rank.perform(Accumulate(step - 1, (tuple(samples[:2]),))))
                list(rank.perform(Update(step - 1, 2, 9, step)))
            path = checkpoint_path(run_dir / CHECKPOINTS, step)
            assert rank.save(Save(step, str(path))) == [Done(step), Saved(str(path))]
            recorder.promise(step)
    return recorder


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory, where there is some: there each of thousands of trees takes a millisecond."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "found"


def finder() -> Callable[[Path, list[Any]], None]:
    """Asserts that what was promised is found."""
    known: dict[tuple[tuple[str, int], ...], str] = {}

    def look(path: Path) -> str:
        """As `damage`, once for the same files: they are the same inodes."""
        files = tuple(
            sorted(
                (str(p.relative_to(path)), p.stat().st_ino) for p in path.rglob("*") if p.is_file()
            )
        )
        if files not in known:
            known[files] = find_corruption(path)
        return known[files]

    def recovers(place: Path, promises: list[Any]) -> None:
        lines: list[str] = []
        tidy(place / CHECKPOINTS)
        path = newest_sound(place / CHECKPOINTS, look, lines.append)
        assert (0 if path is None else step_of(path)) >= max(promises, default=0)
        assert lines == []

    return recovers


def test_a_checkpoint_that_is_saved_survives(recorder: Recorder, place: Path):
    assert power_losses(recorder, place, finder()) > len(recorder.events) // 2


@pytest.mark.e2e
def test_a_save_syncs_no_more_than_it_must(recorder: Recorder, place: Path):
    """Some 7,000 trees of directories: each sync is left out once."""
    # A torn `latest` names nothing, and then the newest whole checkpoint counts.
    pointer = "files.write_whole < on_disk.point < on_disk.put_in_place: checkpoints/.latest.draft"
    require_every_sync(recorder, place, finder(), besides=[pointer])
