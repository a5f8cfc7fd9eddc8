"""What is done on GPUs, on a processor: FSDP2 for one rank, too, in bfloat16 over float32 weights.

Kernels, streams and pinned memory are all that differs: tests/gpu.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightrl.trainer.model import forward, sharding
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    Save,
    Saved,
    StepFinished,
    Update,
)
from lightrl.wire import unpack_f32
from tests.support.tiers import NEEDS_TORCHAO
from tests.trainer.test_canary import expected

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LORA = {"path": "unused", "lora": {"rank": 4, "alpha": 8.0}}
SECTIONS = [
    pytest.param({}, id="plain"),
    pytest.param(
        {"model": {"path": "unused", "dtype": "bfloat16"}}, id="bfloat16", marks=pytest.mark.e2e
    ),
    pytest.param(
        {"model": {"path": "unused", "dtype": "float16"}}, id="float16", marks=pytest.mark.e2e
    ),
    pytest.param({"train": {"offload": "optimizer"}}, id="optimizer", marks=pytest.mark.e2e),
    pytest.param({"train": {"offload": "all"}}, id="all"),
    pytest.param({"train": {"optim": {"name": "adamw8bit"}}}, id="8bit", marks=NEEDS_TORCHAO),
    pytest.param({"model": LORA}, id="lora", marks=pytest.mark.e2e),
    pytest.param({"algorithm": {"kl_coef": 0.1, "kl_type": "k3"}}, id="kl", marks=pytest.mark.e2e),
    pytest.param({"model": LORA, "algorithm": {"kl_coef": 0.1, "kl_type": "k3"}}, id="lora-kl"),
    pytest.param({"train": {"mini_batches": 2}}, id="mini-batches"),
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(sharding, "COMPUTED", {"cpu": torch.bfloat16})
    monkeypatch.setattr(
        "lightrl.trainer.rank.canary.COMPUTED", {"cpu": torch.bfloat16}, raising=True
    )
    monkeypatch.setitem(forward.TOLERANCE, "cpu", forward.TOLERANCE["cuda"])
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def with_training(sections):
    """Activations are computed again and gradients summed each time, as on GPUs by default."""
    train = {"optim": {"lr": 1e-2}, "activation_checkpointing": True, "sync": "each"}
    given = sections.get("train", {})
    optim = {**train["optim"], **given.get("optim", {})}
    return sections | {"train": {**train, **given, "optim": optim}}


def trained(rank, samples, number):
    """The version and the metrics of one step; of mini-batches the first ends with an update."""
    parts = [samples]
    if rank.config.train.mini_batches > 1:
        parts = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
    for part in parts:
        list(rank.perform(Accumulate(number, (tuple(part),))))
        if part is not parts[-1]:
            some = sum(len(s.token_ids) // 4 for s in part)
            list(rank.perform(Update(number, len(part), some)))
    last = parts[-1]
    tokens = sum(len(s.token_ids) // 4 for s in last)
    [finished] = rank.perform(Update(number, len(last), tokens, number + 1))
    assert isinstance(finished, StepFinished)
    return finished.published, finished.metrics


@pytest.mark.parametrize("sections", SECTIONS)
def test_a_rank_trains_saves_and_is_restored(new_rank, samples, tmp_path, sections):
    sections = with_training(sections)
    rank = new_rank(**sections)
    assert isinstance(rank.learner.policy.module, FSDPModule)
    assert rank.started.is_packed, rank.started.notes
    assert {p.dtype for p in rank.learner.parameters} == {torch.float32}
    for number in range(2):
        published, metrics = trained(rank, samples[:12], number)
        assert metrics["grad_norm"] > 0
        assert metrics["train/skipped_nonfinite"] == 0
        assert math.isfinite(metrics["mismatch_kl/mean"])
    path = tmp_path / "run" / "checkpoints" / "step_2"
    said = rank.save(Save(2, str(path)))
    assert said == [Done(2), Saved(str(path))]
    restored = new_rank(start_step=2, **sections)
    assert restored.started.published.file.digest == published.file.digest
    again = [trained(r, samples[12:], 2) for r in (rank, restored)]
    assert again[0][0].file.digest == again[1][0].file.digest
    assert again[0][1]["grad_norm"] == again[1][1]["grad_norm"]


def test_the_gradient_is_that_of_float32_but_for_rounding(new_rank, samples, monkeypatch):
    found = new_rank(**with_training({}))
    list(found.perform(Accumulate(0, (tuple(samples),))))
    monkeypatch.setattr(sharding, "COMPUTED", {})
    exact = new_rank(**with_training({}))
    list(exact.perform(Accumulate(0, (tuple(samples),))))
    assert not isinstance(exact.learner.policy.module, FSDPModule)
    one, other = (
        torch.cat([whole(p.grad).flatten() for p in r.learner.parameters]) for r in (found, exact)
    )
    assert torch.cosine_similarity(one, other, dim=0) > 0.999
    assert one.norm().item() == pytest.approx(other.norm().item(), rel=0.02)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_canary_is_near_what_engines_compute(model_dir, new_rank, dtype):
    rank = new_rank(model_dir, **with_training({"model": {"path": "unused", "dtype": dtype}}))
    canary = rank.started.published.canary
    assert canary.dtype == "bfloat16"
    wanted = expected(model_dir, rank.started.published, getattr(torch, dtype))
    assert unpack_f32(canary.logprobs) == pytest.approx(wanted, abs=0.2)
