"""JSON arrays, CSV and compressed files as lines of JSON.

Compression and arrays are recognised by the first bytes of a file, CSV by its name.
"""

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard

from lightrl.config.values import data_suffix
from lightrl.errors import DataError, first_line

Lines = Iterator[tuple[int, bytes]]  # with the number of each in its file, from 1

GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BLANK = codecs.BOM_UTF8 + b" \t\r\n"
DELIMITERS = ",;\t"  # the most frequent one in the header
BROKEN = (EOFError, ValueError, RecursionError, zlib.error, zstandard.ZstdError, csv.Error)


def other_lines(file: Path, raw: io.BufferedReader) -> tuple[str, Lines] | None:
    """The unit of the numbers ("line", "row"), and the rows. None: `raw` is JSONL, and nothing was
    read from it. Raises OSError, and DataError, one line."""
    opened = raw
    if raw.peek(4).startswith(GZIP):
        opened = io.BufferedReader(gzip.GzipFile(fileobj=raw))  # pyright: ignore[reportArgumentType]
    elif raw.peek(4).startswith(ZSTANDARD):
        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        opened = io.BufferedReader(stream)  # pyright: ignore[reportArgumentType]
    try:
        head = opened.peek(4096)
    except BROKEN as e:
        raise DataError(f"{file}: cannot be unpacked: {first_line(e)}") from None
    if b"\0" in head:
        raise DataError(
            f"{file}: is no text in UTF-8; data sets are JSONL, JSON arrays, CSV or parquet"
        )
    first = head.lstrip(BLANK).partition(b"\n")[0].strip()
    is_csv = data_suffix(str(file)) in (".csv", ".tsv")
    is_array = first.startswith(b"[") or first == b"{"  # an object on several lines is none of rows
    if opened is raw and not is_csv and not is_array:
        return None
    text = io.TextIOWrapper(opened, "utf-8-sig", newline="")
    lines = ((number, line.encode()) for number, line in enumerate(text, 1))
    if is_csv:
        delimiter = max(DELIMITERS, key=first.decode(errors="replace").count)
        lines = _csv_lines(file, text, delimiter)
    elif is_array:
        lines = _array_lines(text)
    return "row" if is_array and not is_csv else "line", _readable(file, text, lines)


def _readable(file: Path, text: IO[str], lines: Lines) -> Lines:
    try:
        with text:
            yield from lines
    except UnicodeDecodeError as e:
        raise DataError(f"{file}: is no text in UTF-8: {first_line(e)}") from None
    except BROKEN as e:
        raise DataError(f"{file}: cannot be read as a whole: {first_line(e)}") from None


def _csv_lines(file: Path, text: IO[str], delimiter: str) -> Lines:
    """All values are text; an empty one is null."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    names = next(reader, [])
    if len(set(names)) < len(names):
        raise DataError(f"{file}, line 1: two columns have the same name")
    begin = reader.line_num + 1
    for values in reader:
        if len(values) > len(names):
            raise DataError(f"{file}, line {begin}: {len(values)} values for {len(names)} columns")
        if values:
            row = dict.fromkeys(names) | {k: v or None for k, v in zip(names, values, strict=False)}
            yield begin, json.dumps(row).encode()
        begin = reader.line_num + 1


def _array_lines(text: IO[str]) -> Lines:
    """Yield the numbered lines of a JSON array, which is read into memory as a whole."""
    value = json.load(text)
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield number, json.dumps(row).encode()
