"""Attention within sequences that lie back to back in one row, registered with transformers.

On CUDA it is torch's variable-length attention. Elsewhere SDPA, by blocks of sequences of about the
same length, which alone are padded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from lightrl.trainer.model.rows import moved, put_rows, take_rows

NAME = "lightrl_packed"

# a block ends once its padding costs more than another call: a number of tokens, or a share of the
# real ones
CALL_TOKENS = 64
PADDING_SHARE = 0.125

# parameters of this release of torch
_VARLEN = frozenset(signature(varlen_attn).parameters)

_orders_backward = False


@dataclass(frozen=True)
class Block:
    """Sequences of about the same length; they cover the tokens from `begin` to `end`."""

    begin: int
    end: int
    num_rows: int
    # of the longest
    length: int
    # int64 [end - begin], where its tokens are in [num_rows * length]; None: all are as long
    cells: Tensor | None


@dataclass(frozen=True)
class Packing:
    """The sequences of a row. Example, of 3 and 2 tokens: cu_seqlens [0, 3, 5], max_length 3."""

    lengths: tuple[int, ...]
    # int32 [sequences + 1], on the device
    cu_seqlens: Tensor
    # requests of layers that `attend` does not support
    refused: list[str] = field(default_factory=list)

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks for devices that have no kernels for variable lengths."""
        return tuple(_blocks(self.lengths, self.cu_seqlens.device))


def packing(lengths: Sequence[int], device: torch.device) -> Packing:
    """Describe sequences of these lengths; neighbours should have about the same."""
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Packing(tuple(lengths), moved(borders, device))


def order_backward(wanted: bool) -> None:
    """Set whether the backward pass sums in a fixed order, on CUDA.

    The kernels of FlashAttention and of memory-efficient attention have no argument for that: ATen
    reads the flag of `torch.use_deterministic_algorithms` (attention_backward.cu), which is set
    during their backward pass alone.
    """
    global _orders_backward
    _orders_backward = wanted


def _ordered(out: Tensor) -> Tensor:
    """`out` must be what the kernel returned: a view would have another node in the graph."""
    if _orders_backward and (node := out.grad_fn) is not None:
        node.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
        node.register_hook(lambda *_: torch.use_deterministic_algorithms(False))
    return out


def register() -> None:
    """Register with transformers, without a function for masks, so that a long row costs no square
    of its length."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[rows, heads, tokens, dimension] each, keys and values perhaps with fewer heads -> [rows,
    tokens, heads, dimension]. Without `packing` each row is a sequence.

    Plain causal attention, perhaps with a sliding window. Other requests of a layer go to
    `packing.refused`: an exception in a sharded model's pass would leave it half gathered.
    """
    if packing is None:
        out = _sdpa(query, key, value, scaling, sliding_window)
        return out.transpose(1, 2).contiguous(), None
    causal = is_causal is not False and getattr(module, "is_causal", True) is not False
    packing.refused.extend(_unlike(attention_mask, dropout, causal, others))
    q, k, v = (_cast(x[0].transpose(0, 1)) for x in (query, key, value))
    if _has_kernel(q, k, v):
        out = _varlen(q, k, v, packing, scaling, sliding_window)
    else:
        parts = [_attend_block(b, q, k, v, scaling, sliding_window) for b in packing.blocks]
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out[None], None


def _unlike(
    mask: Tensor | None, dropout: float, causal: bool, others: dict[str, Any]
) -> Iterator[str]:
    if mask is not None:
        yield "its attention has a mask of its own"
    if not causal:
        yield "its attention is not causal"
    if dropout:
        yield "its attention has dropout"
    unlike = {"softcap": "a soft cap", "s_aux": "sinks", "position_bias": "a position bias"}
    for name, what in unlike.items():
        if others.get(name) is not None:
            yield f"its attention has {what}"


def _cast(values: Tensor) -> Tensor:
    """Cast as autocast does for SDPA: rotary embeddings make queries and keys float32."""
    if torch.is_autocast_enabled(values.device.type):
        return values.to(torch.get_autocast_dtype(values.device.type))
    return values


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and width == key.shape[-1] == value.shape[-1]
        and width <= 256
        and width % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and {"scale", "window_size"} <= _VARLEN
    )


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    more: dict[str, Any] = {}
    if (groups := q.shape[1] // k.shape[1]) > 1:
        if "enable_gqa" in _VARLEN:
            more["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    # tokens before the query; our windows include it
    before = -1 if window is None or window > packing.max_length else window - 1
    length, borders = packing.max_length, packing.cu_seqlens
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = varlen_attn(
        q, k, v, borders, borders, length, length, scale=scaling, window_size=(before, 0), **more
    )
    assert isinstance(out, Tensor)
    return _ordered(out)


def _attend_block(
    block: Block, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """[tokens, heads, dimension] of all sequences -> of the block."""
    num_cells = block.num_rows * block.length
    rows: list[Tensor] = []
    for x in (q, k, v):
        part = x[block.begin : block.end]
        if block.cells is not None:
            part = put_rows(part, block.cells, num_cells)
        rows.append(part.reshape(block.num_rows, block.length, *x.shape[1:]).transpose(1, 2))
    out = _sdpa(rows[0], rows[1], rows[2], scaling, window).transpose(1, 2).flatten(0, 1)
    return out if block.cells is None else take_rows(out, block.cells)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[rows, heads, tokens, dimension]; padding at the end of a row has no effect."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    mask = None
    if window is not None and window < length:
        at = torch.arange(length, device=q.device)
        behind = at[:, None] - at
        mask = (behind >= 0) & (behind < window)
    if groups > 1 and mask is not None:  # fused kernels take one of the two
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None,
        enable_gqa=groups > 1 and mask is None,
    )
    return _ordered(out)


def _blocks(lengths: Sequence[int], device: torch.device) -> Iterator[Block]:
    first = begin = 0
    while first < len(lengths):
        end, longest, real = first, 0, 0
        while end < len(lengths):
            most = max(longest, lengths[end])
            padding = most * (end + 1 - first) - real - lengths[end]
            if end > first and padding > max(CALL_TOKENS, PADDING_SHARE * real):
                break
            longest, real, end = most, real + lengths[end], end + 1
        some = torch.tensor(lengths[first:end])
        cells = None
        if (some != longest).any():
            columns = torch.arange(longest)
            cells = moved((columns < some[:, None]).flatten().nonzero()[:, 0], device)
        yield Block(begin, begin + real, end - first, longest, cells)
        first, begin = end, begin + real


register()
