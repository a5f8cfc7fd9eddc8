"""Nodes of the benchmark as their parent sees them."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightrl.tickets import pull_ticket
from lightrl.weights.version.manifest import VersionFile

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """Speaks JSON lines, in a network namespace if it is given one."""

    def __init__(self, name: str, namespace: str, *module: str) -> None:
        self.name = name
        prefix = ["ip", "netns", "exec", namespace] if namespace else []
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Node(Process):
    """A process that serves and pulls."""

    def __init__(self, name: str, host: str, namespace: str = "") -> None:
        super().__init__(name, namespace, "scripts.bench.weights_lib.node", name, host)
        reported = self.receive()
        self.addresses: list[str] = reported["addresses"]
        self.secret: str = reported["secret"]

    def publish(self, version: VersionFile) -> None:
        self.order(publish=asdict(version))
        self.receive()

    def source(self, receiver: str) -> dict[str, Any]:
        ticket = pull_ticket(self.secret, receiver, 1)
        return {"node": self.name, "addresses": self.addresses, "ticket": ticket}

    def pull(self, version: VersionFile, to: Path, sources: list["Node"], streams: int) -> None:
        size = version.manifest_bytes()
        wanted = {
            "policy_version": 1,
            "digest": version.digest,
            "num_bytes": version.num_bytes,
            "manifest_bytes": size,
        }
        offers = [s.source(self.name) for s in sources]
        self.order(pull=wanted, to=str(to), sources=offers, streams=streams)

    def until_proved(self, num_bytes: int) -> None:
        while self.receive().get("proved", 0) < num_bytes:
            pass

    def stats(self) -> dict[str, Any]:
        while "stats" not in (reported := self.receive()):
            pass
        return reported

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.kill()


@contextlib.contextmanager
def nodes(*given: tuple[str, str, str]) -> Iterator[list[Node]]:
    """(name, host, namespace) of each."""
    with contextlib.ExitStack() as stack:
        started: list[Node] = []
        for name, host, namespace in given:
            node = Node(name, host, namespace)
            stack.callback(node.close)
            started.append(node)
        yield started
