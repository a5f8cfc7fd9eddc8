"""Who wins a round: which responses a group keeps, which groups the step gets. Pure decisions.

A short round launches more than it needs and keeps what finishes first (RollPacker, arXiv
2509.21009, section 4.1). "First" is measured in token space: the finishing time of a response is
its number of tokens, that of a group the finishing time of the last response it keeps. Winners then
depend on the samples alone, not on machines, placement, preemption or drafts, and runs repeat. In a
race by the clock (`Tail.race`) it is the order in which scores arrive, as in the paper.

Ties are broken by a response's index in its group and a group's position in its round. With tokens
nothing is decided by waiting: an unfinished response with n tokens will have at least n + 1, so it
has lost as soon as n reaches the finishing time of those ahead. A round is over when every response
has finished and has its score, or has provably lost.

Nothing is changed here: what a race has come to (`finishers`, `bound`, `cut`) is written in
`group_filter`.
"""

import bisect

from lightrl.core.settings import Settings
from lightrl.core.state import UNBOUNDED, Group, GroupState, Response, ResponseState, Round

MIN_COMPARED = 2  # responses with a score that a group is trained with, unless it has but one
DECIDED = -1  # bound and cut of a race by the clock that is over: whoever has not arrived has lost
MAX_RECHECKS = 32  # looks at who is certain to be accepted, in one round: keeps its cost linear


def has_lost(response: Response) -> bool:
    """Whether it cannot be among those kept, whatever it still does."""
    group, n = response.group, len(response.tokens)
    if response.state is ResponseState.DONE and group.bound != DECIDED:
        return n > group.round.cut or (n, response.index) > _last_kept(group)
    return n >= group.bound or n >= group.round.cut


def finish_of_response(settings: Settings, response: Response) -> tuple[int, int]:
    """(finishing time, index in its group) of one that has finished and has its score, which is
    counted in `round.num_scores` already: by the clock that count is the time."""
    round = response.group.round
    by_clock = round.races and settings.tail.race == "clock"
    return (round.num_scores if by_clock else len(response.tokens), response.index)


def finish_of_group(group: Group) -> tuple[int, int]:
    """(finishing time, position in its round) of one that is complete and may be trained."""
    return (_last_kept(group)[0], group.position)


def bound(settings: Settings, group: Group) -> int:
    """Tokens at which a response that still goes on has lost, as its siblings have finished."""
    if not group.round.races or len(group.finishers) < group.size:
        return UNBOUNDED
    return DECIDED if settings.tail.race == "clock" else _last_kept(group)[0]


def cut(settings: Settings, round: Round) -> int:
    """Tokens beyond which no response can be kept, as groups of its round have finished."""
    if not round.races or len(round.finishers) < round.needed:
        return UNBOUNDED
    return DECIDED if settings.tail.race == "clock" else round.finishers[round.needed - 1][0]


def losers_of_group(group: Group) -> list[Response]:
    """Responses that still go on, or wait for a score, although siblings have won."""
    if group.bound == UNBOUNDED:
        return []
    return [r for r in group.responses if not r.resolved and has_lost(r)]


def losers_of_round(round: Round) -> list[Response]:
    """Responses that still go on, or wait for a score, although other groups have won."""
    lost: list[Response] = []
    for group in round.groups.values():
        if group.num_open:
            out = is_out(group)
            lost += [r for r in group.responses if not r.resolved and (out or has_lost(r))]
    return lost


def decided_groups(settings: Settings, round: Round) -> list[Group]:
    """Complete groups that belong to the step whatever else happens, in the order of their finish.

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
    """In the order of their prompts, those that nobody who is not yet certain comes before."""
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
    """Whether it is time for another look at who is certain; at most MAX_RECHECKS in a round."""
    return len(round.finishers) >= round.recheck_at or not round.num_open


def next_recheck(round: Round) -> int:
    """Complete groups at which to look again, after a look at those that are complete now."""
    return len(round.finishers) + max(1, round.needed // MAX_RECHECKS)


def is_won(group: Group) -> bool:
    """Every response is settled, and enough of them are finished and scored, before the cut."""
    return not group.num_open and not is_out(group)


def is_out(group: Group) -> bool:
    """Too many of its responses have no score, or are behind the cut: it will not be complete.

    One that is skipped for want of a score holds its place among the finishers: whether the score
    or the cut came first must not matter.
    """
    in_time = bisect.bisect_right(group.finishers, (group.round.cut, UNBOUNDED))
    if group.num_open + in_time < group.size:
        return True
    return not group.num_open and not _can_be_compared(group)


def _can_be_compared(group: Group) -> bool:
    least = min(MIN_COMPARED, group.size)
    return group.round.is_eval or len(group.kept) >= least


def zero_std(group: Group) -> bool:
    """No reward differs from the others: no advantage, no gradient."""
    return len({r.reward for r in group.kept}) <= 1


def is_surplus_zero_std(settings: Settings, group: Group) -> bool:
    """Whether a group was left out for being flat alone; put off, it would only come again."""
    if (
        group.state is not GroupState.COMPLETE
        or not settings.dynamic_sampling
        or not zero_std(group)
    ):
        return False
    return group.round.cut == DECIDED or _last_kept(group)[0] <= group.round.cut


def _last_kept(group: Group) -> tuple[int, int]:
    """(finishing time, index) of the last response that is kept as things stand."""
    keep = group.size
    return group.finishers[keep - 1] if len(group.finishers) >= keep else (UNBOUNDED, 0)


def _earliest(group: Group) -> int:
    """The earliest finishing time that is still possible for a group that is not complete."""
    times = [time for time, _ in group.finishers]
    times += [len(r.tokens) + (not r.finish_reason) for r in group.responses if not r.resolved]
    times.sort()
    keep = group.size
    return times[keep - 1] if len(times) >= keep else UNBOUNDED
