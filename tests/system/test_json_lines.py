"""Lines of JSON that a process was killed while it wrote."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from lightrl.system.json_lines import read_lines, read_rows


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
    assert [line for line, _ in read_lines(file, Line)] == [lines[0], lines[5]]


def test_a_file_that_is_not_there_holds_nothing_and_one_that_cannot_be_read_is_an_error(
    tmp_path: Path,
):
    assert list(read_rows(tmp_path / "none", Line)) == []
    with pytest.raises(OSError, match="directory"):
        list(read_rows(tmp_path, Line))
