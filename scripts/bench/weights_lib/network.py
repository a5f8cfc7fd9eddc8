"""Machines on one machine, each with a line of its own to a switch, with a rate for each direction.

Network namespaces, a bridge and `tc tbf`: root on Linux.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator

MTU = 30_000  # little of the line goes to headers
PREFIX = "10.78.0."


class Switch:
    def __init__(self, num: int, bytes_per_s: float) -> None:
        mark = f"bw{os.getpid() % 100_000}"
        self._switch = f"{mark}-sw"
        self.spaces = [f"{mark}-{k}" for k in range(num)]
        self.hosts = [f"{PREFIX}{k + 1}" for k in range(num)]
        self._bytes_per_s = bytes_per_s

    @contextlib.contextmanager
    def up(self) -> Iterator["Switch"]:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "sw0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "sw0", "mtu", str(MTU), "up")
            for k, space in enumerate(self.spaces):
                self._lay(k, space)
            yield self
        finally:
            for space in [self._switch, *self.spaces]:
                subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def sent_bytes(self, k: int) -> int:
        """Over the line of machine k, with headers."""
        command = ["ip", "-n", self.spaces[k], "-s", "-j", "link", "show", "eth0"]
        shown = subprocess.run(command, check=True, capture_output=True).stdout
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]

    def _lay(self, k: int, space: str) -> None:
        port = f"p{k}"
        _ip("netns", "add", space)
        peer = ("peer", "name", "eth0", "netns", space)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", *peer)
        _ip("-n", self._switch, "link", "set", port, "mtu", str(MTU), "master", "sw0", "up")
        _ip("-n", space, "addr", "add", f"{self.hosts[k]}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "mtu", str(MTU), "up")
        _ip("-n", space, "link", "set", "lo", "up")
        for where, device in ((self._switch, port), (space, "eth0")):
            rate = f"{int(self._bytes_per_s * 8)}bit"
            burst = str(max(256 << 10, int(self._bytes_per_s / 250)))
            queue = str(max(512 << 10, int(self._bytes_per_s * 0.05)))  # 50 ms
            limit = ("rate", rate, "burst", burst, "limit", queue)
            shape = ["tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit]
            subprocess.run(shape, check=True)


def why_not() -> str:
    """Why there can be no such network here; "" if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root on Linux"
    probe = Switch(1, 1e8)
    try:
        with probe.up():
            return ""
    except (OSError, subprocess.CalledProcessError) as e:
        return f"the kernel refuses: {e}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
