"""The rank of an evaluation publishes, bit for bit, what ranks that train would."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightrl.errors import LightRLError
from lightrl.launch.export import export_checkpoint
from lightrl.trainer.protocol import Save, Saved
from lightrl.trainer.rank.evaluated import EvaluatedRank
from tests.trainer.test_lora import LORA, save, step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def evaluated(start, checkpoint, *args, number=0, **sections):
    """Of `start`'s model directory, unless another one is given."""
    of = {"checkpoint": str(checkpoint), "step": number}
    return EvaluatedRank(start(*args, start_step=number, eval=of, **sections)).started.published


@pytest.fixture
def trained(new_rank, samples, tmp_path):
    """A checkpoint after one step, and what the rank published then."""
    rank = new_rank()
    published, _ = step(rank, samples, 0)
    path = tmp_path / "run" / "checkpoints" / "step_1"
    assert Saved(str(path)) in rank.save(Save(1, str(path), True))
    return path, published


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_model_is_version_0_of_a_run(start, new_rank, model_dir, dtype):
    model = {"path": "unused", "dtype": dtype}
    published = evaluated(start, model_dir, model=model)
    assert published.file.digest == new_rank(model=model).started.published.file.digest
    assert (published.file.policy_version, published.canary, published.base) == (0, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_so_it_is_whatever_the_files_hold(start, new_rank, save_model, tmp_path, dtype, tied):
    model_dir = save_model(tmp_path / "stored", dtype, tied)
    published = evaluated(start, model_dir, model_dir)
    assert published.file.digest == new_rank(model_dir).started.published.file.digest


def test_a_checkpoint_is_the_version_that_was_saved(start, trained):
    path, published = trained
    found = evaluated(start, path, "/nowhere", number=1)
    assert (found.file.policy_version, found.file.digest) == (1, published.file.digest)


def test_so_is_its_export(start, trained):
    path, published = trained
    assert evaluated(start, path / "hf", path / "hf").file.digest == published.file.digest


def test_a_checkpoint_that_is_not_what_was_saved(start, trained):
    path, _ = trained
    file = path / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": "0" * 64}))
    with pytest.raises(LightRLError, match="step_1: is not what was saved"):
        evaluated(start, path, number=1)


def test_a_checkpoint_of_another_shape(start, trained):
    path, _ = trained
    file = path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 48}))
    with pytest.raises(LightRLError, match=r"Size mismatch between saved"):
        evaluated(start, path, number=1)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"num_hidden_layers": 7, "layer_types": None}, "tensors of a .* are not in its files"),
        ({"intermediate_size": 48}, "has shape .*, its config.json says"),
        ({"num_hidden_layers": 7}, r"num_hidden_layers. \(7\) must be equal to"),
    ],
)
def test_a_model_whose_files_do_not_fit_its_config(start, model_dir, tmp_path, says, reason):
    other = shutil.copytree(model_dir, tmp_path / "other")
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | says))
    with pytest.raises(LightRLError, match=reason):
        evaluated(start, other, other)


def test_adapters_are_published_beside_their_base(start, new_rank, samples, tmp_path):
    rank = new_rank(model=LORA)
    published, _ = step(rank, samples, 0)
    path = save(rank, tmp_path, 1)
    found = evaluated(start, path, number=1, model=LORA)
    assert found.base.digest == published.base.digest
    assert found.file.digest == published.file.digest
    out = tmp_path / "adapters"
    export_checkpoint(path, out, None)
    exported = evaluated(start, out, model=LORA)
    assert exported.file.digest == published.file.digest


def test_adapters_of_another_model(start, new_rank, samples, model_dir, tmp_path):
    rank = new_rank(model=LORA)
    step(rank, samples, 0)
    path = save(rank, tmp_path, 1)
    out = tmp_path / "adapters"
    export_checkpoint(path, out, None)
    weights = load_file(out / "adapter_model.safetensors")
    name = sorted(weights)[0]
    save_file({**weights, name: weights[name][:, :3].clone()}, out / "adapter_model.safetensors")
    with pytest.raises(LightRLError, match=f"{name} has shape .*, the model in .* needs"):
        evaluated(start, out, model=LORA)
    del weights[name]
    save_file(weights, out / "adapter_model.safetensors")
    with pytest.raises(LightRLError, match=f"{name} is missing"):
        evaluated(start, out, model=LORA)
    other = shutil.copytree(model_dir, tmp_path / "other")
    [file] = other.glob("*.safetensors")
    changed = {n: t + 1 for n, t in load_file(file).items()}
    save_file(changed, file, {"format": "pt"})
    with pytest.raises(LightRLError, match="step_1: it was trained beside another model than"):
        evaluated(start, path, other, number=1, model=LORA)


def test_it_trains_nothing(start, model_dir):
    of = {"checkpoint": str(model_dir)}
    rank = EvaluatedRank(replace(start(eval=of)))
    with pytest.raises(LightRLError, match="nothing is trained in an evaluation"):
        list(rank.perform(Save(0, "step_0")))
