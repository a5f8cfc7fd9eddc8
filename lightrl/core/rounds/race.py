"""The race of a round: which responses a group keeps, which groups the step gets. Pure decisions.

A short round launches more responses than it needs and keeps those that finish first (RollPacker,
arXiv 2509.21009, section 4.1). The finishing time of a response is its number of tokens; that of a
group is the finishing time of the last response that the group keeps. Winners then depend only on
the samples, not on machines, placement, preemption or drafts, and runs are reproducible. In a race
by the clock (`Tail.race`) the finishing time is the order in which scores arrive, as in the paper.

Ties are broken by a response's index in its group and a group's position in its round. With tokens
no decision requires waiting: an unfinished response with n tokens will have at least n + 1, so it
has lost as soon as n reaches the finishing time of those ahead. A round is over when every response
has finished and has its score, or has provably lost.

This module changes no state: `group_lifecycle` writes `finishers`, `bound` and `cut`.
"""

import bisect

from lightrl.core.settings import Settings
from lightrl.core.state import UNBOUNDED, Group, GroupState, Response, Round

MIN_COMPARED = 2  # responses with a score that a group is trained with, unless it has but one
DECIDED = -1  # bound and cut of a race by the clock that is over: the remaining ones have lost
MAX_RECHECKS = 32  # calls of `decided_groups` in one round: keeps their cost linear


def has_lost(response: Response) -> bool:
    """Return whether a response can no longer be among those kept."""
    group, n = response.group, len(response.tokens) - response.num_inserted
    if not response.will_grow and group.bound != DECIDED:
        return n > group.round.cut or (n, response.index) > _last_kept(group)
    return n >= group.bound or n >= group.round.cut


def finish_of_response(settings: Settings, response: Response) -> tuple[int, int]:
    """Return (finishing time, index in its group) of a scored response that `round.num_scores`, the
    time in a race by the clock, includes."""
    if response.outcome is not None and response.outcome.failure:
        return UNBOUNDED - 1, response.index  # its few tokens must not win a place
    round = response.group.round
    by_clock = round.races and settings.tail.race == "clock"
    return (round.num_scores if by_clock else response.num_sampled, response.index)


def finish_of_group(group: Group) -> tuple[int, int]:
    """Return (finishing time, position in its round) of a complete group that may be trained."""
    return (_last_kept(group)[0], group.position)


def bound(settings: Settings, group: Group) -> int:
    """Return the tokens at which an unfinished response has lost to its finished siblings."""
    if not group.round.races or len(group.finishers) < group.size:
        return UNBOUNDED
    return DECIDED if settings.tail.race == "clock" else _last_kept(group)[0]


def cut(settings: Settings, round: Round) -> int:
    """Return the tokens beyond which the finished groups of a round exclude every response."""
    if not round.races or len(round.finishers) < round.needed:
        return UNBOUNDED
    return DECIDED if settings.tail.race == "clock" else round.finishers[round.needed - 1][0]


def losers_of_group(group: Group) -> list[Response]:
    """Return the unresolved responses of a group that have lost to their siblings."""
    if group.bound == UNBOUNDED:
        return []
    return [r for r in group.responses if not r.resolved and has_lost(r)]


def losers_of_round(round: Round) -> list[Response]:
    """Return the unresolved responses of a round that have lost to other groups or siblings."""
    lost: list[Response] = []
    for group in round.groups.values():
        if group.num_open:
            out = is_out(group)
            lost += [r for r in group.responses if not r.resolved and (out or has_lost(r))]
    return lost


def decided_groups(settings: Settings, round: Round) -> list[Group]:
    """Return the complete groups that certainly belong to the step, in the order of their finish.

    A group is certain when fewer than `needed` others finish, or could still finish, before it.
    """
    in_order = list(round.groups.values())
    finished = [(key, in_order[key[1]]) for key in round.finishers[: round.needed]]
    if round.races and settings.tail.race == "tokens" and round.num_open:
        rivals = sorted((_earliest(g), g.position) for g in in_order if g.num_open)
        finished = [
            (key, group)
            for ahead, (key, group) in enumerate(finished)
            if ahead + bisect.bisect_left(rivals, key) < round.needed
        ]
    won = [group for _, group in finished if group.state is GroupState.COMPLETE]
    return _in_order(round, won) if settings.deterministic else won


def _in_order(round: Round, won: list[Group]) -> list[Group]:
    """Return, in the order of prompts, the groups that no uncertain group precedes."""
    if round.races and round.num_open:
        return []
    ready: list[Group] = []
    certain_ones = set(map(id, won))
    for group in round.groups.values():
        if id(group) in certain_ones:
            ready.append(group)
        elif group.state in {GroupState.OPEN, GroupState.COMPLETE} and round.num_open:
            break
    return ready


def is_recheck_due(round: Round) -> bool:
    """Return whether `decided_groups` is due again; at most MAX_RECHECKS times in a round."""
    return len(round.finishers) >= round.recheck_at or not round.num_open


def next_recheck(round: Round) -> int:
    """Return the number of complete groups at which the next recheck is due."""
    return len(round.finishers) + max(1, round.needed // MAX_RECHECKS)


def is_won(group: Group) -> bool:
    """Return whether all responses are resolved, and enough are scored before the cut."""
    return not group.num_open and not is_out(group)


def is_out(group: Group) -> bool:
    """Return whether too many responses lack a score, or are behind the cut, to complete the group.

    A response that is skipped without a score keeps its place among the finishers: the order of
    the score and the cut must not matter.
    """
    in_time = bisect.bisect_right(group.finishers, (group.round.cut, UNBOUNDED))
    if group.num_open + in_time < group.size:
        return True
    return not group.num_open and not _can_be_compared(group)


def _can_be_compared(group: Group) -> bool:
    least = min(MIN_COMPARED, group.size)
    return group.round.is_eval or len(group.kept) >= least


def has_zero_std(group: Group) -> bool:
    """Return whether all rewards are equal: no advantage, no gradient."""
    return len({r.reward for r in group.kept}) <= 1


def is_surplus_zero_std(settings: Settings, group: Group) -> bool:
    """Return whether a group was left out only because its rewards are equal."""
    if (
        group.state is not GroupState.COMPLETE
        or not settings.dynamic_sampling
        or not has_zero_std(group)
    ):
        return False
    return group.round.cut == DECIDED or _last_kept(group)[0] <= group.round.cut


def _last_kept(group: Group) -> tuple[int, int]:
    """Return (finishing time, index) of the last response that is kept so far."""
    keep = group.size
    return group.finishers[keep - 1] if len(group.finishers) >= keep else (UNBOUNDED, 0)


def _earliest(group: Group) -> int:
    """Return the earliest finishing time that is still possible for an incomplete group."""
    times = [time for time, _ in group.finishers]
    times += [r.num_sampled + r.will_grow for r in group.responses if not r.resolved]
    times.sort()
    keep = group.size
    return times[keep - 1] if len(times) >= keep else UNBOUNDED
