"""When the groups of a round are complete: the shape of its predecessor, in tokens.

Lengths scatter far more than what is expected of each response, so expectations do not tell when
groups will be complete; how they were spread over the last round of the kind does. In tokens that
depends on the samples alone, not on machines. Pure.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from lightrl.core.arrays import decode, encode
from lightrl.core.sides_memory import RoundShape
from lightrl.core.state import Round

POINTS = 16  # by which the shape is remembered


def shape_of(round: Round) -> RoundShape:
    """Of a round that has closed; of responses that it continued, the tokens that it added."""
    lengths = sorted(r.num_new for g in round.groups.values() for r in g.responses)
    ends = sorted((max(r.num_new for r in g.kept), g.position) for g in round.accepted)
    points = ((k + 1) * len(ends) // POINTS for k in range(POINTS))
    ends_in = tuple(ends[point - 1][0] for point in points if point)
    return RoundShape(encode(array("i", lengths)), ends_in, ends[-1][0] if ends else 0)


def in_waves(waiting: float) -> list[tuple[float, float]]:
    """As `RoundCurve.arrivals`, of a round with several responses for each slot, which begin one
    after the other. While some wait, groups are complete at an even rate; then fewer and fewer run.

    `waiting`: of the engine steps that are left, the share of responses that have not begun.
    """
    shares: list[tuple[float, float]] = []
    for k in range(1, POINTS + 1):
        done = k / POINTS
        rest = max(0.0, done - waiting) / (1 - waiting) if waiting < 1 else 0.0
        ending = (1 - waiting) * rest * (1 - rest)
        shares.append((done, min(1.0, done + ending)))
    return shares


def with_rest_at_end(
    arrivals: Sequence[tuple[float, float]], share: float
) -> list[tuple[float, float]]:
    """`arrivals` of which only this share can be trained as it comes, the rest when the round ends:
    it belongs to later mini-batches."""
    num = len(arrivals)
    few = round(share * num)
    early = [arrivals[(k + 1) * num // few - 1] for k in range(few)]
    return [*early, *[(1.0, 1.0)] * (num - few)]


class RoundCurve:
    def __init__(self, shape: RoundShape) -> None:
        self.shape = shape
        self._lengths = list(decode("i", shape.lengths))
        self._sums = [0, *accumulate(self._lengths)]
        self._ends = shape.ends

    def arrivals(self, held: int) -> list[tuple[float, float]]:
        """What is left of a round in which the farthest response has `held` tokens, in equal
        shares of groups. For each: the share of the tokens to the longest response after which it
        is complete, and of the engine steps of all.
        """
        ends = [end for end in self._ends if end > held]
        if not ends:
            return [(1.0, 1.0)]
        last, done = ends[-1], self._steps(held)
        steps = max(1, self._steps(last) - done)
        return [((end - held) / (last - held), (self._steps(end) - done) / steps) for end in ends]

    def _steps(self, tokens: int) -> int:
        """Of all responses, when each has so many tokens or is complete."""
        k = bisect_right(self._lengths, tokens)
        return self._sums[k] + tokens * (len(self._lengths) - k)
