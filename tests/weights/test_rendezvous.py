"""Where members of a broadcast group meet: strangers stay outside, and an end is known to all."""

import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lightrl.errors import WeightsError
from lightrl.weights.broadcast.rendezvous import (
    MAX_PENDING,
    Lifeline,
    Membership,
    Rendezvous,
    reach,
)

PLACE = Membership("secret", 0, 1, 3, "gloo", 20.0)
SOON = 10.0


@contextmanager
def met() -> Iterator[list[Lifeline]]:
    meet = Rendezvous("127.0.0.1")
    lines: list[Lifeline] = []
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(meet.gather, PLACE, time.monotonic() + SOON)
            others = [
                reach(meet.address, replace(PLACE, rank=rank), time.monotonic() + SOON)
                for rank in (1, 2)
            ]
            lines = [first.result(), *others]
        yield lines
    finally:
        for line in lines:
            line.cut("the test is over")


def test_why_it_is_over_is_known_to_all_whoever_says_it():
    for who in range(3):
        with met() as lines:
            assert [line.over for line in lines] == [None] * 3
            lines[who].cut("no progress")
            assert [line.wait_over(SOON) for line in lines] == ["no progress"] * 3


def test_a_member_that_is_gone_is_named():
    with met() as lines:
        lines[2]._peers[0].shutdown(socket.SHUT_RDWR)  # as a kernel does it for who has died
        assert [line.wait_over(SOON) for line in lines[:2]] == ["member 2 is gone"] * 2


def test_words_are_heard_by_each_and_awaited_for_a_limited_time():
    with met() as lines:
        lines[1].tell("formed")
        with pytest.raises(WeightsError, match=r"no word of members \[2\]"):
            lines[0].expect(time.monotonic() + 0.2)
        lines[2].tell("formed")
        assert lines[0].expect(time.monotonic() + SOON) == "formed"
        lines[0].tell("41873")
        assert [line.expect(time.monotonic() + SOON) for line in lines[1:]] == ["41873"] * 2


def test_who_says_too_much_is_gone():
    with met() as lines:
        lines[1]._peers[0].sendall(bytes(10_000))
        assert lines[2].wait_over(SOON) == "member 1 is gone"


def test_strangers_neither_get_in_nor_keep_members_out():
    meet = Rendezvous("127.0.0.1")
    choice = random.Random(1)
    is_over = threading.Event()
    held: list[socket.socket] = []

    def knock() -> None:
        while not is_over.is_set():
            try:
                sock = socket.create_connection(meet.address, timeout=1)
                sock.sendall(choice.randbytes(choice.randrange(80)))
            except OSError:
                continue
            held.append(sock)  # half of them stay, and say nothing more
            if len(held) > 2 * MAX_PENDING:
                held.pop(choice.randrange(len(held))).close()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stranger = threading.Thread(target=knock)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet.gather, PLACE, time.monotonic() + 2 * SOON)
        stranger.start()
        time.sleep(0.5)  # of noise
        assert not first.done()
        try:
            wrong = replace(PLACE, name="guessed", rank=1)
            reach(meet.address, wrong, time.monotonic() + SOON).wait_over(SOON)
            others = [
                reach(meet.address, replace(PLACE, rank=rank), time.monotonic() + SOON)
                for rank in (2, 1)
            ]
            line = first.result(2 * SOON)
        finally:
            is_over.set()
            stranger.join()
    others[0].tell("x")
    others[1].tell("y")
    line.expect(time.monotonic() + SOON)
    line.cut("over")
    assert [other.wait_over(SOON) for other in others] == ["over"] * 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000
    for sock in held:
        sock.close()


def test_a_second_one_of_the_same_rank_and_one_of_no_rank_are_shown_the_door():
    meet = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet.gather, PLACE, time.monotonic() + SOON)
        deadline = time.monotonic() + SOON
        one = reach(meet.address, replace(PLACE, rank=1), deadline)
        for rank in (1, 0, 3, 1 << 31):
            other = reach(meet.address, replace(PLACE, rank=rank), deadline)
            assert other.wait_over(SOON) == "member 0 is gone"
        two = reach(meet.address, replace(PLACE, rank=2), deadline)
        line = first.result(SOON)
    assert one.over is None
    line.cut("over")
    assert [two.wait_over(SOON), one.wait_over(SOON)] == ["over"] * 2


def test_members_that_do_not_come_are_counted_at_the_deadline():
    meet = Rendezvous("127.0.0.1")
    with pytest.raises(WeightsError, match=r"members \[1, 2\] of 3 did not come"):
        meet.gather(PLACE, time.monotonic() + 0.2)
    with pytest.raises(WeightsError, match="cannot be reached"):
        reach(meet.address, PLACE, time.monotonic() + 1)


def test_an_address_that_is_not_of_this_machine_is_one_line():
    with pytest.raises(WeightsError, match=r"cannot listen on 192\.0\.2\.1"):
        Rendezvous("192.0.2.1")
