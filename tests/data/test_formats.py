"""Files of other forms than JSONL and parquet: what is read from them, and what is said of those
that are none."""

import csv
import gzip
import json
from pathlib import Path

import pytest
import zstandard

from lightrl.config.data import DataSet, resolved
from lightrl.data.sources import count_rows, open_rows, require_there
from lightrl.errors import DataError
from tests.data.conftest import load_prompts, settings

ROWS = [
    {"prompt": "a", "answer": "1"},
    {"prompt": 'say "é",\nthen b', "answer": "2"},
    {"prompt": "c", "answer": None},
]


def as_csv(delimiter: str = ",") -> bytes:
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, ["prompt", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS).encode()
BOM = b"\xef\xbb\xbf"
FILES = {
    "plain.jsonl": JSONL,
    "bom.jsonl": BOM + JSONL,
    "bom_alone.jsonl": BOM + b"\r\n" + JSONL.replace(b"\n", b"\r\n"),
    "array.json": ARRAY,
    "indented.json": b"\n " + json.dumps(ROWS, indent=2).encode(),
    "bom.json": BOM + ARRAY,
    "lines.json": JSONL,
    "array.jsonl": ARRAY,
    "table.csv": as_csv(),
    "bom.csv": BOM + as_csv(),
    "semicolons.csv": as_csv(";"),
    "tabs.tsv": as_csv("\t"),
    "lines.jsonl.gz": gzip.compress(JSONL),
    "array.json.gz": gzip.compress(ARRAY),
    "table.csv.gz": gzip.compress(as_csv()),
    "CAPITALS.CSV": as_csv(),
    "CAPITALS.CSV.GZ": gzip.compress(as_csv()),
    "two_members.jsonl.gz": gzip.compress(JSONL[:20]) + gzip.compress(JSONL[20:]),
    "lines.jsonl.zst": zstandard.compress(JSONL),
    "two_frames.jsonl.zst": zstandard.compress(JSONL[:20]) + zstandard.compress(JSONL[20:]),
    "wrong_suffix.jsonl": gzip.compress(JSONL),
    "no_suffix": gzip.compress(ARRAY),
}


@pytest.mark.parametrize("name", FILES)
def test_all_give_the_same_rows(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    one = DataSet(path=str(tmp_path / name), prompt_key="prompt")
    require_there(one)
    rows = open_rows(one)
    assert count_rows(one) == rows.num_rows == 3
    assert rows.columns == ("prompt", "answer")
    assert list(rows.scan()) == [rows.read(i) for i in range(3)] == ROWS
    assert rows.read(1) == ROWS[1]


@pytest.mark.parametrize(
    ("name", "wheres"),
    [
        ("bom_alone.jsonl", ["line 2", "line 3", "line 4"]),
        ("array.json", ["row 1", "row 2", "row 3"]),
        ("table.csv", ["line 2", "line 3", "line 5"]),
        ("lines.jsonl.gz", ["line 1", "line 2", "line 3"]),
    ],
)
def test_a_row_is_named_by_its_place_in_the_file(tmp_path, name, wheres):
    (tmp_path / name).write_bytes(FILES[name])
    rows = open_rows(DataSet(path=str(tmp_path / name), prompt_key="prompt"))
    assert [rows.where(i) for i in range(3)] == [f"{tmp_path / name}, {w}" for w in wheres]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b'["x"]', "row 1: expected a JSON object, found str$"),
        ("a.json", b'[{"prompt": "a"},', r"cannot be read .*Expecting value"),
        ("a.json", b'{\n "data": [{"prompt": "a"}]\n}', "row 1: no 'prompt'.* its keys are data"),
        ("a.csv", b"prompt,answer\na,1\nb,2,3\n", "line 3: 3 values for 2 columns"),
        ("a.csv", b'prompt,answer\n"a,1\n', "cannot be read .*unexpected end of data"),
        ("a.csv", b"1+1=,2\n3+3=,6\n", r"line 2: no 'prompt' .*its keys are 1\+1=, 2"),
        ("a.csv", b"prompt,answer\n,2\n", "line 2: 'prompt' is missing"),
        ("a.csv", b"prompt\n\xff\n", "is no text in UTF-8: .*0xff"),
        ("a.csv", b"prompt,answer,answer\na,1,2\n", "line 1: two columns have the same name"),
        ("a.jsonl.gz", gzip.compress(JSONL, mtime=0)[:-20], "cannot be"),
        ("a.jsonl.gz", gzip.compress(b"{oops", mtime=0), "line 1: not valid JSON"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 50, "cannot be unpacked"),
        (
            "a.jsonl",
            b"PK\x03\x04\x14\x00\x00\x00",
            "is no text in UTF-8; data sets are JSONL, JSON arrays",
        ),
        ("a.csv.gz", gzip.compress(b"\0" * 600, mtime=0), "is no text"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, plain, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        load_prompts(str(tmp_path / name), settings(), plain)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_parquet_is_recognised_whatever_its_name_is(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "data.bin")
    one = DataSet(path=str(tmp_path / "data.bin"), prompt_key="prompt")
    assert count_rows(one) == 3
    assert list(open_rows(one).scan()) == ROWS


def test_of_a_folder_what_describes_rows_is_none_of_them(tmp_path):
    def prompts() -> list[str]:
        one = DataSet(path=str(tmp_path), prompt_key="prompt")
        return [row["prompt"] for row in open_rows(one).scan()]

    def write(name: str, *rows: str) -> None:
        content = json.dumps([{"prompt": row} for row in rows]).encode()
        (tmp_path / name).write_bytes(
            gzip.compress(content) if Path(name).suffix == ".gz" else content
        )

    write("rows.json", "json")
    assert prompts() == ["json"]
    (tmp_path / "rows.csv").write_text("prompt\ncsv\n")
    assert prompts() == ["csv"]
    write("a.jsonl", "a")
    write("b.jsonl.gz", "b", "c")
    assert prompts() == ["a", "b", "c"]


def test_a_compressed_file_has_the_split_and_the_name_that_it_had(tmp_path):
    for name in ("train", "test", "gsm"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(
            gzip.compress(b'{"prompt": "%s"}' % name.encode())
        )
    for name in ("train", "test", "gsm"):
        one = DataSet(path=str(tmp_path), split=name, prompt_key="prompt")
        assert [row["prompt"] for row in open_rows(one).scan()] == [name]
    [named] = resolved([DataSet(path="a/gsm.jsonl.gz")], settings())
    assert named.name == "gsm"


def test_many_files_of_other_forms_take_one_descriptor(tmp_path):
    for k in range(100):
        (tmp_path / f"{k:03}.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "%d"}' % k))
    rows = open_rows(DataSet(path=str(tmp_path), prompt_key="prompt"))
    assert [rows.read(k)["prompt"] for k in (99, 0, 50)] == ["99", "0", "50"]
    assert [row["prompt"] for row in rows.scan()] == [str(k) for k in range(100)]
