"""The learning rate of a step, and AdamW with moments of eight bits: close to AdamW, restored bit
for bit by any number of ranks."""

import asyncio
import math
import sys

import pytest
import torch
from torch import nn

from lightrl.config.sections import Optim
from lightrl.errors import TrainerError
from lightrl.trainer.learner.optim import learning_rate, new_optimizer
from lightrl.trainer.protocol import Accumulate, Done, RankStarted, Save, Saved, Update
from tests.support.tiers import NEEDS_TORCHAO

DEADLINE_S = 110
EIGHT_BITS = {"train": {"optim": {"name": "adamw8bit", "lr": 1e-3}}}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(
    ("section", "rates"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [1 / 4, 2 / 4, 3 / 4, 1, 1, 1]),
        ({"warmup_steps": 3, "schedule": "linear"}, [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0]),
        ({"schedule": "linear", "min_lr_ratio": 0.5}, [1, 0.9, 0.8, 0.7, 0.6, 0.5]),
        ({"warmup_steps": 2, "schedule": "cosine"}, [0.5, 1, 0.853553, 0.5, 0.146447, 0]),
        ({"warmup_steps": 2, "schedule": "cosine", "min_lr_ratio": 0.1}, [0.5, 1, 0.868198, 0.55]),
        ({"warmup_steps": 9, "schedule": "cosine"}, [k / 9 for k in range(1, 7)]),
    ],
)
def test_the_rate_of_a_step(section, rates):
    optim = Optim(lr=2e-3, **section)
    found = [learning_rate(optim, step, 6) / 2e-3 for step in range(len(rates))]
    assert found == pytest.approx(rates, abs=1e-6)


def test_a_run_of_one_step_has_a_rate():
    assert learning_rate(Optim(lr=1.0, schedule="linear"), 0, 1) == 1.0


def test_the_rate_of_a_resumed_run_is_that_of_its_step(new_rank, samples, tmp_path):
    optim = {"lr": 1e-3, "warmup_steps": 2, "schedule": "linear"}
    sections = {"train": {"steps": 4, "optim": optim}}
    rank = new_rank(**sections)
    rates = [trained(rank, samples, step)[1]["lr"] for step in range(2)]
    rank.save(Save(2, str(tmp_path / "run" / "checkpoints" / "step_2")))
    again = new_rank(start_step=2, **sections)
    rates += [trained(again, samples, step)[1]["lr"] for step in range(2, 4)]
    assert rates == pytest.approx([5e-4, 1e-3, 5e-4, 0])


def test_a_run_that_goes_on_with_other_settings_has_them_and_its_state(new_rank, samples, tmp_path):
    """From a checkpoint on; the schedule is where it was."""
    then = {"lr": 1e-3, "warmup_steps": 2, "schedule": "linear"}
    rank = new_rank(train={"steps": 4, "optim": then})
    for step in range(2):
        trained(rank, samples, step)
    rank.save(Save(2, str(tmp_path / "run" / "checkpoints" / "step_2")))
    now = {"lr": 4e-3, "betas": [0.5, 0.75], "eps": 1e-6, "weight_decay": 0.5, "grad_clip": 0.0}
    again = new_rank(start_step=2, train={"steps": 4, "optim": then | now})
    require_equal(state_of(again), state_of(rank))
    assert trained(again, samples, 2)[1]["lr"] == pytest.approx(2e-3)
    [group] = again.learner.optimizer.param_groups
    found = {key: group[key] for key in ("betas", "eps", "weight_decay")}
    assert found == {"betas": (0.5, 0.75), "eps": 1e-6, "weight_decay": 0.5}


@pytest.mark.parametrize("name", ["adamw", pytest.param("adamw8bit", marks=NEEDS_TORCHAO)])
def test_every_key_of_the_optimizer_acts(name):
    """After one step a weight has moved by lr * g / (|g| + eps) + lr * decay * w."""
    weight = nn.Parameter(torch.full((8, 512), 2.0))
    optim = Optim(name=name, lr=0.1, eps=0.5, weight_decay=0.25, betas=(0.5, 0.75))
    optimizer = new_optimizer([weight], optim)
    weight.grad = torch.full_like(weight, 1.5)
    optimizer.step()
    expected = 2.0 - 0.1 * 0.25 * 2.0 - 0.1 * 1.5 / (1.5 + 0.5)
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected))
    weight.grad = torch.zeros_like(weight)  # betas: both moments have halved, or kept 3/4
    optimizer.step()
    mean, square = 0.5 * 0.75 / (1 - 0.5**2), 0.75 * 0.25 * 1.5**2 / (1 - 0.75**2)
    expected -= 0.1 * 0.25 * expected + 0.1 * mean / (math.sqrt(square) + 0.5)
    torch.testing.assert_close(
        weight.detach(), torch.full_like(weight, expected), rtol=1e-2, atol=0
    )


