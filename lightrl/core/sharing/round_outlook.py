"""Predict the rest of a round from the expected lengths of its responses. Pure."""

from dataclasses import dataclass, field

from lightrl.core.responses.placement import LengthForecast
from lightrl.core.state import UNFINISHED, GroupState, ResponseState, Round


@dataclass(slots=True)
class Rest:
    """The unfinished responses of a round, and the tokens to train. Lengths in tokens."""

    # of each unfinished response, fewest first: tokens left
    left: list[float] = field(default_factory=list[float])
    # tokens to train: of complete groups, and expected of open ones
    done: float = 0.0
    to_come: float = 0.0
    # finished responses, as a share of those launched
    finished: float = 0.0
    # peak of tokens in the caches, if all responses run from now on
    kv_tokens: float = 0.0


def rest_of(round: Round, expect: LengthForecast, longest: int) -> Rest:
    """Return the rest of a round in O(responses log responses). `longest`: tokens of the longest
    trained response of the last round of its kind; expected lengths are means, which the longest
    of many responses exceeds."""
    rest = Rest()
    running: list[tuple[float, int]] = []  # (tokens left, context)
    groups: list[tuple[float, float]] = []  # (tokens until complete, tokens to train)
    num_finished = num_launched = most_held = 0
    for group in round.groups.values():
        lengths: list[tuple[float, float]] = []  # (tokens left, all tokens)
        num_launched += len(group.responses)
        for r in group.responses:
            num_finished += r.finish_reason is not None
            held = r.num_sampled
            if r.state in UNFINISHED:
                tokens = max(held + 1.0, expect(r))
                rest.left.append(tokens - held)
                running.append((tokens - held, len(group.prompt.tokens) // 4 + held))
                lengths.append((tokens - held, tokens))
                most_held = max(most_held, r.num_new)
            elif r.state is ResponseState.DONE:
                lengths.append((0.0, held))
        if group.state in {GroupState.COMPLETE, GroupState.ACCEPTED}:
            groups.append((0.0, sum(r.num_sampled for r in group.kept)))
        elif group.state is GroupState.OPEN and lengths:
            kept = sorted(lengths)[: group.size]
            groups.append((kept[-1][0], sum(tokens for _, tokens in kept)))
    groups = sorted(groups)[: round.needed]
    rest.done = sum(tokens for until, tokens in groups if not until)
    rest.to_come = sum(tokens for until, tokens in groups if until)
    rest.finished = num_finished / max(1, num_launched)
    rest.kv_tokens = peak_context(running)
    if rest.left:
        rest.left.sort()
        last = max(groups[-1][0] if groups else 0.0, longest - most_held)
        if round.races:  # nothing that runs longer is trained
            rest.left = [min(left, last) for left in rest.left]
        rest.left[-1] = max(rest.left[-1], last)
    return rest


def peak_context(running: list[tuple[float, int]]) -> float:
    """Return the peak of the total context if each response grows by one token a step."""
    held = sum(context for _, context in running)
    peak = 0.0
    for k, (left, context) in enumerate(sorted(running)):
        peak = max(peak, held + (len(running) - k) * left)
        held -= context
    return peak
