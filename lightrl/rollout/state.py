"""Where an engine process is between its start and its end, and what may happen there. Pure.

Whether the coordinator can be reached is no part of it: the engine goes on when it cannot.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class EngineState(StrEnum):
    # there is none yet, or none any more, that takes commands; while others have its devices, none
    # is started either
    STARTING = "starting"
    # it takes commands and has never loaded a version
    EMPTY = "empty"
    LOADING = "loading"
    SERVING = "serving"
    # it has served a version and loads another: what runs goes on, what is new has to wait
    RELOADING = "reloading"
    # it has served, and could not load another version
    REFUSING = "refusing"
    # it was told to sleep: what ran is on its way here
    FALLING_ASLEEP = "falling asleep"
    # others have its devices
    ASLEEP = "asleep"
    # it was told to wake and to load a version
    WAKING = "waking"


class EngineChange(StrEnum):
    STARTED = "started"
    LOAD_ORDERED = "load ordered"
    LOADED = "loaded"
    LOAD_FAILED = "load failed"
    SLEEP_ORDERED = "sleep ordered"
    SLEPT = "slept"
    WAKE_ORDERED = "wake ordered"
    DIED = "died"


S, E = EngineState, EngineChange

EDGES = frozen(
    {
        S.STARTING: {E.STARTED: S.EMPTY, E.DIED: S.STARTING},
        S.EMPTY: {
            E.LOAD_ORDERED: S.LOADING,
            E.SLEEP_ORDERED: S.FALLING_ASLEEP,
            E.DIED: S.STARTING,
        },
        S.LOADING: {E.LOADED: S.SERVING, E.LOAD_FAILED: S.EMPTY, E.DIED: S.STARTING},
        S.SERVING: {
            E.LOAD_ORDERED: S.RELOADING,
            E.SLEEP_ORDERED: S.FALLING_ASLEEP,
            E.DIED: S.STARTING,
        },
        S.RELOADING: {E.LOADED: S.SERVING, E.LOAD_FAILED: S.REFUSING, E.DIED: S.STARTING},
        S.REFUSING: {
            E.LOAD_ORDERED: S.RELOADING,
            E.SLEEP_ORDERED: S.FALLING_ASLEEP,
            E.DIED: S.STARTING,
        },
        S.FALLING_ASLEEP: {E.SLEPT: S.ASLEEP, E.DIED: S.STARTING},
        S.ASLEEP: {E.WAKE_ORDERED: S.WAKING, E.DIED: S.STARTING},
        S.WAKING: {E.LOADED: S.SERVING, E.LOAD_FAILED: S.REFUSING, E.DIED: S.STARTING},
    }
)

IS_LOADING = frozenset({S.LOADING, S.RELOADING, S.WAKING})
# This process was of use: if it dies, the next one may be as well. How often one that slept may
# die is counted in turns.py.
HAS_SERVED = frozenset({S.SERVING, S.RELOADING, S.REFUSING, S.FALLING_ASLEEP, S.ASLEEP, S.WAKING})
