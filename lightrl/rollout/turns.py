"""Devices that take turns, at the node: the coordinator's orders to sleep and to wake, each carried
out after the one before, and their answers.

Owns when this node may have an engine that is awake, and when it stops trying to wake one. Sends no
command to the engine: orders.py does, and reports the result here. Devices of its own are always
held.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from lightrl.messages.message import Message
from lightrl.messages.sharing import DevicesReleased, SetDevices

logger = logging.getLogger(__name__)

MAX_FAILURES = 2  # engines in a row that die asleep or do not wake; then the devices only train


class Turns:
    def __init__(
        self,
        takes_turns: bool,
        send: Callable[[Message], None],
        rejoin: Callable[[], None],
        on_wake: Callable[[], None],
        with_sizes: bool = False,
    ) -> None:
        """`takes_turns`: with training ranks, or with engines of other sizes; else the devices are
        its own. `rejoin` sends another hello. `on_wake`: this node may have an engine, which has no
        version. `with_sizes`: it takes turns with engines of other sizes.

        A node begins without its devices: an earlier process of it may have stopped while others
        had them.
        """
        self.ours = asyncio.Event()  # an engine may be started, woken and loaded
        self.due = asyncio.Event()  # they are being given back: not ours, and not released yet
        self.refusal = ""  # why no engine wakes here any more
        self.freed_bytes = 0  # by the engine that sleeps
        self._takes_turns = takes_turns
        self._without = "other sizes work" if with_sizes else "its devices only train"
        self._send = send
        self._rejoin = rejoin
        self._on_wake = on_wake
        self._number = -1  # of the newest order
        self._begun_at = 0.0
        self._wakes_after = False  # the sleep that is due
        self._has_reconnected = False  # since the sleep was ordered: the answer is another hello
        self._is_to_wake = False  # an engine has slept, and none has loaded a version since
        self._num_failures = 0
        if not takes_turns:
            self.ours.set()

    @property
    def is_released(self) -> bool:
        return not (self.ours.is_set() or self.due.is_set())

    # Orders

    def order(self, order: SetDevices, is_starting: bool = False) -> None:
        """Carry out an order, and answer it then. A repeated one is answered again; an older one is
        ignored. `is_starting`: the engine is."""
        if not self._takes_turns:
            logger.warning("this node has devices of its own, but was ordered: %s", order)
        elif order.number >= self._number:
            self._number = order.number
            if not order.active:
                if is_starting and self.ours.is_set():
                    logger.info("the engine still starts: its devices are given back once it is up")
                self._release()
            elif self.due.is_set():
                self._wakes_after = True
            elif not self.refusal:
                self._wake()

    def welcomed(self) -> None:
        """The hello has reported whether the engine sleeps; orders may count from 0 again."""
        self._number = -1
        self._has_reconnected = self.due.is_set()

    def _release(self) -> None:
        self._wakes_after = self._has_reconnected = False
        if self.ours.is_set():
            self._begun_at = time.monotonic()
            self.ours.clear()
            self.due.set()
        elif not self.due.is_set():
            self._send(DevicesReleased("rollout", self._number, self.freed_bytes, 0.0))

    def _wake(self) -> None:
        self.ours.set()
        self._on_wake()

    # The engine

    def slept(self, num_bytes: int) -> None:
        """The engine sleeps, and has freed so many bytes."""
        self._is_to_wake = True
        self._released(num_bytes)

    def gone(self) -> None:
        """There is no engine: devices that were to be given back are free."""
        self.freed_bytes = 0
        if self.due.is_set():
            self._released(0)

    def loaded(self, has_woken: bool) -> None:
        """The engine serves a version. `has_woken`: it slept until then."""
        self._is_to_wake = False
        if has_woken:
            self._num_failures = 0

    def died(self, reason: str) -> None:
        """The engine has died. One that was ordered to sleep may have been killed for that, which
        is not counted."""
        if self.due.is_set() or not self._is_to_wake:
            return
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self.ours.clear()
            self.refusal = f"engines here do not wake, so {self._without}: {reason}"
            logger.error("%s", self.refusal)

    def _released(self, num_bytes: int) -> None:
        seconds = time.monotonic() - self._begun_at
        self.freed_bytes = num_bytes
        self.due.clear()
        number, wakes_after = self._number, self._wakes_after
        logger.debug("devices given back in %.2f s: %d bytes", seconds, num_bytes)
        if self._has_reconnected:
            self._has_reconnected = False
            self._rejoin()
        elif not wakes_after:
            self._send(DevicesReleased("rollout", number, num_bytes, seconds))
        if wakes_after:
            self._wakes_after = False
            self._wake()
