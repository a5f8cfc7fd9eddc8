"""The files of a data set and their readers: JSONL and its like, parquet, folders, the hub.

Owns the meaning of path, subset and split. Every problem is one line with the path of the set. Must
not import numpy, datasets or pyarrow before they are needed: the command line imports this module.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.config.data import DataSet
from lightrl.config.evaluation import EvaluationSet
from lightrl.config.values import TASKS, data_suffix, is_data_file, without_compression
from lightrl.errors import DataError, DataUnreachable, first_line
from lightrl.model_files import HUB_ID

if TYPE_CHECKING:
    from lightrl.data.rows import Rows

# Of a folder the files of the first kind that it has: others may describe them.
KINDS = ((".jsonl", ".parquet"), (".csv", ".tsv"), (".json",))
DEFAULT_SPLIT = "train"
# Splits in names of files, as on the hub.
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
# What datasets raises for files that are not its own.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
SPLITS_FILE = "dataset_dict.json"
MISSING = "pip install 'lightrl[data]'"


def open_rows(one: DataSet) -> "Rows":
    """All rows of a set. Raises DataError, one line."""
    from lightrl.data.rows import JoinedRows, MadeRows

    if one.path.startswith(TASKS):
        return MadeRows(one.path, _made(one))
    path, split = _path_and_split(one)
    place = Path(path)
    if place.is_dir() and (saved := _saved_folder(one, place)) is not None:
        return _saved_rows(one, saved, split)
    if place.exists():
        return JoinedRows(list(_rows_of_files(files(one), one.prompt_key)))
    if not HUB_ID.fullmatch(path) or is_data_file(path):
        raise DataError(f"{path}: no such file")
    return _hub_rows(one, path, split)


def count_rows(one: DataSet) -> int | None:
    """Count rows by lines or footers; None for a set that is not on this machine yet, or needs
    pyarrow and lacks it. Raises DataError."""
    if one.path.startswith(TASKS):
        return len(_made(one))
    path, split = _path_and_split(one)
    place = Path(path)
    if not place.exists():
        return None
    try:
        if place.is_dir() and (saved := _saved_folder(one, place)) is not None:
            return _saved_rows(one, saved, split).num_rows
        return sum(_count(file) for file in files(one))
    except DataError as e:
        if MISSING in str(e):
            return None
        raise


def require_there(one: DataSet) -> None:
    """Raises DataError, one line, for a set whose files are missing, without reading them."""
    if one.path.startswith(TASKS):
        return
    path, split = _path_and_split(one)
    place = Path(path)
    local = place.is_absolute() or path.startswith((".", "~"))
    if place.is_dir() and _saved_folder(one, place) is not None:
        return
    if place.exists():
        empty = [file for file in files(one) if not file.stat().st_size]
        if empty:
            raise DataError(f"{empty[0]}: the file is empty")
    elif local or is_data_file(path) or not HUB_ID.fullmatch(path):
        raise DataError(f"{path}: no such file")
    elif not split:
        _default_split(one, ())


def files(one: DataSet) -> list[Path]:
    """The local files of a set, in order of their names. Raises DataError."""
    path, split = _path_and_split(one)
    place = Path(path)
    if not place.is_dir():
        for key, value in (("subset", one.subset), ("split", split)):
            if value:
                raise DataError(
                    f"{path}: is a file; {key} = {value!r} works only for folders and hub ids"
                )
        return [place]
    if one.subset:
        place = _subset(place, one.subset)
    there = [file for file in sorted(place.rglob("*")) if _is_data(file, place)]
    kinds = ([file for file in there if data_suffix(str(file)) in kind] for kind in KINDS)
    found = next(filter(None, kinds), [])
    if not found:
        subsets = ", ".join(sorted(d.name for d in place.iterdir() if d.is_dir()))
        only = f", only {subsets}" if subsets else ""
        raise DataError(f"{place}: holds no file of rows (.jsonl, .parquet, .csv, .json){only}")
    return _of_split(one, place, found, split)


def _made(one: DataSet) -> range:
    """The indices of rows that are made."""
    first, dash, last = one.path.removeprefix(TASKS).partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise DataError(f"{one.path}: rows that are made look like {TASKS}0-999")
    return range(int(first), int(last) + 1)


def _default_split(one: DataSet, there: Sequence[str]) -> str:
    """The split where the config names none. An evaluation must name one, unless there is only one:
    the default may be the split that trains."""
    if len(there) == 1:
        return there[0]
    if isinstance(one, EvaluationSet):
        splits = f"has the splits {', '.join(sorted(there))}" if there else "names no split"
        raise DataError(f"{one.path}: {splits}: set split to the one to evaluate on")
    return DEFAULT_SPLIT


def _path_and_split(one: DataSet) -> tuple[str, str]:
    """ "org/name:test" is short for a hub id with its split."""
    name, colon, split = one.path.partition(":")
    if not colon or not HUB_ID.fullmatch(name) or Path(one.path).exists():
        return one.path, one.split
    if one.split and one.split != split:
        raise DataError(f"{one.path}: names one split, and split = {one.split!r} another")
    return name, split


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return is_data_file(str(file)) and file.is_file() and not hidden


def _is_parquet(file: Path) -> bool:
    """Return whether a file is parquet, by its name or its first bytes."""
    try:
        with file.open("rb") as content:
            return file.suffix == ".parquet" or content.read(4) == b"PAR1"
    except OSError as e:
        raise DataError(f"{file}: cannot be read: {e.strerror}") from None


def _subset(folder: Path, subset: str) -> Path:
    if (folder / subset).is_dir() and Path(subset).name == subset:
        return folder / subset
    there = ", ".join(sorted(d.name for d in folder.iterdir() if d.is_dir()))
    raise DataError(f"{folder}: no subset {subset!r}; available: {there or 'none'}")


def _no_split(path: str, split: str, there: Sequence[str]) -> DataError:
    return DataError(f"{path}: no split {split!r}; available: {', '.join(sorted(there)) or 'none'}")


def _of_split(one: DataSet, folder: Path, found: list[Path], split: str) -> list[Path]:
    """The files with the split in their name; all, where no name and no config has a split."""
    splits = {file: _split_of(file.relative_to(folder)) for file in found}
    named = sorted({s for s in splits.values() if s})
    if not named and not split:
        return found
    unnamed = [file for file, s in splits.items() if not s]
    if unnamed and not split:
        raise DataError(
            f"{folder}: {unnamed[0].name} lies beside files of a split ({', '.join(named)}): set "
            "split, or move it elsewhere"
        )
    wanted = split or _default_split(one, named)
    chosen = [
        file
        for file, s in splits.items()
        if s == wanted or wanted in (file.stem, without_compression(file.name).stem)
    ]
    if not chosen:
        raise _no_split(str(folder), wanted, named)
    return chosen


def _split_of(file: Path) -> str:
    """ "train-00000-of-00002.parquet" and "train/0.parquet" are of train; "" = none."""
    for part in (file.stem, *reversed(file.parts[:-1])):
        word = re.split(r"[-_.]", part, maxsplit=1)[0]
        if word in SPLITS:
            return word
    return ""


def _rows_of_files(files: Sequence[Path], prompt_key: str) -> Iterator["Rows"]:
    """Yield the rows of files; all converted lines share one temporary file."""
    from lightrl.data.jsonl import JsonlRows, Spool

    spool = Spool()
    for file in files:
        if _is_parquet(file):
            arrow = _arrow(str(file))
            yield arrow.TableRows(str(file), arrow.parquet_table(file), prompt_key)
        else:
            yield JsonlRows(file, prompt_key, spool)


def _count(file: Path) -> int:
    from lightrl.data.formats import BLANK, other_lines

    if _is_parquet(file):
        return _arrow(str(file)).num_rows(file)
    try:
        with file.open("rb") as content:
            _, lines = other_lines(file, content) or ("", enumerate(content))
            return sum(1 for _, line in lines if line.strip(BLANK))
    except OSError as e:
        raise DataError(f"{file}: cannot be read: {e.strerror}") from None


def _arrow(what: str) -> Any:
    try:
        from lightrl.data import arrow
    except ImportError:
        raise DataError(f"{what}: reading it needs pyarrow: {MISSING}") from None
    return arrow


# Folders of `save_to_disk`, and the hub


def _saved_folder(one: DataSet, folder: Path) -> Path | None:
    """The folder that `save_to_disk` wrote; None if it did not."""
    for place in (folder, folder / one.subset):
        if any((place / name).is_file() for name in ("state.json", SPLITS_FILE)):
            if one.subset and place == folder:
                raise DataError(f"{folder}: save_to_disk wrote it: no subset {one.subset!r} there")
            return place
    return None


def _saved_rows(one: DataSet, folder: Path, split: str) -> "Rows":
    datasets = _datasets(f"{folder}: reading it")
    try:
        if (splits := folder / SPLITS_FILE).is_file():
            there = list(map(str, json.loads(splits.read_bytes())["splits"]))
            split = split or _default_split(one, there)
            if split not in there:
                raise _no_split(str(folder), split, there)
            folder, split = folder / split, ""
        state = json.loads((folder / "state.json").read_bytes())
        if split and split != (own := state.get("_split")):
            raise _no_split(str(folder), split, [str(own)] if own else [])
        if not state["_data_files"]:
            raise DataError(f"{folder}: contains no prompts")
        rows = datasets.load_from_disk(str(folder))
    except DAMAGED as e:
        raise DataError(f"{folder}: is not what save_to_disk writes: {first_line(e)}") from None
    return _table_rows(rows, str(folder), one.prompt_key)


def _hub_rows(one: DataSet, name: str, split: str) -> "Rows":
    datasets = _datasets(f"{name}: no such file; as an HF data set it")
    subset, split = one.subset, split or _default_split(one, ())
    label = ":".join(part for part in (name, subset, split) if part)
    try:
        rows = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as e:
        raise _not_loaded(name, subset, split, e) from None
    return _table_rows(rows, label, one.prompt_key)


def _table_rows(rows: Any, label: str, prompt_key: str) -> "Rows":
    if rows._indices is not None:
        rows = rows.flatten_indices()
    return _arrow(label).TableRows(label, rows.data.table, prompt_key)


def _datasets(what: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"{what} needs datasets: {MISSING}") from None
    return datasets


def _not_loaded(name: str, subset: str, split: str, error: Exception) -> DataError:
    """Return an error with the text of the library, which lists existing subsets or splits."""
    if isinstance(error, ConnectionError):
        return DataUnreachable(f"{name}: the hub cannot be reached: {first_line(error)}")
    text = " ".join(str(error).split())[:500]
    return DataError(f"{name}: subset {subset!r}, split {split!r} cannot be loaded: {text}")
