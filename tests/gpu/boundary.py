"""Where another batch drew another token: the proof that rounding has done it and nothing else.

A GPU multiplies batches of different sizes by different kernels, which add up in different orders.
So the logits of a token depend a little on its batch, and where the two first candidates of a race
arrive that close together, another token is drawn. For the first token in
which two runs of a response differ, all that the model has read is the same; it is checked that

1. each token is the one that its own run's logits and the same noise give: a noise or a position
   that differed would show here;
2. the two runs' logits differ by no more than `rounding` allows: a wrong mask, key or position
   would show here.

If logits differ by at most e, so does the logarithm of a candidate's time, a token's or a block's.
The two candidates change places, hence in each run they arrive within a factor of exp(2e) of each
other, which is checked as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gpu.driver import Asked, Outcome
from tests.support.race import log_times

UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}  # rounding to nearest
# of a layer, one after the other: norms, projections, rotation, attention, gate, sums
ROUNDINGS = 12
# of an error on its way through the layers above, and because roundings are not independent
GROWTH = 2.0
SUMMING = 2e-6  # of the logarithm of a time, which is computed in float32


def rounding(logits: Any, dtype: str, num_layers: int, widest: int) -> float:
    """By how much a logit may differ between two batches. `logits` [vocabulary] of one of them.

    Relative errors of a unit each, ROUNDINGS in every layer, add up like a random walk and end in
    logits of `spread`; of `vocabulary` normal errors the largest is sqrt(2 ln vocabulary) times as
    large, and two runs differ by sqrt(2) times one's error. Last, each logit is itself rounded in
    both runs. In float32, sums of `widest` terms are what rounds: a unit is sqrt(widest) larger
    then.
    """
    unit = UNIT[dtype] * (math.sqrt(widest) if dtype == "float32" else 1.0)
    spread, most = float(logits.std()), float(np.abs(logits).max())
    walk = unit * math.sqrt(ROUNDINGS * num_layers) * spread
    return GROWTH * math.sqrt(2) * walk * math.sqrt(2 * math.log(len(logits))) + 2 * unit * most


@dataclass
class Difference:
    """The first token in which two runs of a response differ."""

    asked: Asked
    # in the response
    index: int
    tokens: tuple[int, int]

    @property
    def noise(self) -> int:
        return self.asked.noise(self.index)


@dataclass
class Comparison:
    """`num_tokens` were drawn after the same tokens in both runs, `differences` of them
    differently."""

    num_responses: int
    num_tokens: int
    differences: list[Difference]

    @property
    def wanted(self) -> frozenset[int]:
        """The keys whose draws `explain` needs."""
        return frozenset(d.noise for d in self.differences)

    def shares(self) -> dict[str, float]:
        differing = len(self.differences)
        return {
            "of responses": differing / self.num_responses,
            "of tokens": differing / max(1, self.num_tokens),
        }


def compare(
    asked: Sequence[Asked], one: dict[str, list[int]], other: dict[str, list[int]]
) -> Comparison:
    """Two runs of the same requests, by name."""
    differences, num_tokens = [], 0
    for a in asked:
        x, y = one[a.name], other[a.name]
        index = next((i for i, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), None)
        if index is None:
            assert len(x) == len(y), f"{a.name}: {len(x)} tokens and {len(y)}"
            num_tokens += len(x) - len(a.prefix)
        else:
            num_tokens += index + 1 - len(a.prefix)
            differences.append(Difference(a, index, (x[index], y[index])))
    return Comparison(len(asked), num_tokens, differences)


def explain(
    found: Comparison,
    one: Outcome,
    other: Outcome,
    dtype: str,
    num_layers: int,
    widest: int,
    temperature: float = 1.0,
) -> float:
    """Proves that rounding alone made the differences; the largest of logits, as a share of what it
    may."""
    worst = 0.0
    for d in found.differences:
        where = f"{d.asked.name}, token {d.index}"
        draws = one.draws.get(d.noise), other.draws.get(d.noise)
        assert draws[0] is not None, f"{where}: not drawn in a second run of the same batch"
        assert draws[1] is not None, f"{where}: not drawn in a second run of the same batch"
        assert (draws[0].token, draws[1].token) == d.tokens, (
            f"{where}: another token in the same batch"
        )
        logits = [
            draw.logits.astype(np.float64) / temperature for draw in draws if draw is not None
        ]
        allowed = rounding(logits[0], dtype, num_layers, widest)
        apart = float(np.abs(logits[0] - logits[1]).max())
        assert apart <= allowed, (
            f"{where}: logits differ by {apart:.3g}, rounding explains {allowed:.3g}"
        )
        for values, token in zip(logits, d.tokens, strict=True):
            behind = _behind(values, d.noise, token)
            assert behind <= SUMMING, f"{where}: {token} is not what its logits give"
        away = max(_behind(v, d.noise, t) for v, t in zip(logits, d.tokens[::-1], strict=True))
        assert away <= 2 * allowed + SUMMING, f"{where}: {away:.3g} behind the winner"
        worst = max(worst, apart / allowed)
    return worst


def _behind(logits: Any, noise: int, token: int) -> float:
    """By how much later than the winner `token` arrives, in logarithms: itself, or its block."""
    blocks, tokens = log_times(logits, noise)
    block, place = divmod(token, tokens.shape[1])
    late = float(blocks[block] - blocks.min())
    return late if late > SUMMING else float(tokens[block][place] - tokens[block].min())
