"""Selects and scatters rows of a tensor by indices that occur once: torch's own gradient of a
selection sums rows one by one, as an index may occur again; here they are copied.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Copy to CUDA from pinned memory, queued like a kernel, without waiting for earlier passes."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """values[index]: [n, ...], int64 [m] without repetition -> [m, ...]."""
    return _Take.apply(values, index)  # pyright: ignore[reportReturnType] - apply has no types


def put_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[m, ...], int64 [m] without repetition -> [num_rows, ...], zeros elsewhere."""
    return _Put.apply(values, index, num_rows)  # pyright: ignore[reportReturnType]


def _put(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return values.new_zeros((num_rows, *values.shape[1:])).index_copy_(0, index, values)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(values)
        return values.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        return _put(gradient, index, ctx.num_rows), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return _put(values, index, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        return gradient.index_select(0, index), None, None
