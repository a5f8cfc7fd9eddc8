"""The states of a trainer's ranks, and the events that are allowed in each. Pure.

Whether the coordinator is connected is independent of it: see `Trainer` in supervisor.py.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class TrainerState(StrEnum):
    STARTING = "starting"  # the first ranks of this process: no version was announced
    READY = "ready"  # the ranks hold a version and train the next step, or save
    UPDATING = "updating"  # the ranks move from one version to the next
    DOWN = "down"  # ranks were lost, and have not all restarted


class TrainerEvent(StrEnum):
    RANKS_STARTED = "ranks started"
    RANKS_LOST = "ranks lost"
    UPDATE_BEGAN = "update began"
    UPDATE_ENDED = "update ended"


S, E = TrainerState, TrainerEvent

EDGES = frozen(
    {
        S.STARTING: {
            E.RANKS_STARTED: S.READY,
            E.RANKS_LOST: S.DOWN,
        },
        S.READY: {
            E.UPDATE_BEGAN: S.UPDATING,
            E.RANKS_LOST: S.DOWN,
        },
        S.UPDATING: {
            E.UPDATE_ENDED: S.READY,
            E.RANKS_LOST: S.DOWN,
        },
        S.DOWN: {
            E.RANKS_STARTED: S.READY,
            E.RANKS_LOST: S.DOWN,
        },
    }
)
