import asyncio
import errno
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.errors import TrainerError
from lightrl.trainer.checkpoint import writer
from lightrl.trainer.checkpoint.checksums import PIECE_BYTES, find_corruption, with_checksums
from lightrl.trainer.checkpoint.export import export
from lightrl.trainer.checkpoint.on_disk import (
    SavedStep,
    latest,
    newest_sound,
    oldest_kept,
    point,
    remove,
    tidy,
)
from lightrl.trainer.model.policy import shards
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    ResetStep,
    Save,
    Saved,
    Update,
)
from lightrl.trainer.rank_processes import Place
from lightrl.trainer.served import ServedVersions
from lightrl.trainer.trainer import Trainer
from lightrl.weights.serve.server import WeightServer
from lightrl.wire import to_json
from tests.support.daemons import make_config

DEADLINE_S = 60

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def train(rank, samples, step):
    list(rank.perform(Accumulate(step, (tuple(samples),))))
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    [finished] = rank.perform(Update(step, len(samples), tokens, step + 1))
    return finished.published.file.digest


def stored(policy):
    """The weights of a policy on one rank, as the model directory would have them."""
    found = shards(policy, is_stored=True)
    return {s.name: s.values.to(s.dtype).view(s.shape) for s in found}


def save(rank, folder: Path, step: int, export: bool = False) -> Path:
    path = folder / "run" / "checkpoints" / f"step_{step}"
    expected = [
        Done(step),
        Saved(str(path)),
        *([Saved(str(path), is_export=True)] if export else []),
    ]
    assert rank.save(Save(step, str(path), export)) == expected
    return path


def test_a_restored_rank_goes_on_bit_for_bit(new_rank, samples, tmp_path):
    rank = new_rank()
    for step in range(2):
        digest = train(rank, samples, step)
    path = save(rank, tmp_path, 2)
    again = new_rank(start_step=2)
    assert again.started.published.file.digest == digest
    assert again.started.published.file.policy_version == 2
    for a, b in zip(rank.learner.parameters, again.learner.parameters, strict=True):
        assert rank.learner.optimizer.state[a].keys() == again.learner.optimizer.state[b].keys()
        for key, value in rank.learner.optimizer.state[a].items():
            assert torch.equal(value, again.learner.optimizer.state[b][key]), key
    assert train(again, samples, 2) == train(rank, samples, 2)
    assert json.loads((path / "trainer.json").read_text())["digest"] == digest


def test_saving_changes_nothing_even_before_the_first_update(new_rank, samples, tmp_path):
    rank, other = new_rank(), new_rank()
    save(rank, tmp_path, 0)
    assert train(rank, samples, 0) == train(other, samples, 0)


def test_a_second_checkpoint_is_staged_where_torch_closes_its_stager(
    new_rank, samples, tmp_path, monkeypatch
):
    """As torch 2.11 and 2.12 do after each copy."""
    stage = DefaultStager._stage

    def stage_once(self, *args, **kwargs):
        try:
            return stage(self, *args, **kwargs)
        finally:
            self.close()

    monkeypatch.setattr(DefaultStager, "_stage", stage_once)
    rank = new_rank()
    for step in range(2):
        train(rank, samples, step)
        save(rank, tmp_path, step + 1)


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


def test_those_of_some_steps_stay_for_good(new_rank, samples, tmp_path):
    rank = new_rank(checkpoint={"interval": 1, "keep_last": 1, "keep_every": 2})
    for step in range(5):
        train(rank, samples, step)
        path = save(rank, tmp_path, step + 1)
    assert {p.name for p in path.parent.iterdir()} == {"latest", "step_2", "step_4", "step_5"}
    assert oldest_kept(path.parent, 5, 1) == 5  # nothing is recorded for them


def test_the_rank_goes_on_while_what_it_had_is_written(new_rank, samples, tmp_path, monkeypatch):
    rank, other = new_rank(), new_rank()
    digest = train(rank, samples, 0)
    assert train(other, samples, 0) == digest
    path = tmp_path / "run" / "checkpoints" / "step_1"
    go_on = threading.Event()

    class Writer(FileSystemWriter):
        def write_data(self, *arguments):
            assert go_on.wait(DEADLINE_S)
            return super().write_data(*arguments)

    monkeypatch.setattr(writer, "FileSystemWriter", Writer)
    assert list(rank.perform(Save(1, str(path)))) == [Done(1)]
    for step in (1, 2):
        assert train(rank, samples, step) == train(other, samples, step)
    assert rank.checkpoint_writer.is_busy
    assert rank.events == []
    assert latest(path.parent) is None
    second = threading.Thread(target=lambda: list(rank.perform(Save(3, str(path) + "3"))))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # it waits for the first
    go_on.set()
    second.join(DEADLINE_S)
    rank.checkpoint_writer.wait()
    assert rank.events == [Saved(str(path)), Saved(str(path) + "3")]
    again = new_rank(start_step=1)
    assert again.started.published.file.digest == digest


