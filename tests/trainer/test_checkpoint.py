import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.errors import TrainerError
from lightrl.trainer.model import full_parameters
from lightrl.trainer.protocol import Accumulate, Cleared, ClearStep, FinishStep, Save, Saved, SaveFailed
from lightrl.trainer.saved import latest, remove, tidy

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def train(rank, samples, step):
    list(rank.perform(Accumulate(step, (tuple(samples),))))
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    published, _ = rank.perform(FinishStep(step, len(samples), tokens, step + 1))
    return published.manifest.digest


def save(rank, folder: Path, step: int, export: bool = False) -> Path:
    path = folder / "run" / "checkpoints" / f"step_{step}"
    assert list(rank.perform(Save(step, str(path), export))) == [Saved(str(path))]
    return path


def test_a_restored_rank_goes_on_bit_for_bit(new_rank, samples, tmp_path):
    rank = new_rank()
    for step in range(2):
        digest = train(rank, samples, step)
    path = save(rank, tmp_path, 2)
    again = new_rank(start_step=2)
    assert again.started.manifest.digest == digest
    assert again.started.manifest.policy_version == 2
    for a, b in zip(rank.parameters, again.parameters, strict=True):
        assert rank.optimizer.state[a].keys() == again.optimizer.state[b].keys()
        for key, value in rank.optimizer.state[a].items():
            assert torch.equal(value, again.optimizer.state[b][key]), key
    assert train(again, samples, 2) == train(rank, samples, 2)
    assert json.loads((path / "trainer.json").read_text())["digest"] == digest


def test_saving_changes_nothing_even_before_the_first_update(new_rank, samples, tmp_path):
    rank, other = new_rank(), new_rank()
    save(rank, tmp_path, 0)
    assert train(rank, samples, 0) == train(other, samples, 0)


def test_only_whole_checkpoints_appear_and_the_newest_stay(new_rank, samples, tmp_path):
    rank = new_rank(checkpoint={"keep_last": 2})
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / ".step_1.draft" / "state").mkdir(parents=True)  # a save that was killed
    assert latest(checkpoints) is None
    for step in range(3):
        train(rank, samples, step)
        save(rank, tmp_path, step + 1)
    save(rank, tmp_path, 3)  # once more, after a resume
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step_2", "step_3"]
    assert latest(checkpoints) == checkpoints / "step_3"


def test_what_a_killed_save_left_behind_never_passes_for_a_checkpoint(new_rank, samples, tmp_path):
    rank = new_rank(checkpoint={"keep_last": 3})
    checkpoints = tmp_path / "run" / "checkpoints"
    paths = []
    for step in range(3):
        train(rank, samples, step)
        paths.append(save(rank, tmp_path, step + 1))
    (checkpoints / "latest").write_text("step_2\n")  # killed before it wrote the new one
    assert latest(checkpoints) == paths[1]
    (checkpoints / "latest").unlink()
    assert latest(checkpoints) == paths[2]
    (checkpoints / "latest").write_text("../../elsewhere\n")
    assert latest(checkpoints) == paths[2]
    paths[2].rename(checkpoints / ".step_3.old")  # killed while its successor took its place
    shutil.copytree(paths[1], checkpoints / ".step_3.draft")
    (checkpoints / "step_7").mkdir()
    assert latest(checkpoints) == paths[1]
    tidy(checkpoints)
    assert latest(checkpoints) == paths[2]
    paths[2].rename(checkpoints / ".step_3.gone")
    tidy(checkpoints)
    remove(paths[1])
    assert latest(checkpoints) == paths[0]
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step_1", "step_7"]
    tidy(tmp_path / "none")
    assert latest(tmp_path / "none") is None


