"""What of a round is still to come, by what is expected of its responses. Pure."""

from dataclasses import dataclass, field

from lightrl.core.placement import Foresee
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


def rest_of(round: Round, expect: Foresee) -> Rest:
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
