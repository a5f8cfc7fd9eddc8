"""A broadcast group of many: 64 members of one trainer, each with its connection to member 0."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lightrl.weights.broadcast.rendezvous import Lifeline, Membership, Rendezvous, reach

NUM = 64
PLACE = Membership("secret", 0, 1, NUM + 1, "gloo", 20.0)
SOON = 10.0


def test_sixty_four_come_at_once_and_each_learns_that_one_is_gone():
    meet = Rendezvous("127.0.0.1")
    lines: list[Lifeline] = []

    def come(rank: int) -> Lifeline:
        return reach(meet.address, replace(PLACE, rank=rank), time.monotonic() + SOON)

    try:
        with ThreadPoolExecutor(NUM + 1) as pool:
            first = pool.submit(meet.gather, PLACE, time.monotonic() + SOON)
            lines = list(pool.map(come, range(1, NUM + 1)))
            lines.insert(0, first.result())
        for line in lines[1:]:
            line.tell("formed")
        lines[0].expect(time.monotonic() + SOON)
        lines[0].tell("ready")
        assert [line.expect(time.monotonic() + SOON) for line in lines[1:]] == ["ready"] * NUM
        assert {line.over for line in lines} == {None}
        lines[40]._peers[0].shutdown(socket.SHUT_RDWR)  # as a kernel does it for who has died
        others = lines[:40] + lines[41:]
        assert [line.wait_over(SOON) for line in others] == ["member 40 is gone"] * NUM
    finally:
        for line in lines:
            line.cut("the test is over")
