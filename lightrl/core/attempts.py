"""Which attempts at a response a node may have: numbers that can have been given out. Pure; changes
nothing.

An attempt is one placement of a response, numbered from 1 on; the newest one is kept with the
response. A node that comes back says which it has, and its number is taken up. Whoever makes
numbers up could else use them all up: after 2**31 - 1 comes one that no message can carry, and
every honest node would be lost by it.

Placements are not in the journal. A core made from one has heard of those that gave tokens, so a
node may know of later ones, until the core has placed the response itself: so long some more than
are known are believed. If there were more, the work of the last one is lost. An attempt goes up by
at most MAX_UNRECORDED for each restart of the coordinator.
"""

from lightrl.core.state import Response

MAX_UNRECORDED = 1024  # placements of a response, in a row, without a token


def can_exist(response: Response, attempt: int, was_recovered: bool) -> bool:
    """`was_recovered`: the core was made from a journal, and another one may have placed the
    response."""
    unrecorded = MAX_UNRECORDED if was_recovered and not response.is_placed else 0
    return attempt <= response.attempt + unrecorded


def is_current(response: Response, attempt: int, was_recovered: bool) -> bool:
    """Whether it is of this round, too, not of one that put the prompt off, under older weights."""
    is_newest = attempt >= response.attempt and attempt > response.group.attempts
    return is_newest and can_exist(response, attempt, was_recovered)
