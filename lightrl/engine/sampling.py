"""Coupled sampling: choose a token by given logits. The one definition, used by all engines.

The noise of a token depends on (seed, absolute position) alone, so a response is the same whatever
ran beside it and wherever it was interrupted. The token is the winner of a race: candidate i waits
for an exponential time with rate p_i, and the shortest wait wins with probability p_i. This is the
Gumbel-max trick (Maddison et al. 2014, arXiv 1411.0030) in another form. Each candidate has noise
of its own, so a small change of the distribution rarely changes the winner: with one race over all
tokens, with probability at most 2 TV / (1 + TV), where TV is the total variation distance; no
coupling without communication is better (Daliri et al. 2024, arXiv 2408.07978). Two races need far
less noise and measure nearly the same: one between blocks of token ids, one inside the winning
block. Must be importable without torch.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightrl.devices.memory import LOGITS_PER_CALL

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

MAX_VALUES = LOGITS_PER_CALL  # logits in one draw: each takes memory.SAMPLE_BYTES meanwhile
_MASK = (1 << 64) - 1
_STRIDE = 0xD1342543DE82EF95  # odd, so distinct positions stay distinct before they are mixed


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 bits for the token at `position` (index into prompt +
    response).

    Example: uniform(9, 5) decides the sixth token of an emulated sequence whose seed is 9.
    """
    return (_mix(_mix(seed & _MASK) ^ (position * _STRIDE & _MASK)) >> 11) * 2.0**-53


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> Floats:
    """Return `uniform` for arrays, bit for bit: int [rows], int [rows] -> float64 [rows]."""
    return (keys(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def keys(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> Keys:
    """Return the noise of one token each, from which `sample` makes that of every candidate: int
    [rows], int [rows] -> uint64 [rows]."""
    s = np.asarray(seeds, dtype=np.uint64).view(np.int64)
    p = np.asarray(positions, dtype=np.uint64).view(np.int64)
    return _mix_array(_mix_array(s) ^ p * _signed(_STRIDE)).view(np.uint64)


def _mix(x: int) -> int:
    """Apply the finalizer of splitmix64: every input bit changes half of the output bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: Any) -> Any:
    """Apply `_mix` to each int64 of an array or tensor; products wrap around as those of uint64
    do."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Any, bits: int) -> Any:
    """Shift right, with zeros from the left: int64 has its sign shifted in."""
    return (x >> bits) & (_MASK >> bits)


def _signed(x: int) -> int:
    """Return the int64 with the same bits."""
    return x - (1 << 64) if x >> 63 else x


def sample(
    logits: "torch.Tensor", noise: Keys, temperature: Floats, top_p: Floats, top_k: Ints
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Draw one token for each row; temperature 0 = the most likely token.

    `logits` [rows, vocabulary] of any float dtype; the other arguments [rows], on the CPU; `noise`
    from `keys`. Returns token ids int64 [rows] and float32 [rows]: their logprobs under the whole
    softmax at that temperature (for temperature 0: at 1), as a trainer computes them. Where top_k
    or top_p leave tokens out, the token was drawn with the logprob that is returned minus the log
    of the mass that was kept.
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
    logits: "torch.Tensor", noise: Keys, temperature: Floats, top_p: Floats, top_k: Ints
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
    chances = kept = torch.softmax(scaled, -1)
    if ((top_p < 1) & ~greedy).any() or ((top_k > 0) & ~greedy).any():
        inside = _filtered(scaled, np.where(greedy, 1.0, top_p), np.where(greedy, 0, top_k))
        kept = chances.masked_fill(inside == -math.inf, 0.0)
    ids = _winners(kept, noise)
    if greedy.any():
        ids = torch.where(torch.from_numpy(greedy).to(ids.device), logits.argmax(-1), ids)
    return ids, chances.gather(-1, ids[:, None])[:, 0].log()


def _winners(chances: "torch.Tensor", noise: Keys) -> "torch.Tensor":
    """Return the token ids that win their races, int64 [rows]. `chances` [rows, vocabulary], to
    which the probabilities are proportional."""
    import torch

    rows, size = chances.shape
    width = block_width(size)
    blocks = -(-size // width)
    waits = _waits(noise, width + blocks, chances.device)
    is_on_cpu = chances.device.type == "cpu"  # numpy starts an operation in a tenth of the time
    padded: Any = chances.numpy() if is_on_cpu else chances
    if blocks * width > size:
        shape = rows, blocks * width
        padded = np.zeros(shape, np.float32) if is_on_cpu else chances.new_zeros(shape)
        padded[:, :size] = chances
    if not is_on_cpu:
        return _race(padded, waits, width)
    with np.errstate(divide="ignore", invalid="ignore"):
        return torch.from_numpy(_race(padded, waits, width))


def _race(chances: Any, waits: Any, width: int) -> Any:
    """Run `_winners` on numpy arrays or tensors: float32 [rows, blocks * width], float32 [rows,
    width + blocks]: the waits of the tokens of a block, then those of the blocks."""
    rows = len(chances)
    chances = chances.reshape(rows, -1, width)
    block = (waits[:, width:] / chances.sum(-1)).argmin(-1)
    inside = chances[np.arange(rows), block]
    return block * width + (waits[:, :width] / inside).argmin(-1)


def block_width(vocabulary: int) -> int:
    """Return the token ids of a block: a power of two near the square root. Example:
    block_width(151_936) == 512, so that a row takes 512 + 297 numbers of noise."""
    return 1 << ((vocabulary - 1).bit_length() + 1) // 2


def _waits(noise: Keys, num: int, device: "torch.device") -> Any:
    """Return exponential waits with rate 1, float32 [rows, num]: minus the logarithm of a uniform
    number in (0, 1) with 52 bits, which is `_mix` of the row's key and the candidate's number. An
    array on the CPU, else a tensor."""
    numbers = np.arange(num) * _signed(_STRIDE)
    key = np.ascontiguousarray(noise).view(np.int64)[:, None]
    if device.type == "cpu":
        x = _shifted(_mix_array(key ^ numbers), 12)
        return -np.log((x + 0.5) * 2.0**-52).astype(np.float32)
    import torch

    bits = torch.from_numpy(key).to(device) ^ torch.from_numpy(numbers).to(device)
    return -((_shifted(_mix_array(bits), 12).double() + 0.5) * 2.0**-52).log().float()


def _filtered(logits: "torch.Tensor", top_p: Floats, top_k: Ints) -> "torch.Tensor":
    """Return logits with -inf outside the `top_k` likeliest tokens and then outside the nucleus of
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
