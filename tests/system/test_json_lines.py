"""Lines of JSON that a process was killed while it wrote."""

from dataclasses import dataclass
from pathlib import Path

from lightrl.system.append_file import read_ends, read_rows


@dataclass(frozen=True)
class Line:
    step: int


def test_lines_of_another_form_are_skipped(tmp_path: Path):
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
    ends = [len(b"\n".join(lines[:k])) + 1 for k in (1, 6)]
    assert list(read_ends(file, Line)) == list(zip(ends, [Line(1), Line(2)], strict=True))
    assert list(read_ends(file, Line, ends[0])) == [(ends[1], Line(2))]
    assert list(read_rows(tmp_path / "none", Line)) == []
