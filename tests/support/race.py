"""Coupled sampling computed in float64 by plain Python, as engine/sampling.py defines it: the
reference that tests compare engines with."""

import math
from typing import Any

import numpy as np

from lightrl.engine import sampling


def key(seed: int, position: int) -> int:
    """The noise of one token, as an integer of 64 bits."""
    return int(sampling.keys([seed], [position])[0])


def waits(noise: int, num: int) -> Any:
    """float64 [num], exponential with rate 1."""
    mixed = [
        sampling._mix(noise ^ (i * sampling._STRIDE & sampling._MASK)) >> 12 for i in range(num)
    ]
    return np.array([-math.log((bits + 0.5) * 2.0**-52) for bits in mixed])


def log_times(logits: Any, noise: int) -> tuple[Any, Any]:
    """Logarithms of when candidates arrive, up to a constant for each race: of the blocks, float64
    [blocks], and of the tokens inside their blocks, float64 [blocks, width]; inf = never."""
    width = sampling.block_width(len(logits))
    blocks = -(-len(logits) // width)
    padded = np.full(blocks * width, -np.inf)
    padded[: len(logits)] = logits
    padded = padded.reshape(blocks, width)
    noises = np.log(waits(noise, width + blocks))
    return noises[width:] - np.logaddexp.reduce(padded, axis=1), noises[:width] - padded


def winner(logits: Any, noise: int) -> int:
    """The token that is drawn."""
    blocks, tokens = log_times(np.asarray(logits, np.float64), noise)
    block = int(blocks.argmin())
    return block * tokens.shape[1] + int(tokens[block].argmin())
