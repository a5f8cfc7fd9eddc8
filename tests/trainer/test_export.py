"""`lightrl export`: of a checkpoint alone, without the model directory it came from, the model that
was trained; and what it refuses, in one line."""

import importlib
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.cli import main
from lightrl.config.sections import Checkpoint
from lightrl.launch.export import export_checkpoint, find_checkpoint
from lightrl.trainer.checkpoint.on_disk import SavedStep
from lightrl.trainer.checkpoint.writer import CheckpointWriter
from lightrl.trainer.model.policy import load_policy
from lightrl.trainer.protocol import Saved
from tests.support.families import PACKED, saved
from tests.trainer.test_families import CPU, assert_as_alone, responses

__all__ = ["responses"]  # a fixture

FAMILIES = (
    *("qwen2", "qwen2-tied", "qwen3", "llama", "gemma3_text", "opt", "qwen3_moe", "glm4_moe"),
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(source: Path, path: Path):
    """A checkpoint of that model, after weights have changed."""
    policy = load_policy(source, CPU)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(policy.module.parameters())
    said: list[object] = []
    writer = CheckpointWriter(policy, optimizer, source, Checkpoint(), said.append)
    writer.begin(path, SavedStep(1, 1, "d", has_optimizer=False), False)
    writer.wait()
    assert said == [Saved(str(path))]
    return policy


def export(*arguments: object) -> None:
    main(["export", *map(str, arguments)])


def names(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_export_of_a_checkpoint_has_the_logits_of_the_policy(
    tmp_path, responses, family, capsys
):
    source = saved(tmp_path / "source", family, PACKED[family])
    path, out = tmp_path / "checkpoints" / "step_1", tmp_path / "out"
    policy = save(source, path)
    expected = names(source)
    shutil.rmtree(source)
    with pytest.raises(SystemExit) as end:
        export(path, out)
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert names(out) == expected
    assert_as_alone(policy, out, responses)


def test_files_are_no_larger_than_asked_for_and_one_index_names_them_all(
    tmp_path, save_model, capsys
):
    source = save_model(tmp_path / "source", torch.bfloat16)
    path, out = tmp_path / "step_1", tmp_path / "out"
    save(source, path)
    from lightrl.trainer.checkpoint.export import export as export_parts

    export_parts(path, out, shard_bytes=60_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    for i, file in enumerate(files, start=1):
        assert file.name == f"model-{i:05d}-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == names(out) == names(source)
    assert index["metadata"]["total_size"] == 2 * sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(source).parameters()
    )
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"] == [2, 3, 4]
    assert not list(tmp_path.glob(".*"))


@pytest.fixture(scope="module")
def checkpoint(save_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    path = folder / "checkpoints" / "step_1"
    save(save_model(folder / "source"), path)
    return path


def refusal(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        export(*arguments)
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (1, "")
    [line] = captured.err.splitlines()
    return line.removeprefix("lightrl: ")


def test_the_index_of_a_checkpoint_is_read_once_and_not_for_each_tensor(
    checkpoint, tmp_path, monkeypatch
):
    read = FileSystemReader.read_metadata
    calls = []

    def counted(self, *args, **kwargs):
        calls.append(self)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemReader, "read_metadata", counted)
    export_checkpoint(checkpoint, tmp_path / "out", 1)
    assert len(names(tmp_path / "out")) > 1
    assert len(calls) == 1


def test_a_run_is_named_for_its_newest_checkpoint(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(checkpoint.parents[1])
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(Path("mine")).resolve() == checkpoint
    assert find_checkpoint(Path("runs/mine")).resolve() == checkpoint
    assert find_checkpoint(Path("mine/checkpoints/step_1")).resolve() == checkpoint
    assert find_checkpoint(checkpoint) == checkpoint
    assert find_checkpoint(Path("yours")) == Path("yours")
    assert find_checkpoint(Path("mine/checkpoints/step_2")) == Path("runs/mine/checkpoints/step_2")
    assert find_checkpoint(Path("mine/checkpoints")).resolve() == checkpoint


def test_what_is_no_checkpoint_or_no_place_is_refused_in_one_line(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    none = tmp_path / "none"
    assert refusal(capsys, none, out) == f"{none}: no such run or checkpoint"
    assert refusal(capsys, tmp_path, out) == f"{tmp_path}: is no complete checkpoint"
    out.mkdir()
    assert refusal(capsys, checkpoint, out) == f"{out}: exists already; nothing is overwritten"
    assert refusal(capsys, checkpoint, none / "out") == f"{none}: no such directory"
    damaged = tmp_path / "step_1"
    shutil.copytree(checkpoint, damaged)
    state = next((damaged / "state").glob("*.distcp"))
    state.write_bytes(state.read_bytes()[:-1])
    problem = f"is not what was saved: state/{state.name}: damaged"
    assert refusal(capsys, damaged, tmp_path / "new") == f"{damaged}: {problem}"
    (damaged / "layout.json").unlink()
    (damaged / "trainer.json").write_text('{"step":1,"policy_version":1,"digest":"d"}')  # older
    problem = "cannot be exported: it has no layout.json"
    assert refusal(capsys, damaged, tmp_path / "new") == f"{damaged}: {problem}"
    assert {p.name for p in tmp_path.iterdir()} == {"out", "step_1"}


def test_a_checkpoint_that_is_not_there_names_those_beside_it(checkpoint, tmp_path, capsys):
    absent = checkpoint.parent / "step_9"
    said = refusal(capsys, absent, tmp_path / "out")
    assert said == f"{absent}: no such run or checkpoint; there are {checkpoint.name}"


def test_what_libraries_say_while_they_are_imported_is_not_printed(
    checkpoint, tmp_path, monkeypatch, caplog
):
    """transformers imports torchao where it is installed, and that says what it cannot load."""
    name = "lightrl.trainer.checkpoint.export"
    real = importlib.import_module(name)

    class Talkative(ModuleType):
        def __getattr__(self, wanted: str) -> object:
            logging.getLogger("torchao").warning("Failed to load _C.so")
            return getattr(real, wanted)

    monkeypatch.setitem(sys.modules, name, Talkative(name))
    export_checkpoint(checkpoint, tmp_path / "out", None)
    logging.getLogger("torchao").warning("later")
    assert [r.message for r in caplog.records if r.name == "torchao"] == ["later"]


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(checkpoint, tmp_path, capsys):
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    try:
        out = tmp_path / "out"
        line = refusal(capsys, checkpoint, out)
        assert line == f"{out}: No space left on device, 0 MB are free"
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