def test_a_save_that_fails_changes_nothing_and_can_be_tried_again(new_rank, samples, tmp_path):
    rank, other = new_rank(), new_rank()
    train(rank, samples, 0)
    train(other, samples, 0)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.parent.mkdir()
    checkpoints.touch()  # in the way
    path = checkpoints / "step_1"
    [failed] = rank.perform(Save(1, str(path), export=True))
    assert failed == SaveFailed(str(path), f"[Errno 20] Not a directory: '{checkpoints}/.step_1.draft/state'")
    checkpoints.unlink()
    (checkpoints / "latest" / "in the way").mkdir(parents=True)
    [failed] = rank.perform(Save(1, str(path), export=True))
    assert isinstance(failed, SaveFailed)
    assert not list(checkpoints.glob(".step*"))
    shutil.rmtree(checkpoints / "latest")
    save(rank, tmp_path, 1, export=True)
    assert latest(checkpoints) == path
    assert train(rank, samples, 1) == train(other, samples, 1)


def test_a_disk_that_is_full_is_a_save_that_failed(new_rank, samples, tmp_path):
    rank = new_rank()
    train(rank, samples, 0)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(checkpoints)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    try:
        [failed] = rank.perform(Save(1, str(checkpoints / "step_1"), export=True))
        assert isinstance(failed, SaveFailed)
        assert failed.reason
        assert list(checkpoints.iterdir()) == []
        subprocess.run([*mount[:4], "remount,size=64m", *mount[5:]], check=True)
        save(rank, tmp_path, 1, export=True)
    finally:
        subprocess.run(["umount", str(checkpoints)], check=True)


@pytest.mark.parametrize("algorithm", [{"name": "grpo"}, {"name": "reinforce++", "kl_coef": 0.1}])
def test_a_step_begun_anew_is_the_step_that_was_never_begun(new_rank, samples, algorithm):
    rank, other = new_rank(algorithm=algorithm), new_rank(algorithm=algorithm)
    for step in range(2):
        list(rank.perform(Accumulate(step, (tuple(samples[5:9]), tuple(samples[:5])))))
        assert list(rank.perform(ClearStep(step))) == [Cleared(step)]
        assert train(rank, samples, step) == train(other, samples, step)


def test_the_export_is_a_model_that_transformers_loads(new_rank, samples, tmp_path, save_model):
    source = save_model(tmp_path / "source", torch.bfloat16)
    rank = new_rank(source)
    train(rank, samples, 0)
    exported = save(rank, tmp_path, 1, export=True) / "hf"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert (exported / "config.json").read_text() == (source / "config.json").read_text()
    ids = torch.tensor([[3, 4, 5, 6]])
    published = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    published.load_state_dict(dict(full_parameters(rank.policy)), strict=False)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, published(ids).logits)
    assert {name: p.dtype for name, p in model.named_parameters()} == rank.policy.dtypes
    assert AutoTokenizer.from_pretrained(exported)("abc")["input_ids"] == [2, 3, 4]


def test_a_hub_id_is_trained_and_exported_from_its_local_copy(
    new_rank, samples, model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "0123456789abcdef" * 2 + "01234567"
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    blobs, snapshot = repository / "blobs", repository / "snapshots" / commit
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(blobs, max_shard_size="50KB")
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert (snapshot / "model.safetensors.index.json").is_file()

    rank, other = new_rank("org/tiny"), new_rank(model_dir)
    assert rank.started.manifest.digest == other.started.manifest.digest
    train(rank, samples, 0)
    exported = save(rank, tmp_path, 1, export=True) / "hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    for name, parameter in full_parameters(rank.policy):
        assert torch.equal(model.get_parameter(name), parameter)
    assert not any(file.is_symlink() for file in exported.iterdir())


def test_a_missing_or_torn_checkpoint_is_named(new_rank, samples, tmp_path):
    with pytest.raises(TrainerError, match="step_1: no complete checkpoint"):
        new_rank(start_step=1)
    rank = new_rank()
    train(rank, samples, 0)
    path = save(rank, tmp_path, 1)
    (path / "state" / ".metadata").unlink()
    with pytest.raises(TrainerError, match="step_1: cannot be restored"):
        new_rank(start_step=1)
