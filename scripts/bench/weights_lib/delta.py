"""Differences between versions of a model that is really trained: bytes beside their entropy, and
when a node has the new version, by the difference and whole.

A node gets version after version over a line with a limit (root on Linux): in turn whole; by the
difference, to whose time what encoding it took is added; and as it is in a run ("auto"): the
version is offered, and its difference as much later as encoding it took.
"""

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsSource
from lightrl.tickets import pull_ticket
from lightrl.weights.version.manifest import VersionFile
from scripts.bench.weights_lib import files, network
from scripts.bench.weights_lib.nodes import ROOT, Node
from scripts.bench.weights_lib.table import Options, Row

UPDATES = 10
QUICKSTART = str(ROOT / "configs/quickstart/model")


@dataclass(frozen=True)
class Case:
    what: str
    model: str
    dtype: str
    rate: float
    lines: tuple[float, ...]
    updates: int = UPDATES


CASES = (
    Case("bf16, lr 1e-6", "random:768x4", "bfloat16", 1e-6, (0.125e9, 1.25e9)),
    Case("quickstart, bf16, lr 1e-4", QUICKSTART, "bfloat16", 1e-4, (0.125e9,), 30),
    Case("quickstart, fp32, lr 1e-4", QUICKSTART, "float32", 1e-4, (0.125e9,), 30),
)


@dataclass(frozen=True)
class Step:
    """A version, and what leads to it from the one before, if it pays."""

    version: VersionFile
    encode_s: float
    reported: dict[str, Any]

    @property
    def delta(self) -> VersionFile | None:
        return VersionFile(**self.reported["delta"]) if "delta" in self.reported else None


def rows(options: Options) -> Iterator[Row]:
    for case in CASES:
        with files.folder() as folder:
            steps = made(case, folder)
            yield from _bytes(case, steps)
            if why := network.why_not():
                print(f"delta: times are not measured: {why}")
                continue
            for line in case.lines:
                yield from _times(case, steps, folder, line)


def made(case: Case, folder: Path) -> list[Step]:
    module = "scripts.bench.weights_lib.delta_versions"
    words = (str(folder), case.model, case.dtype, str(case.rate), str(case.updates))
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    reported = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [Step(VersionFile(**s["version"]), s["encode_s"], s) for s in reported]


def _bytes(case: Case, steps: list[Step]) -> Iterator[Row]:
    size = steps[0].version.num_bytes
    mb = round(size / 1e6)
    found = [s for s in steps if s.delta is not None]
    shares = [s.reported["changed"] for s in steps[1:]]
    yield Row("delta", f"{case.what}: changed", mb, 100 * statistics.mean(shares), "%")
    yield Row("delta", "  differences that pay", mb, len(found), "of", float(len(steps) - 1))
    if not found:
        return
    encoded = sum(s.reported["encoded_bytes"] for s in found)
    entropy = sum(s.reported["entropy_bytes"] for s in found)
    yield Row(
        "delta", "  its bytes, beside the entropy", mb, encoded / len(found) / 1e6, "MB",
        entropy / len(found) / 1e6, 1.5, is_at_most=True,
    )  # fmt: skip
    total = sum(d.num_bytes for s in found if (d := s.delta) is not None)
    goal = None if case.rate > 1e-6 else 60.0 if max(shares) <= 0.01 else 20.0
    yield Row(
        "delta", "  whole version, beside it", mb, size / 1e6, "MB", total / len(found) / 1e6, goal
    )
    seconds = statistics.median(s.encode_s for s in found)
    yield Row("delta", "  encoded", mb, size / seconds / 1e9, "GB/s")


def _times(case: Case, steps: list[Step], folder: Path, line: float) -> Iterator[Row]:
    mb = round(steps[0].version.num_bytes / 1e6)
    took, moved = defaultdict[str, list[float]](list), defaultdict[str, list[int]](list)
    with network.Switch(2, line).up() as switch, _node(switch) as node:
        trainer = Node("trainer", switch.hosts[0], switch.spaces[0])
        try:
            for i, step in enumerate(steps):
                mode = ("whole", "delta", "auto")[i % 3] if i else "first"
                stats = _get(node, trainer, step, mode)
                took[mode].append(stats["wall_s"] + (mode == "delta") * step.encode_s)
                moved[mode].append(stats["num_bytes"])
        finally:
            trainer.close()
    of = f"at {line / 1e9:g} GB/s"
    median = {mode: statistics.median(times) for mode, times in took.items()}
    size = steps[0].version.num_bytes
    yield Row("delta", f"  whole {of}", mb, 1e3 * median["whole"], "ms", 1e3 * size / line)
    goals: dict[str, float] = {"delta": 1 / 8} if line < 1e9 and case.rate <= 1e-6 else {}
    goals["auto"] = 1.03
    for mode in ("delta", "auto"):
        whole = 1e3 * median["whole"]
        what = f"  {mode} {of}, beside whole"
        yield Row(
            "delta", what, mb, 1e3 * median[mode], "ms", whole, goals.get(mode), is_at_most=True
        )
    sent = statistics.mean(moved["auto"]) / 1e6
    yield Row(
        "delta", "  auto: bytes moved, of the version", mb, sent, "MB", size / 1e6, 1.03, True
    )


def _get(node: subprocess.Popen[str], trainer: Node, step: Step, mode: str) -> dict[str, Any]:
    version, delta = step.version, step.delta
    trainer.publish(version)
    ticket = pull_ticket(trainer.secret, "node", version.policy_version)
    offer = PublishWeights(
        version.policy_version, version.digest, version.num_bytes,
        version.manifest_bytes(),
        (WeightsSource("trainer", tuple(trainer.addresses), ticket),),
    )  # fmt: skip
    offers: list[tuple[float, dict[str, Any]]] = [(0.0, asdict(offer))]
    if mode in ("delta", "auto") and delta is not None:
        trainer.publish(delta)
        size = delta.manifest_bytes()
        link = DeltaOffer(
            step.reported["base"], version.digest, delta.digest, size, delta.num_bytes
        )
        later = (step.encode_s, {**asdict(offer), "deltas": [asdict(link)]})
        offers = [(0.0, later[1])] if mode == "delta" else [*offers, later]
    assert node.stdin is not None
    assert node.stdout is not None
    node.stdin.write(json.dumps({"offers": offers}) + "\n")
    node.stdin.flush()
    return json.loads(node.stdout.readline())


@contextmanager
def _node(switch: network.Switch) -> Iterator[subprocess.Popen[str]]:
    module = "scripts.bench.weights_lib.delta_node"
    command = ["ip", "netns", "exec", switch.spaces[1], sys.executable, "-m", module]
    process = subprocess.Popen(
        [*command, "node", switch.hosts[1], f"bench-{os.getpid()}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.stdin.close()
        process.wait(10)
    finally:
        process.kill()
        process.wait()
