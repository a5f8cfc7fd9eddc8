"""Where an engine process is between its start and its end, and what may happen there. Pure.

Whether the coordinator can be reached is no part of it: the engine goes on when it cannot.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class EngineState(StrEnum):
    # there is none yet, or none any more, that takes commands
    STARTING = "starting"
    # it takes commands and has never loaded a version
    EMPTY = "empty"
    LOADING = "loading"
    SERVING = "serving"
    # it has served a version and loads another: what runs goes on, what is new has to wait
    RELOADING = "reloading"
    # it has served, and could not load another version
    REFUSING = "refusing"


class EngineChange(StrEnum):
    STARTED = "started"
    LOAD_ORDERED = "load ordered"
    LOADED = "loaded"
    LOAD_FAILED = "load failed"
    DIED = "died"


S, E = EngineState, EngineChange

EDGES = frozen(
    {
        S.STARTING: {E.STARTED: S.EMPTY, E.DIED: S.STARTING},
        S.EMPTY: {E.LOAD_ORDERED: S.LOADING, E.DIED: S.STARTING},
        S.LOADING: {E.LOADED: S.SERVING, E.LOAD_FAILED: S.EMPTY, E.DIED: S.STARTING},
        S.SERVING: {E.LOAD_ORDERED: S.RELOADING, E.DIED: S.STARTING},
        S.RELOADING: {E.LOADED: S.SERVING, E.LOAD_FAILED: S.REFUSING, E.DIED: S.STARTING},
        S.REFUSING: {E.LOAD_ORDERED: S.RELOADING, E.DIED: S.STARTING},
    }
)

IS_LOADING = frozenset({S.LOADING, S.RELOADING})
# This process was of use: if it dies, the next one may be as well.
HAS_SERVED = frozenset({S.SERVING, S.RELOADING, S.REFUSING})
