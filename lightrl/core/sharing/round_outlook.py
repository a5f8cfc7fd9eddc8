"""What of a round is still to come, by what is expected of its responses. Pure."""

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
    """What goes on, and when groups will be complete. Lengths in tokens."""

    expected: dict[str, float] = field(default_factory=dict[str, float])
    # groups that are complete, and what is trained of them
    num_done: int = 0
    done: int = 0
    # of each open group that will be trained, first first: (until it is complete, trained then)
    groups: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    finished: int = 0
    # the most tokens that this round has added to a response that has not ended
    most_held: int = 0
    # the most that the caches hold at once, if all of it runs from now on
    kv_tokens: float = 0.0


def rest_of(round: Round, expect: LengthForecast) -> Rest:
    """O(responses log responses)."""
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
    """The most tokens of context at any time, each response one more a step until it ends."""
    held = sum(context for _, context in running)
    peak = 0.0
    for k, (left, context) in enumerate(sorted(running)):
        peak = max(peak, held + (len(running) - k) * left)
        held -= context
    return peak


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
    """When the groups of a round are complete: as those of its predecessor, in tokens.

    Lengths scatter far more than expected lengths do, so these do not tell when groups will be
    complete; the last round of the kind does. In tokens that depends on the samples alone, not on
    machines.
    """

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
