"""`train.deterministic`: torch's deterministic kernels, for the backward pass of attention alone.

What they add up and in which order shows on a GPU only (tests/gpu/test_trainer.py).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightrl.config.run_file import parse_config
from lightrl.trainer.model import attention
from lightrl.trainer.rank.rank import _order_sums

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = [5, 3]


class Probe(torch.autograd.Function):
    """Notes whether deterministic kernels would be taken in its backward pass."""

    seen: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        assert len(ctx.saved_tensors) == 1
        Probe.seen.append(torch.are_deterministic_algorithms_enabled())
        return gradient


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the place of torch's, which needs CUDA."""
    Probe.seen = []
    monkeypatch.setattr(attention, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_attn", lambda q, *_, **__: Probe.apply(q))
    yield
    attention.order_backward(False)
    torch.use_deterministic_algorithms(False)


def layer(x: Tensor) -> Tensor:
    q = Probe.apply(x).reshape(1, 1, 8, 4)
    packed = attention.packing(LENGTHS, CPU)
    out, _ = attention.attend(torch.nn.Module(), q, q, q, None, packing=packed)
    return Probe.apply(out)


def config(**sections: Any) -> Any:
    return parse_config({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_flag_is_on_during_the_backward_pass_of_attention_alone(ordered, recomputes):
    attention.order_backward(ordered)
    x = torch.randn(8, 4, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert Probe.seen == [False, ordered, False]
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_gradients_nothing_is_hooked():
    attention.order_backward(True)
    with torch.no_grad():
        layer(torch.randn(8, 4))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("sections", "device", "ordered"),
    [
        ({}, CUDA, True),
        ({}, CPU, False),
        ({"journal": {"enabled": False}}, CUDA, False),
        ({"journal": {"enabled": False}, "train": {"deterministic": True}}, CUDA, True),
        ({"train": {"deterministic": False}}, CUDA, False),
        ({"train": {"deterministic": "off"}}, CUDA, False),
        ({"run": {"deterministic": True}, "train": {"deterministic": False}}, CUDA, False),
    ],
)
def test_it_is_the_default_on_gpus_where_there_is_a_journal(sections, device, ordered):
    """With run.deterministic the flag is on all the time."""
    _order_sums(config(**sections), device)
    assert attention._orders_backward == ordered
    is_all = "run" in sections
    assert torch.are_deterministic_algorithms_enabled() == is_all
    layer(torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert Probe.seen == [is_all, ordered or is_all, is_all]
