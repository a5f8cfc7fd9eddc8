"""By how much the event loops of a trainer's and of a node's daemon are late while versions come
and go: published, pulled, proved, retired, closed, unlinked."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightrl.weights.version.manifest import VersionFile
from scripts.bench.weights_lib import files
from scripts.bench.weights_lib.nodes import ROOT
from scripts.bench.weights_lib.table import Options, Row

NODE = "scripts.bench.weights_lib.loop_node"
MOST_MS = 50


class Node:
    """One process with an event loop."""

    def __init__(self, kind: str) -> None:
        self.worst: dict[str, float] = {}  # ms, by what was done meanwhile
        self._process = subprocess.Popen(
            [sys.executable, "-m", NODE, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.about = self._receive()

    def do(self, what: str, **order: Any) -> None:
        """Waits until it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._note(what)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._note("closing")
        self._process.wait()

    def kill(self) -> None:
        """If it has not ended."""
        self._process.kill()
        self._process.wait()

    def _note(self, what: str) -> None:
        self.worst[what] = max(self.worst.get(what, 0.0), self._receive()["late_ms"])

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process with a loop has ended")
        return json.loads(line)


def rows(options: Options) -> Iterator[Row]:
    mb = options.loops_mb
    trainer, puller, idle = nodes = [Node(kind) for kind in ("trainer", "puller", "idle")]
    try:
        with files.folder() as folder:
            scenario(folder, mb, trainer, puller, idle)
    finally:
        for node in nodes:
            node.kill()
    for name, node in (("trainer", trainer), ("puller", puller)):
        for what, ms in node.worst.items():
            title = f"{name}'s loop late, {what}"
            yield Row("loops", title, mb, ms, "ms", MOST_MS, 1.0, is_at_most=True)
    yield Row("loops", "an idle loop beside them", mb, max(idle.worst.values()), "ms")


def scenario(folder: Path, mb: int, trainer: Node, puller: Node, idle: Node) -> None:
    """Two versions, one after the other; each file is gone from the trainer before the next is
    written, so that there are three of them at most."""
    files_so_far: list[VersionFile] = []
    for version in (1, 2):
        if files_so_far:  # not before the puller has it
            trainer.do("publishing", publish=asdict(tiny(folder)))
            trainer.do("unlinking", forget=asdict(files_so_far[-1]))
        file = replace(files.make(folder / f"v{version}.bin", mb), policy_version=2 * version)
        files_so_far.append(file)
        trainer.do("publishing", publish=asdict(file))
        puller.do("pulling and giving back", offer=asdict(file), **trainer.about)
        trainer.do("sending", publish=asdict(file))  # asks for what was late meanwhile
    Path(files_so_far[-1].path).unlink()  # the last close of it gives its pages back
    trainer.end()
    puller.end()
    idle.do("")


def tiny(folder: Path) -> VersionFile:
    """A version that is used until the next one is written."""
    return replace(files.make(folder / "tiny.bin", 1), policy_version=3)
