"""Which safetensors files of a model directory are read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightrl.devices.memory import shape_of_folder
from lightrl.errors import ConfigError
from lightrl.model_files import (
    WEIGHTS,
    WEIGHTS_INDEX,
    require_trainable,
    stored_tensors,
    weight_files,
    weights_folder,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_shards(folder: Path, value: float) -> None:
    """`a` and `b`, each in a shard of its own, and their index."""
    for name, file in zip("ab", SHARDS, strict=True):
        save_file({name: torch.full((2, 2), value)}, folder / file)
    write_index(folder, dict(zip("ab", SHARDS, strict=True)))


def read(folder: Path) -> dict[str, float]:
    found = stored_tensors(folder).items()
    return {name: load_file(file)[name][0, 0].item() for name, (file, _) in found}


@pytest.mark.parametrize(
    "stray", ["model-00003-of-00003.safetensors", "model_ema.safetensors", "z.safetensors"]
)
@pytest.mark.parametrize("is_sharded", [True, False])
def test_files_that_no_index_names_are_not_read(tmp_path, stray, is_sharded):
    if is_sharded:
        write_shards(tmp_path, 1.0)
    else:
        save_file({"a": torch.full((2, 2), 1.0), "b": torch.full((2, 2), 1.0)}, tmp_path / WEIGHTS)
    save_file({"a": torch.full((2, 2), 7.0), "c": torch.zeros(9, 9)}, tmp_path / stray)
    assert read(tmp_path) == {"a": 1.0, "b": 1.0}
    names = SHARDS if is_sharded else (WEIGHTS,)
    assert weight_files(tmp_path) == [tmp_path / name for name in names]


def test_the_index_decides_between_two_shards_with_one_tensor(tmp_path):
    write_shards(tmp_path, 1.0)
    tensors = {"a": torch.full((2, 2), 7.0), "b": torch.full((2, 2), 1.0)}
    save_file(tensors, tmp_path / SHARDS[1])  # the later name would win
    assert read(tmp_path) == {"a": 1.0, "b": 1.0}


def test_parameters_are_counted_in_the_weights_alone(tmp_path):
    sizes = {"hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    write_shards(tmp_path, 1.0)
    save_file({"c": torch.zeros(100, 100)}, tmp_path / "model_ema.safetensors")
    shape = shape_of_folder(tmp_path)
    assert shape is not None
    assert shape.num_parameters == 8


def lone(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "pytorch_model.safetensors")


def shard_without_index(folder: Path) -> None:
    write_shards(folder, 1.0)
    (folder / WEIGHTS_INDEX).unlink()


def two_sets(folder: Path) -> None:
    write_shards(folder, 1.0)
    save_file({"a": torch.zeros(2)}, folder / WEIGHTS)


def missing_shard(folder: Path) -> None:
    write_shards(folder, 1.0)
    (folder / SHARDS[1]).unlink()


def missing_tensor(folder: Path) -> None:
    write_shards(folder, 1.0)
    save_file({"b2": torch.zeros(2)}, folder / SHARDS[1])


def empty_index(folder: Path) -> None:
    write_index(folder, {})


def pointer(folder: Path) -> None:
    """As Git LFS leaves it where the file itself was not downloaded."""
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\nsize 12\n")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lone,
            f"has neither {WEIGHTS} nor {WEIGHTS_INDEX}; without them pytorch_model",
        ),
        (shard_without_index, f"nor {WEIGHTS_INDEX}; without them {SHARDS[0]} is"),
        (two_sets, f"holds two sets of weights, {WEIGHTS} and the shards"),
        (missing_shard, f"1 shards of {WEIGHTS_INDEX} are missing: {SHARDS[1]}"),
        (missing_tensor, f"{WEIGHTS_INDEX} places b in {SHARDS[1]}, which does not hold it"),
        (empty_index, f"{WEIGHTS_INDEX} is not an index"),
        (pointer, f"{WEIGHTS} cannot be read: has no header of safetensors"),
    ],
)
def test_a_folder_in_doubt_is_refused_in_one_line(tmp_path, make, line):
    make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        stored_tensors(tmp_path, "org/model")
    assert str(caught.value).startswith("model.path = 'org/model': ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_beside_the_model_is_not_ignored(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_shards(tmp_path, 1.0)
    assert weights_folder(str(tmp_path)) == tmp_path
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json\), which LightRL does not"):
        require_trainable(str(tmp_path), tmp_path)
