"""The mini-batch of each accepted group, and when the group may be sent. Pure.

Groups are accepted in about the order of their lengths, so mini-batches cut by arrival are sorted
by length: the longest responses would always be trained last, be clipped most, and with token
normalisation weigh least. With the order "random" the prompts of a round are shuffled when they are
drawn, by a permutation of their positions that depends only on the run's seed and the step; the
first `prompts_per_step / mini_batches` accepted ones are the first mini-batch, and so on. The
result is independent of lengths, arrival, machines and restarts, and needs no state: a step that
is trained again, or recovered from the journal, has the same mini-batches.

A group is sent once its mini-batch is final and all earlier mini-batches are complete: the trainer
updates when the next mini-batch begins. Prompts that replace dropped groups (dynamic sampling)
come last, in the order in which they are drawn, so that none moves a group that was sent.
"""

import hashlib
from collections.abc import Sequence

from lightrl.core.settings import Settings
from lightrl.core.state import Group, GroupState, Round, RoundState

ALIVE = frozenset({GroupState.OPEN, GroupState.COMPLETE, GroupState.ACCEPTED})


def size(settings: Settings) -> int:
    """Return the number of groups in a mini-batch."""
    return settings.prompts_per_step // settings.mini_batches


def is_shuffled(settings: Settings) -> bool:
    return settings.mini_batches > 1 and settings.mini_batch_order == "random"


def assign(settings: Settings, round: Round) -> None:
    """Append to `round.in_turn` the accepted groups that may be trained now; set the mini-batch of
    each.

    A mini-batch has exactly `size` groups, except the last one: a step may have fewer groups than
    mini-batches have room for, and a remainder of less than half a mini-batch joins the one before.
    Therefore a mini-batch begins once half of its groups are accepted. O(n log n) in the groups of
    the round.
    """
    is_closed, total, most = round.state is RoundState.CLOSED, len(round.accepted), size(settings)
    order: Sequence[Group] = round.accepted
    if is_shuffled(settings):
        alive = [g for g in round.groups.values() if g.state in ALIVE]
        order = sorted(alive, key=lambda g: _key(settings, g))
    number = first = 0
    while first < total:
        if first and not is_closed and 2 * (total - first) < most:
            return
        end = first + most
        if is_closed and 2 * (total - end) < most:
            end = total
        part = order[first:end]
        accepted = [g for g in part if g.state is GroupState.ACCEPTED]
        is_whole = len(accepted) == len(part) and (is_closed or len(part) == most)
        if is_whole or not (settings.deterministic and is_shuffled(settings)):
            # With run.deterministic the order within a mini-batch must not follow from timing.
            for group in accepted:
                if group.mini_batch is None:
                    group.mini_batch = number
                    round.in_turn.append(group)
        if not is_whole:
            return
        first, number = end, number + 1


def _key(settings: Settings, group: Group) -> tuple[int, bytes]:
    last = group.round.prompts_launched - 1
    text = f"mini-batch {settings.run_seed} {group.round.step} {group.position}".encode()
    return max(group.position, last), hashlib.blake2b(text, digest_size=8).digest()
