"""A run that begins with another run's checkpoint: it is taken over bit for bit, whatever becomes
of it, and the learning rate goes on."""

import asyncio
import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from lightrl.config.run_file import parse_config
from lightrl.config.schema import Config
from lightrl.errors import TrainerError
from lightrl.trainer.checkpoint import initial
from lightrl.trainer.checkpoint.checksums import find_corruption, with_checksums
from lightrl.trainer.checkpoint.initial import take_over, where_to_start
from lightrl.trainer.checkpoint.on_disk import SavedStep, latest, oldest_kept, put_in_place
from lightrl.trainer.protocol import Accumulate, Save, Update
from lightrl.wire import from_json, to_json
from tests.support.tiers import NEEDS_TORCHAO
from tests.trainer.test_rank import started

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
OPTIM = {"lr": 1e-3, "warmup_steps": 2, "schedule": "cosine"}


def trained(rank, samples, step):
    list(rank.perform(Accumulate(step, (tuple(samples),))))
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    [finished] = rank.perform(Update(step, len(samples), tokens, step + 1))
    return finished.published.file.digest, finished.metrics["lr"]


def saved_as(rank, tmp_path: Path, step: int) -> Path:
    """A checkpoint of `step` steps that lies where another run has it."""
    path = tmp_path / "other" / "checkpoints" / f"step_{step}"
    rank.save(Save(step, str(path)))
    return path


def beginning_with(source: Path) -> Config:
    checkpoint = {"initial_load_path": str(source)}
    return parse_config({"model": {"path": "m"}, "data": {"path": "d"}, "checkpoint": checkpoint})


def begun(new_rank, source: Path, tmp_path: Path, **sections):
    """The rank of a new run."""
    checkpoints = tmp_path / "run" / "checkpoints"
    assert asyncio.run(where_to_start(beginning_with(source), checkpoints, lambda: True)) == 0
    return new_rank(checkpoint={"initial_load_path": str(source)}, **sections)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def require_same_state(a, b):
    for p, q in zip(a.learner.parameters, b.learner.parameters, strict=True):
        assert torch.equal(p, q)
        x, y = a.learner.optimizer.state[p], b.learner.optimizer.state[q]
        assert x.keys() == y.keys()
        assert all(torch.equal(x[key], y[key]) for key in x)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({}, "adamw"),
        pytest.param({}, "adamw8bit", marks=NEEDS_TORCHAO),
        ({"lora": {"rank": 4, "alpha": 8}}, "adamw"),
    ],
)
def test_two_steps_and_a_new_run_of_three_are_a_run_of_five(
    new_rank, samples, tmp_path, model, name
):
    """The same weights, the same state, the same rates: only the number of a step is another."""
    settings = {"model": {"path": "unused"} | model}
    optim = OPTIM | {"name": name}
    rank = new_rank(**settings, train={"steps": 5, "optim": optim})
    digests = [trained(rank, samples, step)[0] for step in range(2)]
    source = saved_as(rank, tmp_path, 2)
    before = contents(source)
    new = begun(new_rank, source, tmp_path, **settings, train={"steps": 3, "optim": optim})
    version = new.started.published.file
    assert (version.policy_version, version.digest) == (0, digests[-1])
    require_same_state(rank, new)
    assert [trained(new, samples, s) for s in range(3)] == [
        trained(rank, samples, s) for s in range(2, 5)
    ]
    assert contents(source) == before

    # Its own checkpoints know where in the schedule it began, and so does who begins with them.
    new.save(Save(3, str(tmp_path / "run" / "checkpoints" / "step_3")))
    gone, train = {"initial_load_path": "gone"}, {"steps": 3, "optim": optim}
    again = new_rank(start_step=3, checkpoint=gone, train=train, **settings)
    assert again.learner.steps_before == 2
    third = tmp_path / "third"
    take_over(tmp_path / "run" / "checkpoints" / "step_3", third, find_corruption)
    assert from_json((third / "step_0" / "trainer.json").read_bytes(), SavedStep).steps_before == 5


def test_what_was_taken_over_outlives_its_source_and_is_a_checkpoint(
    new_rank, samples, tmp_path, caplog
):
    rank = new_rank()
    trained(rank, samples, 0)
    source = saved_as(rank, tmp_path, 1)
    (source / "hf").mkdir()
    (source / "hf" / "model.safetensors").write_bytes(b"exported")
    checkpoints = tmp_path / "run" / "checkpoints"
    before = contents(source)
    path = take_over(source, checkpoints, find_corruption)
    assert latest(checkpoints) == path == checkpoints / "step_0"
    assert find_corruption(path) == ""
    assert {p.name for p in path.iterdir()} == {"trainer.json", "layout.json", "state", "model"}
    tensors = next((source / "state").glob("*.distcp"))
    assert os.stat(tensors).st_ino == os.stat(path / "state" / tensors.name).st_ino  # not copied
    assert contents(source) == before
    shutil.rmtree(source.parent)  # as the other run does with old ones
    assert find_corruption(path) == ""
    start = partial(where_to_start, beginning_with(source), checkpoints, lambda: True)
    assert asyncio.run(start()) == 0  # and does not look for it
    assert oldest_kept(checkpoints, 0, 2) == 0

    # Damaged, it is nothing to begin with; least of all is the model then.
    (path / "state" / tensors.name).write_bytes(b"")
    with pytest.raises(TrainerError, match=r"step_1: is no complete checkpoint, or none any more"):
        asyncio.run(start())
    assert "moved aside as step_0.damaged, there is no older one" in caplog.text