def test_an_export_is_given_up_when_the_next_checkpoint_is_due(
    new_rank, samples, tmp_path, monkeypatch
):
    rank = new_rank(checkpoint={"keep_last": 2})
    train(rank, samples, 0)
    path = tmp_path / "run" / "checkpoints" / "step_1"
    begun = threading.Event()

    def make(checkpoint, folder, size, is_wanted):
        begun.set()
        while is_wanted():
            time.sleep(0.001)
        return export(checkpoint, folder, size, is_wanted)

    with monkeypatch.context() as slow:
        slow.setattr(writer, "export", make)
        assert list(rank.perform(Save(1, str(path), export=True))) == [Done(1)]
        assert begun.wait(DEADLINE_S)
        train(rank, samples, 1)
        second = path.with_name("step_2")
        list(rank.perform(Save(2, str(second))))
    rank.checkpoint_writer.wait()
    given_up = Saved(str(path), "given up: the next checkpoint is due", is_export=True)
    assert rank.events == [Saved(str(path)), given_up, Saved(str(second))]
    assert find_corruption(path) == ""
    assert not [p for p in path.iterdir() if "hf" in p.name]


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


def flip(file, bit=0):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_what_a_killed_save_left_is_not_removed_in_the_event_loop(tmp_path, monkeypatch):
    left = tmp_path / "checkpoints" / ".step_3.draft"
    left.mkdir(parents=True)
    remove, threads = shutil.rmtree, []

    def rmtree(path, ignore_errors):
        threads.append(threading.get_ident())
        remove(path, ignore_errors=ignore_errors)

    async def story():
        versions = ServedVersions(WeightServer())
        config = make_config(tmp_path)
        trainer = Trainer(config, Place(tmp_path, tmp_path), versions, pytest.fail, pytest.fail)
        try:
            assert await trainer._where_to_start() == 0
        finally:
            await trainer.close()

    with monkeypatch.context() as looking:
        looking.setattr(shutil, "rmtree", rmtree)
        asyncio.run(story())
    assert not left.exists()
    assert threads
    assert threading.get_ident() not in threads


def test_a_checkpoint_that_cannot_be_read_now_is_one_line_and_stays_where_it_is(
    tmp_path, monkeypatch
):
    path = tmp_path / "checkpoints" / "step_3"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text("{}")
    read = Path.read_bytes

    def refuse(file):
        if file == path / "trainer.json":  # and not by its mode: a test may run as root
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return read(file)

    async def story():
        versions = ServedVersions(WeightServer())
        config = make_config(tmp_path)
        trainer = Trainer(config, Place(tmp_path, tmp_path), versions, pytest.fail, pytest.fail)
        try:
            await trainer._where_to_start()
        finally:
            await trainer.close()

    with monkeypatch.context() as lack:
        lack.setattr(Path, "read_bytes", refuse)
        with pytest.raises(TrainerError) as raised:
            asyncio.run(story())
    assert (
        str(raised.value) == f"{path}/trainer.json: cannot look for a checkpoint: Permission denied"
    )
    assert path.is_dir()


def test_a_checkpoint_is_not_damaged_because_no_thread_can_look_at_it(tmp_path, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (tmp_path / "model").write_bytes(b"weights")
    saved = with_checksums(SavedStep(1, 1, "aa"), tmp_path)
    (tmp_path / "trainer.json").write_bytes(to_json(saved))
    with monkeypatch.context() as lack:
        lack.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="new thread") as raised:
            find_corruption(tmp_path)
    assert raised.value.errno == errno.EAGAIN
    assert find_corruption(tmp_path) == ""


def test_whatever_is_changed_in_a_checkpoint_is_noticed(new_rank, samples, tmp_path):
    rank = new_rank()
    train(rank, samples, 0)
    path = save(rank, tmp_path, 1, export=True)
    assert find_corruption(path) == ""
    files = [p for p in path.rglob("*") if p.is_file() and p.parent.name != "hf"]
    assert {"trainer.json", ".metadata", "__0_0.distcp"} <= {p.name for p in files}
    for file in files:
        name, data = str(file.relative_to(path)), file.read_bytes()
        step = 13 if file.name == "trainer.json" else 8 * max(1, len(data) // 3)
        for bit in range(0, 8 * len(data), step):
            flip(file, bit)
            assert find_corruption(path) == f"{name}: damaged", bit
            flip(file, bit)
        file.write_bytes(data[:-1])
        assert find_corruption(path) == f"{name}: damaged"
        file.unlink()
        assert find_corruption(path) == f"{file.name}: No such file or directory"
        file.write_bytes(data)
        assert find_corruption(path) == ""
    assert find_corruption(path, is_wanted=lambda: False) == ""  # not looked at
    flip(path / "hf" / "config.json")  # its user's
    assert find_corruption(path) == ""
    shutil.rmtree(path / "hf")  # to save space
    assert find_corruption(path) == ""


def test_a_large_file_is_looked_at_as_a_whole(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2 * PIECE_BYTES + 5)
    saved = with_checksums(SavedStep(1, 1, "d"), tmp_path)
    (tmp_path / "trainer.json").write_bytes(to_json(saved))
    assert find_corruption(tmp_path) == ""
    for place in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 4):
        for byte, problem in ((b"x", "large: damaged"), (b"\0", "")):
            with (tmp_path / "large").open("r+b") as file:
                file.seek(place)
                file.write(byte)
            assert find_corruption(tmp_path) == problem


