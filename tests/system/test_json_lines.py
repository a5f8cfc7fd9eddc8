"""Lines of JSON that a process was killed while it wrote."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from lightrl.system.append_file import BLOCK_BYTES, read_back, read_rows


@dataclass(frozen=True)
class Line:
    step: int


def test_lines_of_another_form_say_nothing(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    lines = (
        b'{"step":1,"more":[]}',
        b'{"step":"one"}',
        b"[]",
        b"",
        b"\xff",
        b'{"step":2}',
        b'{"st',
    )
    file.write_bytes(b"\n".join(lines))
    assert list(read_rows(file, Line)) == [Line(1), Line(2)]
    ends = [len(b"\n".join(lines[:k])) + 1 for k in (6, 1)]
    assert list(read_back(file, Line)) == list(zip(ends, [Line(2), Line(1)], strict=True))


@pytest.mark.parametrize("length", [1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 7])
def test_lines_are_read_back_whole_however_blocks_lie(tmp_path: Path, length: int):
    file = tmp_path / "lines.jsonl"
    num = max(3, 3 * BLOCK_BYTES // (length + 20))
    lines = [b'{"step":%d,"x":"%s"}\n' % (k, b"x" * length) for k in range(min(num, 300))]
    file.write_bytes(b"".join(lines))
    found = list(read_back(file, Line))
    assert [row.step for _, row in found] == list(range(len(lines)))[::-1]
    assert [end for end, _ in found] == [sum(map(len, lines[:k])) for k in range(len(lines), 0, -1)]


def test_a_last_line_that_is_whole_but_for_its_end_counts(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"step":1}\n{"step":2}')
    assert list(read_back(file, Line)) == [(21, Line(2)), (11, Line(1))]
    assert list(read_rows(file, Line)) == [Line(1), Line(2)]


def test_only_the_end_is_read_back(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)  # a terabyte that is on no disk
        sparse.seek(0, 2)
        sparse.write(b'\n{"step":7}\n')
    assert next(read_back(file, Line)) == ((1 << 40) + 12, Line(7))


def test_a_file_that_is_not_there_holds_nothing_and_one_that_cannot_be_read_is_an_error(
    tmp_path: Path,
):
    assert list(read_rows(tmp_path / "none", Line)) == []
    assert list(read_back(tmp_path / "none", Line)) == []
    with pytest.raises(OSError, match="directory"):
        list(read_rows(tmp_path, Line))