def test_it_is_kept_as_long_as_any_other_and_not_for_good(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for step in range(4):
        draft = checkpoints / f".step_{step}.draft"
        draft.mkdir(parents=True)
        (draft / "trainer.json").write_bytes(
            to_json(with_checksums(SavedStep(step, step, ""), draft))
        )
        put_in_place(draft, checkpoints / f"step_{step}", keep_last=2, keep_every=2)
        there = {p.name for p in checkpoints.glob("step_*")}
        assert ("step_0" in there) == (step < 2)
        assert oldest_kept(checkpoints, step, 2) == max(0, step - 1)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM])
def test_files_that_cannot_be_linked_are_copied(tmp_path, monkeypatch, number):
    source = emulated_checkpoint(tmp_path)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    path = take_over(source, tmp_path / "checkpoints", find_corruption)
    assert find_corruption(path) == ""
    (path / "state" / "digest").write_bytes(b"other")
    assert find_corruption(source) == ""


def test_on_a_full_disk_nothing_is_left_and_a_later_try_may_succeed(tmp_path, monkeypatch):
    source = emulated_checkpoint(tmp_path)

    def refuse(number, *_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as full:
        full.setattr(os, "link", partial(refuse, errno.EXDEV))
        full.setattr(shutil, "copyfile", partial(refuse, errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            take_over(source, tmp_path / "checkpoints", find_corruption)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert find_corruption(take_over(source, tmp_path / "checkpoints", find_corruption)) == ""


def emulated_checkpoint(tmp_path: Path, step: int = 2, with_digests: bool = True) -> Path:
    source = tmp_path / "other" / f"step_{step}"
    (source / "state").mkdir(parents=True)
    (source / "state" / "digest").write_bytes(bytes(16))
    saved = SavedStep(step, step, "")
    saved = with_checksums(saved, source) if with_digests else saved
    (source / "trainer.json").write_bytes(to_json(saved))
    return source


def test_one_from_before_there_were_digests_gets_them(tmp_path):
    path = take_over(
        emulated_checkpoint(tmp_path, 2, False), tmp_path / "checkpoints", find_corruption
    )
    said = json.loads((path / "trainer.json").read_bytes())
    assert (said["step"], said["policy_version"], said["steps_before"]) == (0, 0, 2)
    assert set(said["files"]) == {"state/digest"}
    (path / "state" / "digest").write_bytes(b"other")
    assert find_corruption(path) == "state/digest: damaged"


def test_a_source_that_is_removed_meanwhile_or_damaged_leaves_nothing(tmp_path, monkeypatch):
    source = emulated_checkpoint(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    link = os.link

    def pruned(file, place):
        link(file, place)
        shutil.rmtree(source, ignore_errors=True)

    with monkeypatch.context() as racing:
        racing.setattr(initial.os, "link", pruned)
        with pytest.raises(TrainerError, match=r"step_2: .*(No such file|none any more)") as raised:
            take_over(source, checkpoints, find_corruption)
    assert "\n" not in str(raised.value)
    assert list(checkpoints.iterdir()) == []

    source = emulated_checkpoint(tmp_path)
    (source / "state" / "digest").write_bytes(b"another")
    with pytest.raises(TrainerError) as raised:
        take_over(source, checkpoints, find_corruption)
    why = "state/digest: damaged; the run cannot begin with this checkpoint"
    assert str(raised.value) == f"{source}: {why}"
    assert list(checkpoints.iterdir()) == []


def test_adapters_beside_another_model_are_refused(new_rank, samples, tmp_path, save_model):
    settings = {"model": {"path": "unused", "lora": {"rank": 4, "alpha": 8}}}
    rank = new_rank(**settings)
    trained(rank, samples, 0)
    source = saved_as(rank, tmp_path, 1)
    other = save_model(tmp_path / "model", tied=False)
    with pytest.raises(TrainerError, match="as they have beside another model than they were"):
        begun(partial(new_rank, other), source, tmp_path, **settings)


@pytest.mark.usefixtures("warm_ranks")
def test_another_number_of_ranks_begins_with_the_same(
    new_rank, start, processes, samples, tmp_path
):
    rank = new_rank()
    digest, _ = trained(rank, samples, 0)
    source = saved_as(rank, tmp_path, 1)
    checkpoints = tmp_path / "run" / "checkpoints"
    take_over(source, checkpoints, find_corruption)
    told = start(checkpoint={"initial_load_path": str(source)}, train={"replicas": 2, "ranks": 2})

    async def on_two_ranks():
        async with processes(told, world=2) as ranks:
            first, _ = await started(ranks)
            return first.published.file

    version = asyncio.run(on_two_ranks())
    assert (version.policy_version, version.digest) == (0, digest)


def test_an_emulated_run_begins_likewise(new_emulated, tmp_path):
    rank = new_emulated()
    source = tmp_path / "other" / "step_0"
    list(rank.perform(Update(0, 0, 0, 1)))
    list(rank.perform(Save(1, str(source.with_name("step_1")))))
    take_over(source.with_name("step_1"), tmp_path / "run" / "checkpoints", find_corruption)
    new = new_emulated(checkpoint={"initial_load_path": "any"})
    assert new.started.published.file.digest == rank.file.digest
    assert new.file.policy_version == 0
