"""Operations between two members of a gloo group, as operations of a whole group are: who began one
can ask whether it is over.

Owns the thread that waits for them, one after the other; torch knows no other way to learn of their
end. Imports torch; daemons must not import this.
"""

import queue
import threading
from typing import Any

REST_S = 0.005


class Passing:
    """One operation."""

    def __init__(self, work: Any) -> None:
        self._work: Any = work
        self._error: RuntimeError | None = None
        self._is_over = threading.Event()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def rest(self) -> None:
        """Until it is over, or for a moment."""
        self._is_over.wait(REST_S)

    def wait(self) -> None:
        """Raises RuntimeError if it has failed."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """In a thread: until it is over, at the latest at the backend's time limit, which counts
        from here; so it moves with progress."""
        try:
            self._work.wait()
        except RuntimeError as e:
            self._error = e
        self._work = None  # it holds the data, and who waits for the next one holds this
        self._is_over.set()


class Waiter:
    """Operations in the order in which they were begun: one of them can wait only for earlier ones,
    here or elsewhere."""

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[Passing | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="broadcast passes").start()

    def add(self, work: Any) -> Passing:
        passing = Passing(work)
        self._begun.put(passing)
        return passing

    def close(self) -> None:
        """Returns at once; the thread ends with the last operation."""
        self._begun.put(None)

    def _run(self) -> None:
        while (passing := self._begun.get()) is not None:
            passing.end()
