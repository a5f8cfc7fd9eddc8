"""The states of an engine process, and the events that are allowed in each. Pure.

Whether the coordinator can be reached is no part of them: the engine runs on while it cannot.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class EngineState(StrEnum):
    # no process takes commands; none is started while others have its devices
    STARTING = "starting"
    # it takes commands, and has never loaded a version
    EMPTY = "empty"
    LOADING = "loading"
    SERVING = "serving"
    # it has served a version and loads another: running responses go on, new ones wait
    RELOADING = "reloading"
    # it has served, and could not load another version
    REFUSING = "refusing"
    # it has to sleep, and sends the last tokens
    FALLING_ASLEEP = "falling asleep"
    # others have its devices
    ASLEEP = "asleep"
    # it has to wake and to load a version
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
# This process was useful, so the next one may be, too. Deaths of sleeping ones are counted in
# turns.py.
HAS_SERVED = frozenset({S.SERVING, S.RELOADING, S.REFUSING, S.FALLING_ASLEEP, S.ASLEEP, S.WAKING})
