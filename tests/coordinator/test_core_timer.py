"""When the core is told that time has passed; by a clock that the test moves."""

from collections.abc import Callable

from lightrl.coordinator.core_timer import CoreTimer

GRACE_S = 2.0


class Clock:
    """And the timers of a loop that goes by it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_set = 0
        self.deadline: float | None = None
        self.fired_at: list[float] = []
        self._timers: dict[int, tuple[float, Callable[[], object]]] = {}
        self.timer = CoreTimer(
            lambda: self.deadline, self.fire, GRACE_S, lambda: self.now, self.call_later
        )

    def fire(self) -> None:
        """The core hears of it: what was due is over."""
        self.fired_at.append(self.now)
        self.deadline = None
        self.timer.set()

    def call_later(self, delay: float, act: Callable[[], object]) -> "Handle":
        self.num_set += 1
        self._timers[self.num_set] = self.now + delay, act
        return Handle(self._timers, self.num_set)

    def expect(self, deadline: float | None) -> None:
        """What an event has led to."""
        self.deadline = deadline
        self.timer.set()

    def go_on(self, seconds: float, stands_still: bool = False) -> None:
        """Timers are called when they are due; all that were, at the end, of a process that stood
        still."""
        until = self.now + seconds
        if stands_still:
            self.now = until
        while due := [(at, k) for k, (at, _) in self._timers.items() if at <= until]:
            at, k = min(due)
            self.now = max(self.now, at)
            self._timers.pop(k)[1]()
        self.now = until


class Handle:
    def __init__(self, timers: dict[int, tuple[float, Callable[[], object]]], k: int) -> None:
        self._timers, self._k = timers, k

    def cancel(self) -> None:
        self._timers.pop(self._k, None)


def test_the_core_hears_of_its_deadline_when_it_is_over():
    clock = Clock()
    clock.expect(103.0)
    clock.go_on(2.9)
    assert not clock.fired_at
    clock.go_on(0.2)
    assert clock.fired_at == [103.0]
    clock.go_on(50)
    assert clock.fired_at == [103.0]


def test_deadlines_that_move_on_with_every_event_set_no_timer_each():
    clock = Clock()
    for k in range(1000):
        clock.expect(103.0 + k / 1000)
    assert clock.num_set == 1
    clock.go_on(3.5)
    assert not clock.fired_at
    clock.go_on(0.6)
    assert clock.fired_at == [103.999]


def test_a_deadline_that_is_sooner_counts_and_one_that_is_gone_does_not():
    clock = Clock()
    clock.expect(105.0)
    clock.expect(102.0)
    clock.go_on(2.5)
    assert clock.fired_at == [102.0]
    clock.expect(104.0)
    clock.expect(None)
    clock.go_on(10)
    assert clock.fired_at == [102.0]


def test_a_process_that_was_late_itself_reads_first_what_has_come_meanwhile():
    clock = Clock()
    clock.expect(103.0)
    clock.go_on(10, stands_still=True)
    clock.expect(103.0)  # by something else that had come
    clock.go_on(1.9)
    assert not clock.fired_at
    clock.go_on(0.2)
    assert clock.fired_at == [112.0]


def test_news_that_came_while_it_was_late_count():
    clock = Clock()
    clock.expect(103.0)
    clock.go_on(10, stands_still=True)
    clock.expect(113.0)
    clock.go_on(2.5)
    assert not clock.fired_at
    clock.go_on(1)
    assert clock.fired_at == [113.0]


def test_once_it_is_stopped_nothing_follows():
    clock = Clock()
    clock.expect(103.0)
    clock.timer.stop()
    clock.expect(102.0)
    clock.go_on(10)
    assert not clock.fired_at
