"""Coupled sampling: which token is drawn from given logits. The one definition, used by all
engines.

The noise of a token is one uniform number that depends on (seed, absolute position) alone, and the
token is the inverse CDF of the sampled distribution at that number. So a response is the same
whatever ran beside it and wherever it was interrupted. Must be importable without torch.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightrl.devices.memory import SCORED_VALUES

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_VALUES = SCORED_VALUES  # logits drawn from at once: each takes memory.SAMPLE_BYTES meanwhile
_MASK = (1 << 64) - 1
_STRIDE = 0xD1342543DE82EF95  # odd, so distinct positions stay distinct before they are mixed


def uniform(seed: int, position: int) -> float:
    """The noise of the token at `position` (index into prompt + response), in [0, 1) with 53 bits.

    Example: uniform(9, 5) is what decides the sixth token of the sequence whose seed is 9.
    """
    return (_mix(_mix(seed & _MASK) ^ (position * _STRIDE & _MASK)) >> 11) * 2.0**-53


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> Floats:
    """`uniform` for arrays: int [rows], int [rows] -> float64 [rows]. Bit for bit the same
    numbers."""
    s = np.asarray(seeds, dtype=np.uint64)
    p = np.asarray(positions, dtype=np.uint64)
    bits = _mix_array(_mix_array(s) ^ (p * np.uint64(_STRIDE)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: int) -> int:
    """The finalizer of splitmix64: every input bit changes half of the output bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits: "torch.Tensor", noise: Floats, temperature: Floats, top_p: Floats, top_k: Ints
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Draws one token for each row; temperature 0 = the most likely token.

    `logits` [rows, vocabulary] of any float dtype; the other arguments [rows], on the CPU. Returns
    token ids int64 [rows] and float32 [rows]: their logprobs under the distribution that was
    sampled from, i.e. after temperature, top-k and top-p (for temperature 0: of the plain softmax).
    The sum is taken in float64: in float32 a vocabulary of 150,000 would make the last tokens
    unreachable and shift all others.
    """
    import torch

    most = max(1, MAX_VALUES // logits.shape[-1])
    if len(logits) <= most:
        return _sample(logits, noise, temperature, top_p, top_k)
    pieces = [slice(i, i + most) for i in range(0, len(logits), most)]
    drawn = [_sample(logits[p], noise[p], temperature[p], top_p[p], top_k[p]) for p in pieces]
    ids, logprobs = zip(*drawn, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _sample(
    logits: "torch.Tensor", noise: Floats, temperature: Floats, top_p: Floats, top_k: Ints
) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    logits = logits.float()
    greedy = temperature == 0
    if greedy.all():
        logprobs = torch.log_softmax(logits, -1)
        ids = logits.argmax(-1)
        return ids, logprobs.gather(-1, ids[:, None])[:, 0]
    scaled = logits
    if not (temperature == 1).all():
        divisor = np.where(greedy, 1.0, temperature)
        scaled = logits / _column(divisor, torch.float32, logits)
    if ((top_p < 1) & ~greedy).any() or ((top_k > 0) & ~greedy).any():
        scaled = _filtered(scaled, np.where(greedy, 1.0, top_p), np.where(greedy, 0, top_k))
    logprobs = torch.log_softmax(scaled, -1)
    cumulative = torch.cumsum(logprobs.exp(), -1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = _column(noise, torch.float64, logits) * total
    # Rounding may lift the point to the total; the last token of nonzero probability is meant then.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, point, right=True)[:, 0]
    if greedy.any():
        ids = torch.where(torch.from_numpy(greedy).to(ids.device), logits.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def _filtered(logits: "torch.Tensor", top_p: Floats, top_k: Ints) -> "torch.Tensor":
    """Logits with -inf outside the `top_k` likeliest tokens and then outside the nucleus of
    `top_p`.

    A token is in the nucleus if the tokens before it, by falling probability and then by id, hold
    less than `top_p`; the likeliest one always is.
    """
    import torch

    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    limit = _column(np.where(top_k > 0, top_k, logits.shape[-1]), torch.int64, logits)
    ordered = ordered.masked_fill(
        torch.arange(logits.shape[-1], device=logits.device) >= limit, -math.inf
    )
    probabilities = torch.softmax(ordered, -1)
    before = torch.cumsum(probabilities, -1, dtype=torch.float64) - probabilities
    limit = _column(np.where(top_p < 1, top_p, 2.0), torch.float64, logits)
    outside = before >= limit
    outside[:, 0] = False
    return torch.full_like(logits, -math.inf).scatter(
        -1, order, ordered.masked_fill(outside, -math.inf)
    )


def _column(
    values: "npt.NDArray[np.generic] | Sequence[float]", dtype: "torch.dtype", like: "torch.Tensor"
):
    import torch

    return torch.as_tensor(np.asarray(values), dtype=dtype).to(like.device)[:, None]