@NEEDS_TORCHAO
def test_moments_of_eight_bits_are_close_and_small():
    """Over many rows, which are updated some at a time; those of other widths stay float32."""
    torch.manual_seed(0)
    shapes = [(40, 896), (33, 100), (64,), (3, 16, 64)]
    target = [torch.randn(shape) for shape in shapes]

    def run(name):
        weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = new_optimizer(weights, Optim(name=name, lr=0.03))
        for _ in range(60):
            for weight, goal in zip(weights, target, strict=True):
                weight.grad = weight.detach() - goal
            optimizer.step()
        return weights, optimizer

    (exact, _), (rough, optimizer) = run("adamw"), run("adamw8bit")
    for a, b, goal in zip(exact, rough, target, strict=True):
        assert (a - b).norm() < 0.03 * goal.norm()
    state = optimizer.state[rough[0]]
    num_bytes = sum(t.numel() * t.element_size() for t in state.values())
    assert num_bytes < 2.1 * rough[0].numel()
    assert [optimizer.state[w]["exp_avg"].dtype for w in rough] == [
        torch.uint8,
        torch.float32,
        torch.float32,
        torch.uint8 if math.prod(shapes[3]) >= 4096 else torch.float32,
    ]


@NEEDS_TORCHAO
def test_rows_are_updated_some_at_a_time(monkeypatch):
    from lightrl.trainer.learner import adamw8bit

    def run():
        torch.manual_seed(1)
        weight = nn.Parameter(torch.randn(37, 256))
        optimizer = new_optimizer([weight], Optim(name="adamw8bit", lr=0.1))
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        return weight

    whole = run()
    monkeypatch.setattr(adamw8bit, "UPDATED_VALUES", 5 * 256)
    assert torch.equal(run(), whole)


def trained(rank, samples, step):
    list(rank.perform(Accumulate(step, (tuple(samples),))))
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    [finished] = rank.perform(Update(step, len(samples), tokens, step + 1))
    return finished.published.file.digest, finished.metrics


def state_of(rank):
    optimizer = rank.learner.optimizer
    return [optimizer.state[p] for p in rank.learner.parameters]


def require_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@NEEDS_TORCHAO
@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_codes_are_restored_bit_for_bit_by_any_number_of_ranks(
    start, new_rank, processes, samples, tmp_path
):
    """By one; by three, which have 22, 22 and 20 rows of 64, and save them again; by one of
    those."""
    path = str(tmp_path / "run" / "checkpoints" / "step_2")
    rank = new_rank(**EIGHT_BITS)
    for step in range(2):
        trained(rank, samples, step)
    expected = state_of(rank)
    kinds = {state["exp_avg"].dtype for state in expected}
    assert kinds == {torch.uint8, torch.float32}
    rank.save(Save(2, path))
    again = new_rank(start_step=2, **EIGHT_BITS)
    require_equal(state_of(again), expected)

    async def on_three_ranks():
        async with (
            asyncio.timeout(DEADLINE_S),
            processes(start(start_step=2, **EIGHT_BITS), world=3) as ranks,
        ):
            for child in ranks:
                assert isinstance(await child.receive(), RankStarted)
                child.send(Save(2, path))
            assert [await child.receive() for child in ranks] == [Done(2)] * 3
            assert await ranks[0].receive() == Saved(path)

    asyncio.run(on_three_ranks())
    back = new_rank(start_step=2, **EIGHT_BITS)
    require_equal(state_of(back), expected)
    assert trained(back, samples, 2)[0] == trained(rank, samples, 2)[0]


@NEEDS_TORCHAO
@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_with_codes_train_like_one(start, new_rank, processes, samples):
    """As far as codes allow: a sum of gradients in another order may fall into another one."""
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    alone = new_rank(**EIGHT_BITS)
    norms = [trained(alone, samples, step)[1]["grad_norm"] for step in range(3)]

    async def on_two_ranks():
        found = []
        async with (
            asyncio.timeout(DEADLINE_S),
            processes(start(**EIGHT_BITS), world=2) as ranks,
        ):
            assert [isinstance(await child.receive(), RankStarted) for child in ranks]
            for step in range(3):
                for child, half in zip(ranks, (samples[::2], samples[1::2]), strict=True):
                    child.send(Accumulate(step, (tuple(half),)))
                    child.send(Update(step, len(samples), tokens, step + 1))
                events = [await child.receive() for _ in range(2) for child in ranks]
                found.append(events[2].metrics["grad_norm"])
        return found

    assert asyncio.run(on_two_ranks()) == pytest.approx(norms, rel=1e-3)


def test_without_torchao_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    monkeypatch.delitem(sys.modules, "lightrl.trainer.learner.adamw8bit", raising=False)
    with pytest.raises(
        TrainerError, match=r"torchao cannot be imported .*scripts/setup adamw8bit$"
    ):
        new_optimizer([nn.Parameter(torch.zeros(1))], Optim(name="adamw8bit"))
