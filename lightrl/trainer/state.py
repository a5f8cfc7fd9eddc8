"""Where a trainer is between its ranks and its coordinator, and what may happen there. Pure.

Two things decide what the trainer may send and accept: what its ranks do (start, hold a version,
move to the next one, are lost), and whether the coordinator listens. They are one machine because
they depend on each other: a trainer welcomed while its ranks update answers after the update, and
one that has lost its ranks comes back as another trainer.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class TrainerState(StrEnum):
    # the first ranks of this process: there is no version to announce yet
    STARTING = "starting"
    STARTING_UNHEARD = "starting unheard"
    # the ranks hold a version and train the next step, or save
    READY = "ready"
    READY_UNHEARD = "ready unheard"
    # welcomed again: what was accumulated of the step counts no more
    BEGINNING_ANEW = "beginning anew"
    # the ranks move from one version to the next
    UPDATING = "updating"
    UPDATING_UNHEARD = "updating unheard"
    # welcomed meanwhile: the version is announced when it is there
    UPDATING_WELCOMED = "updating welcomed"
    # ranks were lost, and are not all there again
    DOWN = "down"


class TrainerEvent(StrEnum):
    PAUSED = "paused"  # the coordinator is gone, or is being told who we are
    WELCOMED = "welcomed"
    RANKS_STARTED = "ranks started"
    RANKS_LOST = "ranks lost"
    BEGAN_ANEW = "began anew"  # what was accumulated of the step is cleared
    UPDATE_BEGAN = "update began"
    UPDATE_ENDED = "update ended"


S, E = TrainerState, TrainerEvent

EDGES = frozen(
    {
        S.STARTING: {
            E.PAUSED: S.STARTING_UNHEARD,
            E.WELCOMED: S.STARTING,
            E.RANKS_STARTED: S.READY,
            E.RANKS_LOST: S.DOWN,
        },
        S.STARTING_UNHEARD: {
            E.PAUSED: S.STARTING_UNHEARD,
            E.WELCOMED: S.STARTING,
            E.RANKS_STARTED: S.READY_UNHEARD,
            E.RANKS_LOST: S.DOWN,
        },
        S.READY: {
            E.PAUSED: S.READY_UNHEARD,
            E.WELCOMED: S.BEGINNING_ANEW,
            E.UPDATE_BEGAN: S.UPDATING,
            E.RANKS_LOST: S.DOWN,
        },
        S.READY_UNHEARD: {
            E.PAUSED: S.READY_UNHEARD,
            E.WELCOMED: S.BEGINNING_ANEW,
            # all shards of the step had come before
            E.UPDATE_BEGAN: S.UPDATING_UNHEARD,
            E.RANKS_LOST: S.DOWN,
        },
        S.BEGINNING_ANEW: {
            E.PAUSED: S.READY_UNHEARD,
            E.WELCOMED: S.BEGINNING_ANEW,
            E.BEGAN_ANEW: S.READY,
            E.RANKS_LOST: S.DOWN,
        },
        S.UPDATING: {
            E.PAUSED: S.UPDATING_UNHEARD,
            E.WELCOMED: S.UPDATING_WELCOMED,
            E.UPDATE_ENDED: S.READY,
            E.RANKS_LOST: S.DOWN,
        },
        S.UPDATING_UNHEARD: {
            E.PAUSED: S.UPDATING_UNHEARD,
            E.WELCOMED: S.UPDATING_WELCOMED,
            E.UPDATE_ENDED: S.READY_UNHEARD,
            E.RANKS_LOST: S.DOWN,
        },
        S.UPDATING_WELCOMED: {
            E.PAUSED: S.UPDATING_UNHEARD,
            E.WELCOMED: S.UPDATING_WELCOMED,
            E.UPDATE_ENDED: S.READY,
            E.RANKS_LOST: S.DOWN,
        },
        S.DOWN: {
            E.PAUSED: S.DOWN,
            # who is welcomed is the trainer that was lost; the next one says hello itself
            E.WELCOMED: S.DOWN,
            E.RANKS_STARTED: S.READY_UNHEARD,
            E.RANKS_LOST: S.DOWN,
        },
    }
)

# Nobody hears us in these: what arrives was meant for the trainer that we were before.
UNHEARD = frozenset({S.STARTING_UNHEARD, S.READY_UNHEARD, S.UPDATING_UNHEARD, S.DOWN})
# Nothing is sent in these. A trainer that was welcomed during an update accepts shards already:
# they follow from what it announced before.
SILENT = UNHEARD | {S.UPDATING_WELCOMED}
