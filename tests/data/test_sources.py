"""Which files a set is: folders, splits, subsets, what save_to_disk writes, ids of the hub."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.data import DataSet
from lightrl.config.evaluation import EvaluationSet
from lightrl.data.layouts import content_key, id_key
from lightrl.data.sources import _not_loaded, count_rows, open_rows, require_there
from lightrl.errors import DataError
from tests.data.conftest import USER, load_prompts, num_open_in, settings

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


LETTERS = "abc"


def rows_of(path: Path, **keys: str) -> list[str]:
    one = DataSet(path=str(path), prompt_key="prompt", **keys)
    require_there(one)
    rows = open_rows(one)
    assert count_rows(one) == rows.num_rows
    prompts = [row["prompt"] for row in rows.scan()]
    assert [rows.read(i)["prompt"] for i in range(rows.num_rows)] == prompts
    return prompts


def refusal(path: Path, **keys: str) -> str:
    with pytest.raises(DataError) as caught:
        open_rows(DataSet(path=str(path), prompt_key="prompt", **keys))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def write(file: Path, *prompts: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": p} for p in prompts]
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_is_all_its_files_in_order_of_their_names(tmp_path):
    write(tmp_path / "b.jsonl", "3")
    write(tmp_path / "a.parquet", "1", "2")
    write(tmp_path / ".cache" / "x.jsonl", "no")
    write(tmp_path / "_old" / "x.jsonl", "no")
    (tmp_path / "notes.txt").touch()
    assert rows_of(tmp_path) == ["1", "2", "3"]


def test_what_is_evaluated_on_is_never_the_split_to_train_on_by_default(tmp_path):
    def evaluated(path: object, **keys: str) -> list[str]:
        one = EvaluationSet(path=str(path), prompt_key="prompt", **keys)
        require_there(one)
        return [row["prompt"] for row in open_rows(one).scan()]

    write(tmp_path / "data" / "train.jsonl", "1")
    write(tmp_path / "only" / "train.jsonl", "1")
    write(tmp_path / "data" / "test.jsonl", "2")
    line = f"{tmp_path / 'data'}: has the splits test, train: set split to the one to evaluate on"
    with pytest.raises(DataError) as caught:
        evaluated(tmp_path / "data")
    assert str(caught.value) == line
    assert evaluated(tmp_path / "data", split="test") == ["2"]
    assert evaluated(tmp_path / "only") == ["1"]
    with pytest.raises(DataError, match=r"^org/name: names no split: set split to the one to eval"):
        require_there(EvaluationSet(path="org/name", prompt_key="prompt"))
    require_there(EvaluationSet(path="org/name:test", prompt_key="prompt"))


def test_names_of_files_say_of_which_split_they_are(tmp_path):
    write(tmp_path / "train-00000-of-00002.parquet", "1")
    write(tmp_path / "train-00001-of-00002.parquet", "2")
    write(tmp_path / "test" / "0.jsonl", "3")
    assert rows_of(tmp_path) == rows_of(tmp_path, split="train") == ["1", "2"]
    assert rows_of(tmp_path, split="test") == ["3"]
    assert "no split 'dev'; available: test, train" in refusal(tmp_path, split="dev")
    write(tmp_path / "more.jsonl", "4")  # of which?
    assert "more.jsonl lies beside files of a split (test, train)" in refusal(tmp_path)
    assert rows_of(tmp_path, split="train") == ["1", "2"]


def test_a_subset_is_a_subfolder_and_one_that_is_missing_is_named_with_those_there_are(tmp_path):
    write(tmp_path / "main" / "train.jsonl", "1")
    write(tmp_path / "socratic" / "train.jsonl", "2")
    assert rows_of(tmp_path, subset="socratic") == ["2"]
    assert refusal(tmp_path, subset="mian").endswith("no subset 'mian'; available: main, socratic")
    assert "is a file; subset = 'main' works only for folders" in refusal(
        tmp_path / "main" / "train.jsonl", subset="main"
    )


def test_what_save_to_disk_writes_is_read_with_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["1", "2"], "n": [1, 2]}
    whole = datasets.Dataset.from_dict(rows)
    whole.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict({"train": whole, "test": whole.select([1])})
    both.save_to_disk(tmp_path / "both")
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "both") == ["1", "2"]
    assert rows_of(tmp_path / "both", split="test") == ["2"]
    assert "no split 'dev'; available: test, train" in refusal(tmp_path / "both", split="dev")
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"cut")
    assert "is not what save_to_disk writes: " in refusal(tmp_path / "one")


def test_what_save_to_disk_writes_may_have_no_split_rows_or_subset(tmp_path):
    datasets = pytest.importorskip("datasets")
    full, empty = (datasets.Dataset.from_dict({"prompt": prompts}) for prompts in (["1"], []))
    full.save_to_disk(tmp_path / "one")
    empty.save_to_disk(tmp_path / "none")
    datasets.DatasetDict({"train": full, "test": empty}).save_to_disk(tmp_path / "both")
    assert refusal(tmp_path / "one", split="test").endswith("no split 'test'; available: none")
    one = EvaluationSet(path=str(tmp_path / "one"), prompt_key="prompt")
    assert open_rows(one).num_rows == 1
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: contains no prompts"
    assert rows_of(tmp_path / "both") == ["1"]
    assert refusal(tmp_path / "both", split="test").endswith("test: contains no prompts")
    for name in ("one", "both"):
        line = "save_to_disk wrote it: no subset 'train' there"
        assert refusal(tmp_path / name, subset="train").endswith(line)
    assert rows_of(tmp_path, subset="one") == ["1"]


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize("text", ["", "5", '{"_data_files": 5, "splits": 5}'])
def test_a_damaged_folder_of_save_to_disk_is_one_line(tmp_path, name, text):
    pytest.importorskip("datasets")
    (tmp_path / name).write_text(text)
    assert "is not what save_to_disk writes: " in refusal(tmp_path)


def test_rows_of_many_groups_and_batches_are_found_by_their_number(tmp_path):
    write(tmp_path / "a.parquet", *map(str, range(301)))
    write(tmp_path / "b.jsonl", *map(str, range(301, 303)))
    assert rows_of(tmp_path) == [str(i) for i in range(303)]


def test_a_parquet_file_with_two_columns_of_one_name_is_one_line(tmp_path):
    table = pyarrow.table([["1"], ["2"]], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet").endswith("a.parquet: has several columns 'prompt'")


def test_a_parquet_file_that_was_cut_off_is_one_line(tmp_path, plain):
    file = tmp_path / "train.parquet"
    write(file, *("ab" * 20 for _ in range(100)))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "not a readable parquet file (cut off?)" in refusal(file)
    file.write_bytes(whole[:4] + bytes(400) + whole[404:])  # its footer is whole
    with pytest.raises(DataError, match=r"train.parquet, row \d+ or soon after: cannot be read"):
        load_prompts(str(file), settings(), plain)


def test_a_column_of_the_wrong_type_is_named_with_its_row(tmp_path, plain):
    file = tmp_path / "train.parquet"
    write(file, 7)
    with pytest.raises(DataError, match=r"train.parquet, row 1: 'prompt' is int, expected text"):
        load_prompts(str(file), settings(), plain)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_both_kinds_of_files_give_the_same_ids(tmp_path, chat, kind):
    write(tmp_path / f"data.{kind}", USER, [{"role": "user", "content": "ho"}], USER)
    first, other, again = [
        p.id for p in load_prompts(str(tmp_path / f"data.{kind}"), settings(), chat)
    ]
    assert (again, first[:5]) == (f"{first}-2", "data/")
    assert first == "data/" + ID_OF_USER
    assert other not in (first, again)


ID_OF_USER = "338773c8e585959b"


def test_arrow_tells_rows_apart_as_jsonl_does():
    from lightrl.data.arrow import TableRows

    ids, texts = [7, -1, 0, 1 << 40, 7], ["a", "bé", "", "a", "c"]
    table = pyarrow.table({"id": ids, "prompt": texts})
    keys = TableRows("rows", table, "prompt").keys()
    assert keys.ids.tolist() == [id_key(str(i)) for i in ids]
    assert keys.contents.tolist() == [content_key(text) for text in texts]
    one, other = ([{"content": a}, {"content": b}] for a, b in ((None, "x"), ("x", None)))
    chats = pyarrow.table({"prompt": [one, other, one]})
    first, second, third = TableRows("rows", chats, "prompt").keys().contents
    assert first == third != second


def categories(num: int) -> Any:
    """Of each 3,000 rows others, as pandas writes them when it appends."""
    texts = [LETTERS[i // 3000] * (1 + i % 7) for i in range(num)]
    groups = [texts[start : start + 3000] for start in range(0, num, 3000)]
    return pyarrow.chunked_array([pyarrow.array(g).dictionary_encode() for g in groups])


@pytest.mark.parametrize("row_group_size", [3000, 9000])
def test_categories_that_differ_from_chunk_to_chunk_are_read(tmp_path, plain, row_group_size):
    """An Arrow file has one dictionary of a column for all of its batches."""
    named = categories(9000)
    columns = {"prompt": named, "kind": named, "id": range(9000)}
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table(columns), file, row_group_size=row_group_size)
    assert rows_of(file) == named.to_pylist()
    loaded = load_prompts(str(file), settings(), plain)
    assert [p.text for p in loaded] == named.to_pylist()
    last = "c" * (1 + 8999 % 7)
    assert loaded[-1].row == {"prompt": last, "kind": last, "id": 8999}


# The hub, from a cache of this machine


@pytest.fixture
def cached(tmp_path, monkeypatch) -> str:
    """org/sums with the subsets main and more, in a cache of the hub, which is out of reach."""
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "train.parquet", "1", "2")
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    built = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "train.parquet"), cache_dir=str(cache)
    )
    file = Path(built["train"].cache_files[0]["filename"])
    for subset in ("main", "more"):
        folder = cache / "org___sums" / subset / "0.0.0" / "0123456789abcdef"
        folder.mkdir(parents=True)
        info = json.loads((file.parent / "dataset_info.json").read_text())
        info |= {"config_name": subset, "dataset_name": "sums", "builder_name": "parquet"}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        (folder / "sums-train.arrow").write_bytes(file.read_bytes())
    return "org/sums"


def test_a_hub_id_is_read_with_its_subset_and_split(cached, plain):
    keys: dict[str, Any] = {"subset": "more", "split": "train"}
    assert [p.text for p in load_prompts(cached, settings(), plain, **keys)] == ["1", "2"]
    short = load_prompts(f"{cached}:train", settings(), plain, subset="more")
    assert short[0].id.startswith("sums-more/")
    with pytest.raises(DataError, match=r"org/sums:train: names one split, and split = 'test'"):
        load_prompts(f"{cached}:train", settings(), plain, split="test")


def test_a_subset_of_a_hub_id_that_is_missing_is_named_with_those_there_are(cached, plain):
    with pytest.raises(DataError, match=r"^org/sums: subset 'mian', .*main.*more"):
        load_prompts(cached, settings(), plain, subset="mian")
    with pytest.raises(DataError, match=r"^org/sums: .*split 'dev' .*train"):
        load_prompts(cached, settings(), plain, subset="main", split="dev")


def test_what_the_library_says_becomes_one_line():
    said = "Config name is missing.\nPlease pick one among the available configs: ['main']"
    line = str(_not_loaded("org/sums", "", "train", ValueError(said)))
    assert line.endswith(
        "Config name is missing. Please pick one among the available configs: ['main']"
    )


def test_many_files_of_lines_take_no_descriptors_and_any_row_is_read(tmp_path):
    for k in range(40):
        (tmp_path / f"{k:03}.jsonl").write_text(f'{{"prompt": "{k}"}}\n')
    rows = open_rows(DataSet(path=str(tmp_path), prompt_key="prompt"))
    assert [rows.read(k)["prompt"] for k in (30, 0, 17, 30)] == ["30", "0", "17", "30"]
    assert num_open_in(tmp_path) == 0


def test_many_parquet_files_take_no_descriptors_and_any_row_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for k in range(40):
        write(tmp_path / f"{k:03}.parquet", *(f"{k}.{i}" for i in range(5)))
    rows = open_rows(DataSet(path=str(tmp_path), prompt_key="prompt"))
    assert num_open_in(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 40
    for index in (199, 0, 77, 199):
        assert rows.read(index)["prompt"] == f"{index // 5}.{index % 5}"


def test_a_parquet_file_without_room_to_unpack_it_is_one_line(tmp_path, monkeypatch):
    write(tmp_path / "train.parquet", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert "cannot be unpacked in" in refusal(tmp_path / "train.parquet")
