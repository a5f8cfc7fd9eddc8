"""Logprobs and entropies of tokens from hidden states: projection on the vocabulary, scale, soft
cap, temperature, softmax.

The vocabulary is computed by tiles, and again in the backward pass, as attention does with keys: of
the logits and of their gradient one tile exists at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrl.devices.memory import LOGITS_PER_CALL

# logits of a tile, which on a processor fits its cache, and its smallest width
TILE_VALUES = {"cuda": LOGITS_PER_CALL, "cpu": 1 << 19}
NARROWEST_TILE = 256


@dataclass(frozen=True)
class Projection:
    """How logits follow from hidden states: cap * tanh((hidden @ weight.T + bias) * scale / cap)
    with a soft cap, the same without cap and tanh else; all over the temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute float32 [tokens, tile], which the caller may overwrite."""
        logits = F.linear(hidden, weight, bias).float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def gradient(self, of_logits: Tensor, logits: Tensor | None) -> Tensor:
        """Compute the gradient of the product from that of the logits. Overwrites both; `logits` is
        needed with a soft cap only."""
        if self.softcap is not None:
            assert logits is not None
            tanh = logits.mul_(self.temperature / self.softcap)
            of_logits.mul_(tanh.square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return of_logits if factor == 1.0 else of_logits.mul_(factor)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    projection: Projection,
    is_entropy_trained: bool = False,
) -> tuple[Tensor, Tensor]:
    """[tokens, width], [vocabulary, width], [vocabulary], int64 [tokens] -> logprob of each target
    and entropy of its distribution, float32 [tokens].

    The product has the dtype of `hidden`, all that follows is float32.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets, projection, is_entropy_trained)  # pyright: ignore[reportReturnType] - apply has no types


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        projection: Projection,
        is_entropy_trained: bool,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            logprobs, entropy, log_sum = _forward(hidden, weight, bias, targets, projection)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, entropy)
        ctx.projection = projection
        if not is_entropy_trained:
            ctx.mark_non_differentiable(entropy)
        ctx.is_entropy_trained = is_entropy_trained
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, log_sum, entropy = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        wanted = of_entropy if ctx.is_entropy_trained else None
        with torch.autocast(hidden.device.type, enabled=False):
            for begin, end in _tiles(hidden, weight):
                tile = weight[begin:end].to(hidden.dtype)
                logits = ctx.projection.logits(hidden, tile, _cut(bias, begin, end, hidden))
                kept = logits.clone() if ctx.projection.softcap is not None else None
                of_logits = _of_logits(logits, log_sum, entropy, of_logprobs, wanted)
                index, inside = _inside(targets, begin, end)
                of_logits.scatter_add_(1, index, (of_logprobs * inside)[:, None])
                gradients.add(begin, end, ctx.projection.gradient(of_logits, kept), tile)
        return gradients.hidden, gradients.weight, gradients.bias, None, None, None


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, projection: Projection
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logprobs, entropies and log sums in one pass: sums are relative to the largest logit
    so far."""
    largest = hidden.new_full((len(hidden),), -1e30, dtype=torch.float32)
    total, weighted, chosen = (torch.zeros_like(largest) for _ in range(3))
    for begin, end in _tiles(hidden, weight):
        tile = weight[begin:end].to(hidden.dtype)
        logits = projection.logits(hidden, tile, _cut(bias, begin, end, hidden))
        index, inside = _inside(targets, begin, end)
        chosen += logits.gather(1, index)[:, 0] * inside
        above = torch.maximum(largest, logits.amax(1))
        logits.sub_(above[:, None])
        powers = logits.exp()
        step = largest - above
        shrunk = step.exp()
        weighted = (weighted + step * total) * shrunk + torch.linalg.vecdot(powers, logits)
        total = total * shrunk + powers.sum(1)
        largest = above
    log_total = total.log()
    log_sum = largest + log_total
    return chosen - log_sum, log_total - weighted / total, log_sum


def _of_logits(
    logits: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """-p (g + h (log p + H)): the gradient g of the logprobs but for the targets' own share, and h
    of the entropies. Overwrites `logits`."""
    every = logits.sub_(log_sum[:, None])
    if of_entropy is None:
        return every.exp_().mul_(of_logprobs.neg()[:, None])
    factor = (every + entropy[:, None]).mul_(of_entropy[:, None]).add_(of_logprobs[:, None])
    return every.exp_().mul_(factor).neg_()


class _Gradients:
    """Gradients of hidden states, summed over tiles in float32, and of weights, tile by tile."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self._input = hidden
        self._sum = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
        self.weight = torch.empty_like(weight) if needs[1] else None
        self.bias = torch.empty_like(bias) if needs[2] and bias is not None else None

    def add(self, begin: int, end: int, of_product: Tensor, tile: Tensor) -> None:
        if self.bias is not None:
            self.bias[begin:end] = of_product.sum(0)
        of_product = of_product.to(self._input.dtype)
        if self._sum is not None and tile.dtype == torch.float32:
            self._sum.addmm_(of_product, tile)
        elif self._sum is not None:
            self._sum += of_product @ tile
        if self.weight is not None and self.weight.dtype == self._input.dtype:
            torch.mm(of_product.t(), self._input, out=self.weight[begin:end])
        elif self.weight is not None:
            self.weight[begin:end] = of_product.t() @ self._input

    @property
    def hidden(self) -> Tensor | None:
        return None if self._sum is None else self._sum.to(self._input.dtype)


def _tiles(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    values = TILE_VALUES.get(hidden.device.type, LOGITS_PER_CALL)
    width = max(NARROWEST_TILE, values // max(1, len(hidden)))
    vocabulary = len(weight)
    return [(begin, min(begin + width, vocabulary)) for begin in range(0, vocabulary, width)]


def _cut(bias: Tensor | None, begin: int, end: int, hidden: Tensor) -> Tensor | None:
    return None if bias is None else bias[begin:end].to(hidden.dtype)


def _inside(targets: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """int64 [tokens, 1], the place of each target in the tile, and which targets are in it."""
    inside = (targets >= begin) & (targets < end)
    return (targets - begin).clamp(0, end - begin - 1)[:, None], inside