def test_a_checkpoint_that_was_saved_without_digests_is_taken_as_it_is(tmp_path):
    (tmp_path / "trainer.json").write_text(
        '{"step":1,"policy_version":1,"digest":"d","has_optimizer":true}'
    )
    assert find_corruption(tmp_path) == ""


def test_the_newest_sound_checkpoint_is_found_and_damaged_ones_are_moved_aside(tmp_path):
    for step in (2, 4, 6, 8):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "trainer.json").touch()
        point(tmp_path, tmp_path / f"step_{step}")
    assert [oldest_kept(tmp_path, 8, n) for n in (1, 2, 3, 4, 5, 9)] == [8, 6, 4, 2, 0, 0]
    # before the others were saved
    assert [oldest_kept(tmp_path, 2, n) for n in (1, 2, 3)] == [2, 0, 0]
    bad, lines = {"step_8": "a: damaged", "step_6": "b: damaged"}, []

    def look(path):
        return bad.get(path.name, "")

    assert newest_sound(tmp_path, look, lines.append) == latest(tmp_path) == tmp_path / "step_4"
    assert lines == [
        (
            f"WARNING: {tmp_path}/step_8: a: damaged; moved aside as step_8.damaged, going back "
            "to step_6"
        ),
        (
            f"WARNING: {tmp_path}/step_6: b: damaged; moved aside as step_6.damaged, going back "
            "to step_4"
        ),
    ]
    assert (tmp_path / "latest").read_text() == "step_4\n"
    (tmp_path / "step_4" / "trainer.json").unlink()  # which `latest` names

    def absent(path):
        return "" if (path / "trainer.json").exists() else "trainer.json: gone"

    assert newest_sound(tmp_path, absent, lines.append) == tmp_path / "step_2"
    assert "step_4: trainer.json: gone; moved aside" in lines[-1]
    assert newest_sound(tmp_path, lambda path: "bad", lines.append) is None
    assert lines[-1].endswith("step_2: bad; moved aside as step_2.damaged, there is no older one")
    assert oldest_kept(tmp_path, 0, 2) == 0


def test_what_was_set_aside_goes_when_a_later_step_is_saved(new_rank, samples, tmp_path):
    rank = new_rank()
    train(rank, samples, 0)
    folder = tmp_path / "run" / "checkpoints"
    for step in (3, 5, 7, 9):
        for why in ("damaged", "rewound"):
            (folder / f"step_{step}.{why}" / "state").mkdir(parents=True)
    others = {"step_1.mine", "step_x.damaged", "notes.damaged"}  # not ours to remove
    for name in others:
        (folder / name).mkdir()

    def save_as(step):
        rank.step = step
        save(rank, tmp_path, step)

    def left():
        return {p.name for p in folder.iterdir()} - others - {"latest"}

    save_as(5)
    assert left() == {"step_5", "step_9.damaged", "step_9.rewound"}  # the newest of each kind
    save_as(9)
    assert {"step_9.damaged", "step_9.rewound"} < left()  # as far, but not beyond
    save_as(10)
    assert not [name for name in left() if "." in name]
    assert others < {p.name for p in folder.iterdir()}


def test_a_save_that_fails_changes_nothing_and_can_be_tried_again(new_rank, samples, tmp_path):
    rank, other = new_rank(), new_rank()
    train(rank, samples, 0)
    train(other, samples, 0)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.parent.mkdir()
    checkpoints.touch()  # in the way
    path = checkpoints / "step_1"
    _, failed = rank.save(Save(1, str(path), export=True))
    assert failed.error.startswith("[Errno 20] Not a directory")
    checkpoints.unlink()
    (checkpoints / "latest" / "in the way").mkdir(parents=True)
    _, failed = rank.save(Save(1, str(path), export=True))
    assert failed.error
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
        _, failed = rank.save(Save(1, str(checkpoints / "step_1"), export=True))
        assert failed.error
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
        assert list(rank.perform(ResetStep(step))) == [Done(step)]
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
    published.load_state_dict(stored(rank.learner.policy), strict=False)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, published(ids).logits)
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        name: dtype
        for name, dtype in rank.learner.policy.stored.items()
        if name in stored(rank.learner.policy)
    }
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
    assert rank.started.published.file.digest == other.started.published.file.digest
    train(rank, samples, 0)
    exported = save(rank, tmp_path, 1, export=True) / "hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    for name, parameter in stored(rank.learner.policy).items():
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
