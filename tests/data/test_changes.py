"""Files that are written again while they are read, or between two runs: no other row is taken for
the one that was there."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.data import DataSet
from lightrl.data.rows import Rows
from lightrl.data.sources import open_rows
from lightrl.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

OLD = [{"id": i, "prompt": f"add {i}", "answer": f"{i}"} for i in range(5)]


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    """In place: the file stays the same one."""
    if file.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(rows)
        with file.open("wb") as out:
            parquet.write_table(table, out)
        return file
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if file.suffix == ".json":
        lines = json.dumps(rows).encode()
    if file.suffix == ".csv":
        values = [",".join(map(str, row.values())) for row in rows]
        lines = "\n".join([",".join(rows[0]), *values]).encode()
    file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return file


def opened(file: Path) -> Rows:
    return open_rows(DataSet(path=str(file), prompt_key="prompt"))


@pytest.mark.parametrize(
    "new",
    [
        OLD[::-1],
        [{**row, "answer": "other"} for row in OLD],
        [{**row, "answer": "x"} for row in OLD],  # of the same length
        OLD[3:],
    ],
    ids=["order", "longer", "as long", "fewer"],
)
def test_a_row_that_has_changed_is_named(tmp_path, new):
    rows = opened(write(tmp_path / "train.jsonl", OLD))
    assert rows.read(1) == OLD[1]
    write(tmp_path / "train.jsonl", new)
    with pytest.raises(DataError, match=r"train.jsonl, line 2: has changed since it was read fi"):
        rows.read(1)


def test_the_same_rows_written_again_are_no_change_and_other_ones_are(tmp_path):
    rows = opened(write(tmp_path / "train.jsonl", OLD))
    write(tmp_path / "train.jsonl", OLD)
    assert [rows.read(i) for i in range(5)] == OLD
    os.replace(write(tmp_path / "new.jsonl", OLD[::-1]), tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="has changed since it was read first"):
        rows.read(0)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl.gz", "a.parquet"])
def test_what_was_converted_stays_as_it_was(tmp_path, name):
    rows = opened(write(tmp_path / name, OLD))
    before = list(rows.scan())
    write(tmp_path / name, OLD[::-1])
    assert [rows.read(i) for i in range(5)] == before


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.parquet"])
def test_the_digest_is_of_all_that_rows_hold(tmp_path, name):
    digest = opened(write(tmp_path / name, OLD)).digest
    assert opened(write(tmp_path / name, OLD)).digest == digest
    for new in (
        [{**OLD[0], "answer": "7"}, *OLD[1:]],
        [{**OLD[0], "prompt": "sub 0"}, *OLD[1:]],
        OLD[::-1],
        OLD[1:],
    ):
        assert opened(write(tmp_path / name, new)).digest != digest


def test_the_digest_of_saved_tables_and_of_folders(tmp_path):
    datasets = pytest.importorskip("datasets")

    def saved(rows: list[dict[str, Any]]) -> str:
        folder = tmp_path / f"saved {len(list(tmp_path.iterdir()))}"
        datasets.Dataset.from_list(rows).save_to_disk(folder)
        return opened(folder).digest

    assert saved(OLD) == saved(OLD)
    assert saved(OLD) != saved([{**OLD[0], "answer": "7"}, *OLD[1:]])
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.jsonl", OLD[:2])
    write(folder / "b.jsonl", OLD[2:])
    digest = opened(folder).digest
    write(folder / "b.jsonl", [{**row, "answer": "7"} for row in OLD[2:]])
    assert opened(folder).digest != digest
