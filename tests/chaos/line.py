"""A line between two network namespaces that loses or delays packets, or is cut. TCP is the
kernel's.

TUN devices in place of `tc netem`, which not every kernel has. A process of its own: `line.py
NAMESPACE NAMESPACE DEVICE`, then one JSON object a line on stdin, {"loss": 0.3, "delay_s": 0.2,
"cut": false}. It ends with its stdin, and says how many packets it has lost.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MAX_PACKET = 1 << 16
MAX_QUEUED = 10_000  # packets on their way; more are lost, as on any line


def device_in(namespace: str, name: str) -> int:
    """A TUN device there. Its packets are read from and written to the descriptor."""
    with open(f"/var/run/netns/{namespace}", "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def forward(ends: tuple[int, int]) -> int:
    """Packets from each end to the other, until stdin closes; returns how many were lost."""
    rng = random.Random(0)
    loss, delay_s, cut = 0.0, 0.0, False
    on_the_way: list[tuple[float, int, int, bytes]] = []  # a heap: due at, number, to, packet
    number = lost = 0
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        ready, _, _ = select.select([*ends, 0], [], [], wait_s)
        if 0 in ready:
            orders = os.read(0, MAX_PACKET).splitlines()
            if not orders:
                return lost
            state = json.loads(orders[-1])
            loss, delay_s, cut = state["loss"], state["delay_s"], state["cut"]
        for end in set(ready) & set(ends):
            packet = os.read(end, MAX_PACKET)
            if cut or rng.random() < loss or len(on_the_way) >= MAX_QUEUED:
                lost += 1
            else:
                number += 1
                other = ends[end == ends[0]]
                heapq.heappush(on_the_way, (time.monotonic() + delay_s, number, other, packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(on_the_way)
            with contextlib.suppress(OSError):  # its queue is full, or it is not up yet: lost
                os.write(to, packet)


if __name__ == "__main__":
    both = (device_in(sys.argv[1], sys.argv[3]), device_in(sys.argv[2], sys.argv[3]))
    print("there", flush=True)
    print(forward(both), flush=True)
