"""Rows of Arrow tables in mapped memory: parquet, files of save_to_disk, data sets of the hub.

Parquet cannot be read by the row: a file is unpacked into a temporary one first, which ends with
the process. Must be imported only where pyarrow is needed.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightrl.data.layouts import ID_COLUMNS, prompt_column, without_nan
from lightrl.data.rows import Keys, keys_of
from lightrl.errors import DataError, first_line

BATCH_ROWS = 4096  # unpacked, or converted to Python objects, in one go
READ_BYTES = 1 << 20


class TableRows:
    """Implements `rows.Rows`."""

    def __init__(self, label: str, table: pa.Table, prompt_key: str) -> None:
        self._label = label
        self._table = table
        self._prompt_key = prompt_key
        self.num_rows = table.num_rows
        self.columns = tuple(table.column_names)

    @cached_property
    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            digest.update(batch.serialize())
        return digest.hexdigest()

    def keys(self) -> Keys:
        prompt = prompt_column(dict.fromkeys(self.columns), self._prompt_key)
        names = [name for name in (prompt, *ID_COLUMNS) if name in self.columns]
        if prompt not in self.columns:
            names = [*self.columns]
        return keys_of(_python_rows(self._table.select(names)), self._prompt_key)

    def where(self, index: int) -> str:
        return f"{self._label}, row {index + 1}"

    def read(self, index: int) -> dict[str, Any]:
        return next(_python_rows(self._table.slice(index, 1)))

    def scan(self) -> Iterator[dict[str, Any]]:
        return _python_rows(self._table)


def parquet_table(file: Path) -> pa.Table:
    """Unpack a parquet file. Raises DataError."""
    schema = _plain(_open(file).schema_arrow)
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise DataError(f"{file}: has several columns {twice[0]!r}")
    try:
        with tempfile.NamedTemporaryFile() as unpacked:
            with pa.ipc.new_stream(unpacked, schema) as sink:
                for batch in _batches(file):
                    sink.write_batch(batch.cast(schema))
            unpacked.flush()
            with pa.memory_map(unpacked.name) as mapped:  # the table holds it
                return pa.ipc.open_stream(mapped).read_all()
    except (OSError, pa.ArrowException) as e:
        place = f"in {tempfile.gettempdir()} (TMPDIR)"
        raise DataError(f"{file}: cannot be unpacked {place}: {first_line(e)}") from None


def num_rows(file: Path) -> int:
    """Return the number of rows in the file's footer. Raises DataError."""
    return int(_open(file).metadata.num_rows)


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
    except (OSError, pa.ArrowException) as e:
        raise DataError(
            f"{file}: not a readable parquet file (cut off?): {first_line(e)}"
        ) from None


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    done = 0
    with _open(file) as parquet:
        batches = parquet.iter_batches(BATCH_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except (OSError, pa.ArrowException) as e:
                raise DataError(
                    f"{file}, row {done + 1} or soon after: cannot be read: {first_line(e)}"
                ) from None
            if batch is None:
                return
            yield batch
            done += batch.num_rows


def _plain(schema: pa.Schema) -> pa.Schema:
    """Values in place of indices into a dictionary: each chunk of a parquet file may have another
    dictionary."""
    fields = (
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in schema
    )
    return pa.schema(fields)


def _python_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    names = [field.name for field in table.schema if _may_have_nan(field.type)]
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        rows = batch.to_pylist()
        for name in names:
            for row in rows:
                row[name] = without_nan(row[name])
        yield from rows


def _may_have_nan(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    parts = (kind.field(k).type for k in range(kind.num_fields))
    return pa.types.is_floating(kind) or any(map(_may_have_nan, parts))
