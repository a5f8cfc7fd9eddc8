"""Peers that connect and say nothing: `python -m tests.support.silent ADDRESS COUNT NUM_SOURCES`.

Each comes back as soon as it is cut off. They come from NUM_SOURCES addresses of 127.0.0.0/8;
prints a line when the last of them has connected for the first time, ends when its input does.
"""

import os
import select
import socket
import sys


def main(address: str, count: int, num_sources: int) -> None:
    host, _, port = address.rpartition(":")
    poll = select.epoll()
    peers: dict[int, tuple[socket.socket, int]] = {}

    def connect(number: int) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        source = number % num_sources
        sock.bind((f"127.1.{source // 250}.{1 + source % 250}", 0))
        sock.connect_ex((host, int(port)))
        peers[sock.fileno()] = sock, number
        poll.register(sock, select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR)

    def come_back(descriptor: int) -> None:
        sock, number = peers.pop(descriptor)
        poll.unregister(sock)
        sock.close()
        connect(number)

    for number in range(count):
        connect(number)
    print("all are there", flush=True)
    poll.register(sys.stdin, select.EPOLLIN | select.EPOLLHUP)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == sys.stdin.fileno():
                return
            come_back(descriptor)


if __name__ == "__main__":
    os.nice(5)  # they are other machines: they must not take the core of those whom they attack
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
