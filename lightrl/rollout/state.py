"""The states of an engine process, and the events that are allowed in each. Pure.

Whether the coordinator can be reached is no part of them: the engine continues while it cannot.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class EngineState(StrEnum):
    # no process takes commands; none is started while others have its devices
    STARTING = "starting"
    # it takes commands, and serves no version: it has loaded none, or could not load another
    IDLE = "idle"
    # it loads a version; running responses continue under it, new ones wait
    LOADING = "loading"
    SERVING = "serving"
    # it has to sleep, and sends the last tokens
    FALLING_ASLEEP = "falling asleep"
    # others have its devices
    ASLEEP = "asleep"


class EngineChange(StrEnum):
    STARTED = "started"
    # of one that is asleep: to wake first
    LOAD_ORDERED = "load ordered"
    LOADED = "loaded"
    LOAD_FAILED = "load failed"
    SLEEP_ORDERED = "sleep ordered"
    SLEPT = "slept"
    DIED = "died"


S, E = EngineState, EngineChange

EDGES = frozen(
    {
        S.STARTING: {E.STARTED: S.IDLE, E.DIED: S.STARTING},
        S.IDLE: {
            E.LOAD_ORDERED: S.LOADING,
            E.SLEEP_ORDERED: S.FALLING_ASLEEP,
            E.DIED: S.STARTING,
        },
        S.LOADING: {E.LOADED: S.SERVING, E.LOAD_FAILED: S.IDLE, E.DIED: S.STARTING},
        S.SERVING: {
            E.LOAD_ORDERED: S.LOADING,
            E.SLEEP_ORDERED: S.FALLING_ASLEEP,
            E.DIED: S.STARTING,
        },
        S.FALLING_ASLEEP: {E.SLEPT: S.ASLEEP, E.DIED: S.STARTING},
        S.ASLEEP: {E.LOAD_ORDERED: S.LOADING, E.DIED: S.STARTING},
    }
)
