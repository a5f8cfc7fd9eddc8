"""A file is replaced whole, or stays as it was. That it lasts, too, is tested with the journal."""

import os
from pathlib import Path

import pytest

from lightrl.system import files


@pytest.mark.parametrize("lasting", [True, False])
def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path, lasting: bool):
    path = tmp_path / "file"
    path.write_text("old")
    with files.replacing(path, lasting) as file:
        files.write_at(file, 0, b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [f.name for f in tmp_path.iterdir()] == ["file"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path, error: type[BaseException]):
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with files.replacing(path, keep_open=True) as file:
            descriptors.append(file)
            files.write_at(file, 0, b"half")
            raise error

    descriptors: list[int] = []
    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["file"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_a_file_that_is_kept_open_can_be_written_on(tmp_path: Path):
    path = tmp_path / "file"
    with files.replacing(path, keep_open=True) as file:
        end = files.write_at(file, 0, b"first ")
    files.write_at(file, end, b"second")
    os.close(file)
    assert path.read_text() == "first second"


def test_what_a_killed_writer_left_is_in_nobodys_way(tmp_path: Path):
    path = tmp_path / "file"
    files.draft_of(path).write_text("longer than what is written now")
    files.write_whole(path, b"new")
    assert path.read_text() == "new"
    assert not files.draft_of(path).exists()
