"""A time limit that knows when this process itself stood still; by a clock that the test moves."""

import asyncio
import time

import pytest

from lightrl.system.timeouts import CHECKS, patient_timeout

LIMIT_S = 0.04


class StoppableLoop(asyncio.SelectorEventLoop):
    """Its clock jumps as that of a process does which was stopped and goes on."""

    stopped_s = 0.0

    def time(self) -> float:
        return time.monotonic() + self.stopped_s

    def stand_still(self, seconds: float) -> None:
        self.stopped_s += seconds


def run(*gaps_s: float, answers: bool) -> None:
    """Within the limit: gaps of these lengths, one after the other, and then an answer that takes
    the loop three rounds, as one through a socket does."""

    async def scenario() -> None:
        answer: asyncio.Future[None] = loop.create_future()

        def say(rounds: int) -> None:
            if rounds:
                loop.call_soon(say, rounds - 1)
            elif answers:
                answer.set_result(None)

        async with patient_timeout(LIMIT_S):
            for gap_s in gaps_s:
                loop.stand_still(gap_s)
                await asyncio.sleep(0)
            say(3)
            await answer

    loop = StoppableLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario())


def test_silence_ends_at_the_limit():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run(answers=False)
    assert time.monotonic() - began >= LIMIT_S * (CHECKS - 1) / CHECKS


def test_an_answer_in_time_is_an_answer():
    run(answers=True)


@pytest.mark.parametrize("gap_s", [LIMIT_S, 3600.0])
def test_a_gap_of_our_own_is_not_the_silence_of_somebody_else(gap_s: float):
    run(gap_s, answers=True)
    run(*[gap_s] * (CHECKS - 2), answers=True)


def test_who_stays_silent_after_a_gap_is_given_up():
    with pytest.raises(TimeoutError):
        run(3600.0, answers=False)


def test_nothing_of_a_limit_is_left_behind():
    async def scenario() -> None:
        async with patient_timeout(LIMIT_S):
            pass
        with pytest.raises(ValueError, match="of its own"):
            async with patient_timeout(LIMIT_S):
                raise ValueError("of its own")
        assert not [h for h in asyncio.get_running_loop()._scheduled if not h.cancelled()]  # type: ignore[attr-defined]

    asyncio.run(scenario())
