"""Files that are read at any place: how many are open, and what is read where there is no
descriptor."""

import os
import resource
from pathlib import Path

import pytest

from lightrl.config.data import DataSet
from lightrl.data.open_files import MOST, OpenFiles
from lightrl.data.sources import open_rows
from lightrl.errors import DataError
from tests.data.conftest import num_open_in


def test_a_folder_of_many_files_takes_few_descriptors_and_any_row_is_read(tmp_path):
    num = 3 * MOST
    for k in range(num):
        (tmp_path / f"{k:03}.jsonl").write_text(f'{{"prompt": "{k}"}}\n')
    rows = open_rows(DataSet(path=str(tmp_path), prompt_key="prompt"))
    assert [row["prompt"] for row in rows.scan()] == [str(k) for k in range(num)]
    assert [rows.read(k)["prompt"] for k in (90, 0, 50, 90)] == ["90", "0", "50", "90"]
    assert num_open_in(tmp_path) == MOST
    del rows
    assert num_open_in(tmp_path) == 0


def test_what_lies_there_now_is_not_taken_for_a_file_that_was_read_before(tmp_path):
    files = OpenFiles(most=1)
    first, second = tmp_path / "a", tmp_path / "b"
    for file in (first, second):
        file.write_text(file.name)
    assert os.pread(files.descriptor(first), 9, 0) == b"a"
    first.rename(tmp_path / "old")
    first.write_text("else")
    assert os.pread(files.descriptor(first), 9, 0) == b"a"  # it is open still
    files.descriptor(second)
    with pytest.raises(OSError, match="another file lies there"):
        files.descriptor(first)
    assert len(files) == 0


def test_a_row_waits_while_strangers_have_all_descriptors(tmp_path):
    """It is read as soon as there is one, and by no other way."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "first"}\n')
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_rests = 0

    def rest(seconds: float) -> None:
        nonlocal num_rests
        num_rests += 1
        if num_rests == 3:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    files = OpenFiles(rest=rest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
        descriptor = files.descriptor(tmp_path / "train.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.pread(descriptor, 99, 0) == b'{"prompt": "first"}\n'
    assert num_rests == 3


def test_a_file_that_is_not_there_is_said_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        OpenFiles(rest=pytest.fail).descriptor(Path(tmp_path / "none"))


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n')
    rows = open_rows(DataSet(path=str(tmp_path), prompt_key="prompt"))
    (tmp_path / "a.jsonl").unlink()
    assert rows.read(0)["prompt"] == "x"  # it is open still
    with pytest.raises(DataError, match="no such file"):
        open_rows(DataSet(path=str(tmp_path / "a.jsonl"), prompt_key="prompt"))
