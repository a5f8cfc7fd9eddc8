"""One timer of the event loop for the deadlines of the core.

It is set as rarely as possible. A process that was late itself first reads pending messages.
"""

from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    def cancel(self) -> None: ...


class CoreTimer:
    """Call `set` after every event, `stop` at the end."""

    def __init__(
        self,
        deadline: Callable[[], float | None],
        fire: Callable[[], object],
        grace_s: float,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], object]], Handle],
    ) -> None:
        """`deadline` returns seconds of `clock`, or None. `fire` is called once it has passed, or
        `grace_s` later if this process was late by more than that. `call_later`: the event
        loop's."""
        self._deadline = deadline
        self._fire = fire
        self._grace_s = grace_s
        self._clock = clock
        self._call_later = call_later
        self._handle: Handle | None = None
        self._set_for = 0.0
        self._is_stopped = False

    def set(self) -> None:
        """Set the timer for the deadline. Deadlines mostly move later: a timer that is set for an
        earlier time stays, and is set again when it fires."""
        deadline = self._deadline()
        if self._handle is not None:
            if deadline is not None and self._set_for <= deadline:
                return
            self._handle.cancel()
            self._handle = None
        if deadline is not None and not self._is_stopped:
            self._set_for, delay = deadline, max(0.0, deadline - self._clock())
            self._handle = self._call_later(delay, self._time_out)

    def stop(self) -> None:
        self._is_stopped = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _time_out(self, has_waited: bool = False) -> None:
        """Fire; a process that was late first gets time to read pending heartbeats."""
        self._handle = None
        deadline = self._deadline()
        if deadline is None or deadline > self._set_for:
            self.set()
        elif not has_waited and self._clock() - self._set_for > self._grace_s:
            self._handle = self._call_later(self._grace_s, lambda: self._time_out(True))
        else:
            self._fire()
