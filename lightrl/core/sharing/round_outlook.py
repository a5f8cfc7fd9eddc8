"""Predict the rest of a round from the expected lengths of its responses. Pure."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightrl.core.arrays import decode, encode
from lightrl.core.log_entries import RoundShape
from lightrl.core.responses.placement import LengthForecast
from lightrl.core.state import GroupState, ResponseState, Round


@dataclass(slots=True)
class Rest:
    """The unfinished responses and open groups of a round. Lengths in tokens."""

    expected: dict[str, float] = field(default_factory=dict[str, float])
    # complete groups, and their tokens to train
    num_done: int = 0
    done: int = 0
    # open groups to train, soonest first: (tokens until complete, tokens to train)
    groups: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    finished: int = 0
    # the most tokens that this round has added to a response that has not ended
    most_held: int = 0
    # peak of tokens in the caches, if all responses run from now on
    kv_tokens: float = 0.0


def rest_of(round: Round, expect: LengthForecast) -> Rest:
    """Return the rest of a round in O(responses log responses)."""
    rest = Rest()
    running: list[tuple[float, int]] = []  # (tokens to go, context)
    for group in round.groups.values():
        lengths: list[float] = []
        left: list[float] = []
        for r in group.responses:
            rest.finished += r.finish_reason is not None
            held = len(r.tokens)
            if r.state in {ResponseState.RUNNING, ResponseState.QUEUED}:
                tokens = rest.expected[r.id] = max(held + 1.0, expect(r))
                running.append((tokens - held, len(group.prompt.tokens) // 4 + held))
                rest.most_held = max(rest.most_held, r.num_new)
                lengths.append(tokens)
                left.append(tokens - held)
            elif r.state is ResponseState.DONE:
                lengths.append(float(held))
                left.append(0.0)
        if group.state in {GroupState.COMPLETE, GroupState.ACCEPTED}:
            rest.num_done += 1
            rest.done += sum(len(r.tokens) for r in group.kept)
        elif group.state is GroupState.OPEN and lengths:
            left.sort()
            kept = min(group.size, len(lengths))
            until = left[kept - 1]
            rest.groups.append((until, sum(sorted(lengths)[:kept])))
    rest.kv_tokens = peak_context(running)
    rest.groups.sort()
    del rest.groups[max(0, round.needed - rest.num_done) :]
    return rest


def peak_context(running: list[tuple[float, int]]) -> float:
    """Return the peak of the total context if each response grows by one token a step."""
    held = sum(context for _, context in running)
    peak = 0.0
    for k, (left, context) in enumerate(sorted(running)):
        peak = max(peak, held + (len(running) - k) * left)
        held -= context
    return peak


POINTS = 16  # of the stored shape


def shape_of(round: Round) -> RoundShape:
    """Return the shape of a closed round; continued responses count with their new tokens."""
    lengths = sorted(r.num_new for g in round.groups.values() for r in g.responses)
    ends = sorted((max(r.num_new for r in g.kept), g.position) for g in round.accepted)
    points = ((k + 1) * len(ends) // POINTS for k in range(POINTS))
    ends_in = tuple(ends[point - 1][0] for point in points if point)
    return RoundShape(encode(array("i", lengths)), ends_in, ends[-1][0] if ends else 0)


def in_waves(waiting: float) -> list[tuple[float, float]]:
    """Return arrivals, as `RoundCurve.arrivals` does, of a round with several responses per slot.

    While responses wait, groups complete at an even rate; afterwards fewer and fewer run.
    `waiting`: of the engine steps left, the share of responses that have not begun.
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
    """Return `arrivals` if only this share can be trained on arrival, and the rest, which belongs
    to later mini-batches, at the end of the round."""
    num = len(arrivals)
    few = round(share * num)
    early = [arrivals[(k + 1) * num // few - 1] for k in range(few)]
    return [*early, *[(1.0, 1.0)] * (num - few)]


class RoundCurve:
    """Predicts when the groups of a round are complete, from the last round of its kind.

    Expected lengths are no basis for that, since they scatter far less than lengths do. Times are
    counted in tokens, which depend on the samples alone and not on machines.
    """

    def __init__(self, shape: RoundShape) -> None:
        self.shape = shape
        self._lengths = list(decode("i", shape.lengths))
        self._sums = [0, *accumulate(self._lengths)]
        self._ends = shape.ends

    def arrivals(self, held: int) -> list[tuple[float, float]]:
        """Return when the groups left are complete, in equal shares of groups, if the longest
        response so far has `held` tokens. For each share: the fraction of the tokens left to the
        longest response, and of the engine steps left of all.
        """
        ends = [end for end in self._ends if end > held]
        if not ends:
            return [(1.0, 1.0)]
        last, done = ends[-1], self._steps(held)
        steps = max(1, self._steps(last) - done)
        return [((end - held) / (last - held), (self._steps(end) - done) / steps) for end in ends]

    def _steps(self, tokens: int) -> int:
        """Return the tokens of all responses when each has `tokens` tokens or is complete."""
        k = bisect_right(self._lengths, tokens)
        return self._sums[k] + tokens * (len(self._lengths) - k)
