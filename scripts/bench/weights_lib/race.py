"""From published to ready in two engines, each on a line of its own: by broadcast over gloo, and by
pull and load. Publishing is the same for both and not part of it."""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import write_tensors
from scripts.bench.weights_lib import files, network
from scripts.bench.weights_lib.nodes import Node, Process, nodes
from scripts.bench.weights_lib.table import Options, Row

LINES = (0.125e9, 1.25e9)  # bytes/s
MODULE = "scripts.bench.weights_lib.race_member"
HIDDEN = 1024


class Member(Process):
    """A rank or an engine in a network namespace."""

    def __init__(self, kind: str, space: str) -> None:
        super().__init__(kind, space, MODULE, kind)
        self.receive()


def rows(options: Options) -> Iterator[Row]:
    if why := network.why_not():
        print(f"race: not measured: {why}")
        return
    for line in LINES:
        with files.folder() as folder, network.Switch(3, line).up() as switch:
            version = make(folder / "v1.bin", options.joiners_mb)
            took = race(version, folder, switch, options)
        pull, broadcast = (statistics.median(took[kind]) for kind in ("pull", "broadcast"))
        mb, ideal = round(version.num_bytes / 1e6), version.num_bytes / line
        of = f"on lines of {line / 1e9:g} GB/s"
        yield Row("race", f"ready by pull {of}", mb, pull, "s", ideal)
        yield Row("race", f"ready by broadcast {of}", mb, broadcast, "s", ideal)
        yield Row("race", "  beside pull", mb, broadcast, "s", pull, 1.0, is_at_most=True)


def make(path: Path, mb: int) -> VersionFile:
    """Layers of a transformer in bfloat16."""
    torch.manual_seed(0)
    shapes = {"a.q": (HIDDEN, HIDDEN), "b.up": (4 * HIDDEN, HIDDEN), "c.norm": (HIDDEN,)}
    shapes |= {"a.o": (HIDDEN, HIDDEN), "b.down": (4 * HIDDEN, HIDDEN)}
    layers = mb * 10**6 // (2 * sum(torch.Size(s).numel() for s in shapes.values()))
    named = (
        (f"layers.{i:03}.{name}", torch.randn(shape).to(torch.bfloat16))
        for i in range(layers)
        for name, shape in shapes.items()
    )
    return write_tensors(path, 1, named)


def race(
    version: VersionFile, folder: Path, switch: network.Switch, options: Options
) -> dict[str, list[float]]:
    """Seconds until both engines were ready, in turn by each way."""
    took: dict[str, list[float]] = {"pull": [], "broadcast": []}
    with ExitStack() as stack:
        kinds = ("rank", "engine", "engine")
        members = [Member(k, s) for k, s in zip(kinds, switch.spaces, strict=True)]
        for member in members:
            stack.callback(member.kill)
        rank, *engines = members
        for engine in engines:
            engine.order(prepare=asdict(version))
            engine.receive()
        rank.order(open=switch.hosts[0], world=len(members))
        address = rank.receive()["address"]
        broadcast(version, address, rank, engines)  # the group forms
        given = zip(("trainer", "a", "b"), switch.hosts, switch.spaces, strict=True)
        world = stack.enter_context(nodes(*given))
        world[0].publish(version)
        for _ in range(options.repeat):
            took["broadcast"].append(broadcast(version, address, rank, engines))
            took["pull"].append(pull(version, folder, world, engines, options.streams))
    return took


def broadcast(version: VersionFile, address: str, rank: Member, engines: list[Member]) -> float:
    begun = time.monotonic()
    rank.order(send=asdict(version))
    for number, engine in enumerate(engines, 1):
        place = BroadcastGroup("race", address, number, 1 + len(engines), "gloo")
        engine.order(receive=asdict(version), place=asdict(place))
    for member in (rank, *engines):
        member.receive()
    return time.monotonic() - begun


def pull(
    version: VersionFile, folder: Path, world: list[Node], engines: list[Member], streams: int
) -> float:
    trainer, *pullers = world
    begun = time.monotonic()
    for node in pullers:
        others = [peer for peer in pullers if peer is not node]
        node.pull(version, folder / f"{node.name}.bin", [*others, trainer], streams)
    for node, engine in zip(pullers, engines, strict=True):
        node.stats()
        path = str(folder / f"{node.name}.bin")
        engine.order(load=asdict(replace(version, path=path)))
    for engine in engines:
        engine.receive()
    taken = time.monotonic() - begun
    for node in pullers:
        (folder / f"{node.name}.bin").unlink()
    return taken
