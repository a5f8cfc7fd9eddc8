"""Rows of Arrow tables on the disk: parquet files, files of save_to_disk, data sets of the hub.

Parquet cannot be read by the row. A file is unpacked once into small batches: the columns of the
prompt first, all columns in `get_ready`. All files of a set are unpacked into one temporary file
without a name, which ends with the process. Must be imported only where pyarrow is needed.
"""

import bisect
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lightrl.data.layouts import (
    PROMPT_COLUMNS,
    TOOLS,
    content_key,
    explicit_id,
    id_key,
    prompt_column,
    text_key,
    without_nan,
)
from lightrl.data.rows import CHANGED, Keys
from lightrl.errors import DataError, first_line

BATCH_ROWS = 4096  # unpacked, or converted to Python objects, in one go
UNPACKED_ROWS = 128  # read for one row
READ_BYTES = 1 << 20
TEXTS = (pa.string(), pa.large_string())


class TableRows:
    """A table in mapped memory. Implements `rows.Rows`."""

    def __init__(self, label: str, table: pa.Table, prompt_key: str) -> None:
        self._label = label
        self._table = table
        self.num_rows = table.num_rows
        self.columns = tuple(table.column_names)
        self._prompt_column = prompt_column(dict.fromkeys(self.columns), prompt_key)
        self._prompts = table.select(
            [c for c in (self._prompt_column, *PROMPT_COLUMNS[1:]) if c in self.columns]
        )

    @cached_property
    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            digest.update(batch.serialize())
        return digest.hexdigest()

    def keys(self) -> Keys:
        batches = self._prompts.to_batches(max_chunksize=BATCH_ROWS)
        return keys_of(lambda: batches, self._prompt_column)

    def where(self, index: int) -> str:
        return f"{self._label}, row {index + 1}"

    def read(self, index: int) -> dict[str, Any]:
        return _row(self._table, index)

    def read_prompt(self, index: int) -> dict[str, Any]:
        return _row(self._prompts, index)

    def scan(self) -> Iterator[dict[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            yield from _python_rows(batch)

    def get_ready(self) -> None:
        """Nothing to do."""


class ParquetRows:
    """Implements `rows.Rows`."""

    def __init__(self, file: Path, prompt_key: str, spool: "Spool") -> None:
        self._file = file
        self._spool = spool
        self.digest = _digest_of(file)
        parquet = _open(file)
        self.num_rows = int(parquet.metadata.num_rows)
        self.columns = tuple(parquet.schema_arrow.names)
        self._prompt_column = prompt_column(dict.fromkeys(self.columns), prompt_key)
        self._of_prompts = _leaves(parquet.schema_arrow, self._prompt_column)
        self._prompts: Unpacked | None = None
        self._all: Unpacked | None = None

    def keys(self) -> Keys:
        return keys_of(self._unpacked_prompts().batches, self._prompt_column)

    def where(self, index: int) -> str:
        return f"{self._file}, row {index + 1}"

    def read(self, index: int) -> dict[str, Any]:
        self.get_ready()
        assert self._all is not None
        return self._all.row(index)

    def read_prompt(self, index: int) -> dict[str, Any]:
        return self._unpacked_prompts().row(index)

    def scan(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches(None):
            yield from _python_rows(batch)

    def get_ready(self) -> None:
        if self._all is None:
            self._all = self._unpack(None)

    def _unpacked_prompts(self) -> "Unpacked":
        if self._prompts is None:
            self._prompts = self._unpack(self._of_prompts)
        return self._prompts

    def _batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        done = 0
        try:
            with _open(self._file) as parquet:
                for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
                    yield _decoded(batch)
                    done += batch.num_rows
            if columns is None and _digest_of(self._file) != self.digest:
                raise DataError(f"{self._file}: {CHANGED}")
        except (OSError, pa.ArrowException) as e:
            raise DataError(
                f"{self._file}, row {done + 1} or soon after: cannot be read: {first_line(e)}"
            ) from None

    def _unpack(self, columns: Sequence[str] | None) -> "Unpacked":
        try:
            return Unpacked(self._batches(columns), self._spool)
        except OSError as e:
            raise DataError(
                f"{self._file}: no room to unpack it in {tempfile.gettempdir()} (TMPDIR): "
                f"{e.strerror or e}"
            ) from None
        except pa.ArrowException as e:
            raise DataError(f"{self._file}: cannot be unpacked: {first_line(e)}") from None


class Spool:
    """A temporary file without a name that holds many Arrow files: two descriptors in all."""

    def __init__(self) -> None:
        """Raises OSError if there is no room."""
        with tempfile.TemporaryFile() as file:
            place = f"/proc/self/fd/{file.fileno()}"
            self.sink, self._source = pa.OSFile(place, "ab"), pa.OSFile(place)

    def newest(self) -> Any:
        """A reader of the Arrow file that was written last."""
        return pa.ipc.open_file(self._source, footer_offset=self.sink.tell())


class Unpacked:
    """Batches in a temporary file with quick access to any row."""

    def __init__(self, batches: Iterator[pa.RecordBatch], spool: Spool) -> None:
        """Raises OSError if there is no room."""
        self._reader: Any = None  # without any batch
        self._ends: list[int] = []  # after each batch, rows so far
        writer = None
        for batch in batches:
            writer = writer or pa.ipc.new_file(spool.sink, batch.schema)
            for start in range(0, batch.num_rows, UNPACKED_ROWS):
                part = batch.slice(start, UNPACKED_ROWS)
                writer.write_batch(part)
                self._ends.append(part.num_rows + (self._ends[-1] if self._ends else 0))
        if writer is not None:
            writer.close()
            self._reader = spool.newest()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All, in order."""
        for k in range(len(self._ends)):
            yield self._batch(k)

    def row(self, index: int) -> dict[str, Any]:
        k = bisect.bisect_right(self._ends, index)
        batch = self._batch(k)
        return _row(batch, index - self._ends[k] + batch.num_rows)

    def _batch(self, k: int) -> pa.RecordBatch:
        assert self._reader is not None  # or there is no such batch
        return self._reader.get_batch(k)


def saved_table(folder: Path, file_names: Sequence[str]) -> pa.Table:
    """The table of a folder that `Dataset.save_to_disk` wrote. Raises DataError."""
    tables = []
    for name in file_names:
        try:
            tables.append(pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all())
        except (OSError, pa.ArrowException) as e:
            raise DataError(
                f"{folder / name}: not a readable Arrow file: {first_line(e)}"
            ) from None
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as e:
        raise DataError(f"{folder}: its files are not of one table: {first_line(e)}") from None


def num_rows(file: Path) -> int:
    """From the file's footer. Raises DataError."""
    return int(_open(file).metadata.num_rows)


def _digest_of(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "blake2b").hexdigest()[:16]
    except OSError as e:
        raise DataError(f"{file}: cannot be read: {e.strerror or e}") from None


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
    except (OSError, pa.ArrowException) as e:
        raise DataError(
            f"{file}: not a readable parquet file (cut off?): {first_line(e)}"
        ) from None


def _row(table: pa.Table | pa.RecordBatch, index: int) -> dict[str, Any]:
    return _python_rows(table.slice(index, 1))[0]


def _python_rows(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    rows = table.to_pylist()
    for name in [field.name for field in table.schema if _may_have_nan(field.type)]:
        for row in rows:
            row[name] = without_nan(row[name])
    return rows


def _may_have_nan(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    parts = (kind.field(k).type for k in range(kind.num_fields))
    return pa.types.is_floating(kind) or any(map(_may_have_nan, parts))


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Values in place of indices into a dictionary: each chunk of a parquet file may have another
    dictionary, and an Arrow file has one for all."""
    for k, field in enumerate(batch.schema):
        if pa.types.is_dictionary(field.type):
            plain = field.with_type(field.type.value_type)
            batch = batch.set_column(k, plain, batch.column(k).cast(plain.type))
    return batch


def _leaves(schema: pa.Schema, prompt: str) -> list[str]:
    """Columns of the prompt and its id, in parquet's names for nested columns."""
    named = [name for name in (prompt, "id", TOOLS) if name in schema.names]
    if "extra_info" in schema.names:
        kind = schema.field("extra_info").type
        if pa.types.is_struct(kind) and kind.get_field_index("index") >= 0:
            named.append("extra_info.index")
    return named


# Keys of rows


def keys_of(batches: Callable[[], Iterable[pa.RecordBatch]], prompt: str) -> Keys:
    parts = [_id_keys(batch) for batch in batches()]

    def contents() -> NDArray[np.uint64]:
        return _joined(
            [
                _content_keys(batch.column(prompt))
                if prompt in batch.schema.names
                else np.zeros(batch.num_rows, np.uint64)
                for batch in batches()
            ],
            np.uint64,
        )

    return Keys(
        _joined([ids for ids, _ in parts], np.uint64),
        _joined([has for _, has in parts], np.bool_),
        contents,
    )


def _joined(parts: list[NDArray[Any]], kind: type[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _id_keys(batch: pa.RecordBatch) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    keys, has_id = np.zeros(batch.num_rows, np.uint64), np.zeros(batch.num_rows, np.bool_)
    named = [name for name in ("id", "extra_info") if name in batch.schema.names]
    if not named:
        return keys, has_id
    if (numbers := _plain_numbers(batch.column(named[0]))) is not None:
        return numbers, ~has_id
    for k, row in enumerate(batch.select(named).to_pylist()):
        if (own := explicit_id(row)) is not None:
            keys[k], has_id[k] = id_key(own), True
    return keys, has_id


def _plain_numbers(column: pa.Array) -> NDArray[np.uint64] | None:
    """Ids that are whole numbers, none negative or missing, without a loop over rows."""
    if pa.types.is_struct(column.type):  # extra_info
        if column.null_count or column.type.get_field_index("index") < 0:
            return None
        column = column.field("index")
    if not pa.types.is_integer(column.type) or column.null_count or not len(column):
        return None
    values = np.from_dlpack(column)  # `to_numpy` would import pandas
    return values.astype(np.uint64) if values.min() >= 0 else None


def _content_keys(chunk: pa.Array) -> NDArray[np.uint64]:
    """Return keys of prompts, as `content_key` does. Of chats only texts count, not roles."""
    slices: Callable[[], Iterator[memoryview]] | None = None
    if not chunk.null_count:
        slices = _texts_of_strings(chunk) if chunk.type in TEXTS else _texts_of_chats(chunk)
    if slices is not None:
        return np.fromiter(map(text_key, slices()), np.uint64, len(chunk))
    keys = np.zeros(len(chunk), np.uint64)
    for start in range(0, len(chunk), BATCH_ROWS):
        for k, prompt in enumerate(chunk.slice(start, BATCH_ROWS).to_pylist(), start):
            keys[k] = content_key(json.loads(json.dumps(without_nan(prompt), default=str)))
    return keys


def _texts_of_chats(chunk: pa.Array) -> Callable[[], Iterator[memoryview]] | None:
    kind = chunk.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if not pa.types.is_struct(kind.value_type) or kind.value_type.get_field_index("content") < 0:
        return None
    content = chunk.values.field("content")
    if content.type not in TEXTS or content.null_count:
        return None
    texts, offsets = _buffers(content)
    starts: NDArray[Any] = np.from_dlpack(chunk.offsets)
    bounds = offsets[starts].tolist()
    return lambda: (texts[a:b] for a, b in pairwise(bounds))


def _texts_of_strings(chunk: pa.Array) -> Callable[[], Iterator[memoryview]]:
    texts, offsets = _buffers(chunk)
    bounds = offsets.tolist()
    return lambda: (texts[a:b] for a, b in pairwise(bounds))


def _buffers(strings: pa.Array) -> tuple[memoryview, NDArray[Any]]:
    """Their bytes, and the offsets of each and of the end."""
    _, offsets, data = strings.buffers()
    width = np.int64 if strings.type == pa.large_string() else np.int32
    bounds = np.frombuffer(offsets, width)[strings.offset : strings.offset + len(strings) + 1]
    return memoryview(data if data is not None else b""), bounds
