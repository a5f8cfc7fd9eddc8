"""Machines on one machine: network namespaces with a line from each to the first, which may be bad
or cut."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

LINE = Path(__file__).parent / "line.py"
MTU = 30_000  # few packets, so that a lossy line is not slow as well


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if which("ip") is None:
        return "needs ip (Debian: iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    probe = f"lightrl-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "the kernel refuses network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class Network:
    """The head's namespace is `head`; node k sees it at `head_address(k)` and is in `node(k)`."""

    def __init__(self, mark: str, nodes: int) -> None:
        self.head = f"lightrl-{mark}-head"
        self._mark = mark
        self._lines: list[subprocess.Popen[str]] = []
        self._num_nodes = nodes

    def node(self, k: int) -> str:
        return f"lightrl-{self._mark}-{k}"

    def head_address(self, k: int) -> str:
        return f"10.77.{k}.1"

    @contextlib.contextmanager
    def up(self) -> Iterator["Network"]:
        spaces = [self.head, *map(self.node, range(self._num_nodes))]
        try:
            for space in spaces:
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            for k in range(self._num_nodes):
                self._lay(k)
            yield self
        finally:
            for line in self._lines:
                with line:
                    line.kill()
            for space in spaces:
                subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def set(self, k: int, loss: float = 0.0, delay_s: float = 0.0, cut: bool = False) -> None:
        """How the line of node k is from now on, in both directions."""
        pipe = self._lines[k].stdin
        assert pipe is not None
        pipe.write(json.dumps({"loss": loss, "delay_s": delay_s, "cut": cut}) + "\n")
        pipe.flush()

    def lost_packets(self, k: int) -> int:
        """Of node k's line, which ends with this."""
        out, _ = self._lines[k].communicate()
        return int(out)

    def _lay(self, k: int) -> None:
        device = f"line{k}"
        line = subprocess.Popen(
            [sys.executable, str(LINE), self.head, self.node(k), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines.append(line)
        assert line.stdout is not None
        assert line.stdout.readline() == "there\n"
        for space, mine in ((self.head, 1), (self.node(k), 2)):
            _ip("-n", space, "addr", "add", f"10.77.{k}.{mine}/24", "dev", device)
            _ip("-n", space, "link", "set", device, "mtu", str(MTU), "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
