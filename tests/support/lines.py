"""Machines on one machine, each in a network namespace of its own, with a line to the others that
has a rate in each direction and may be cut.

A star: every line ends in a namespace in the middle, which forwards. Rates are token buckets of the
kernel (`tc tbf`), so that TCP is the kernel's, too. Needs root on Linux.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from shutil import which

BURST_BYTES = 256 << 10  # that may pass at once: more than a timer tick at 1 GB/s
QUEUE_MS = 20  # a packet waits so long for its turn before it is lost


def why_not() -> str:
    """Why there can be no such lines here; "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if lacking := [name for name in ("ip", "tc") if which(name) is None]:
        return f"needs {' and '.join(lacking)} (Debian: iproute2)"
    probe = Star(f"{os.getpid()}-probe", 1)
    try:
        with probe.up():
            probe.set_rate(0, 1e9, 1e9)
    except subprocess.CalledProcessError as e:
        return f"the kernel refuses {' '.join(e.cmd)}"
    return ""


class Star:
    """Machine k is in the namespace `space(k)` and has `address(k)`."""

    def __init__(self, mark: str, machines: int) -> None:
        """`mark` keeps the namespaces of two that are up at a time apart."""
        self._middle = f"lightrl-{mark}-middle"
        self._mark = mark
        self._machines = range(machines)

    def space(self, k: int) -> str:
        return f"lightrl-{self._mark}-{k}"

    def address(self, k: int) -> str:
        return f"10.78.{k}.2"

    def command(self, k: int, *words: str) -> Sequence[str]:
        """These words as a command on machine k."""
        return ["ip", "netns", "exec", self.space(k), *words]

    @contextlib.contextmanager
    def up(self) -> Iterator["Star"]:
        spaces = [self._middle, *map(self.space, self._machines)]
        try:
            for space in spaces:
                _run("ip", "netns", "add", space)
                _run("ip", "-n", space, "link", "set", "lo", "up")
            forward = "net.ipv4.ip_forward=1"
            _run("ip", "netns", "exec", self._middle, "sysctl", "-qw", forward)
            for k in self._machines:
                self._lay(k)
            yield self
        finally:
            for space in spaces:
                subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def set_rate(self, k: int, up: float, down: float) -> None:
        """Bytes per second from machine k, and to it."""
        for space, device, rate in ((self.space(k), "line", up), (self._middle, f"to{k}", down)):
            bits = f"{int(rate * 8)}bit"
            queue = ("burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
            words = ("qdisc", "replace", "dev", device, "root", "tbf", "rate", bits, *queue)
            _run("tc", "-n", space, *words)

    def cut(self, k: int, is_cut: bool = True) -> None:
        """Nothing passes the line of machine k, which does not notice; or it does again."""
        words = ("route", "add" if is_cut else "del", "blackhole", f"{self.address(k)}/32")
        _run("ip", "-n", self._middle, *words)

    def _lay(self, k: int) -> None:
        mine, middle, end = self.space(k), self._middle, f"to{k}"
        pair = ("type", "veth", "peer", "name", end, "netns", middle)
        _run("ip", "link", "add", "line", "netns", mine, *pair)
        for space, device, last in ((mine, "line", 2), (middle, end, 1)):
            _run("ip", "-n", space, "addr", "add", f"10.78.{k}.{last}/24", "dev", device)
            _run("ip", "-n", space, "link", "set", device, "up")
        _run("ip", "-n", mine, "route", "add", "default", "via", f"10.78.{k}.1")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
