"""Eight nodes that pull the same version together, each on a line of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightrl.weights.version.manifest import VersionFile
from scripts.bench.weights_lib import files, network
from scripts.bench.weights_lib.nodes import Node, nodes
from scripts.bench.weights_lib.table import Options, Row

NUM = 8


class World:
    """A trainer and some nodes, none of which has anything."""

    def __init__(self, members: list[Node], version: VersionFile, folder: Path, streams: int):
        self.trainer, *self.nodes = members
        self.version, self._folder, self._streams = version, folder, streams
        self.trainer.publish(version)

    def begin(self, node: Node, peers: list[Node]) -> None:
        sources = [*(p for p in peers if p is not node), self.trainer]
        node.pull(self.version, self._folder / node.name, sources, self._streams)

    def finish(self, members: list[Node]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(members)) as threads:
            return list(threads.map(Node.stats, members))


def rows(options: Options) -> Iterator[Row]:
    if why := network.why_not():
        print(f"joiners: not measured: {why}")
        return
    mb = options.joiners_mb
    with files.folder() as folder:
        version = files.make(folder / "v1", mb)
        alone, _, _ = measure(options, version, folder, 1, one)
        ideal = version.num_bytes / options.line
        yield Row("joiners", "one alone, of the line", mb, ideal / alone, "share")
        taken, sent, _ = measure(options, version, folder, NUM, all_at_once)
        yield Row("joiners", "eight together", mb, taken, "s", alone, 1.3, is_at_most=True)
        yield Row(
            "joiners", "  sent by the trainer", mb, sent / 1e9, "GB",
            version.num_bytes / 1e9, 2.0, is_at_most=True,
        )  # fmt: skip
        taken, sent, late = measure(options, version, folder, NUM + 1, with_a_ninth)
        yield Row("joiners", "a ninth half-way", mb, late, "s", alone, 1.5, is_at_most=True)
        yield Row("joiners", "  the eight beside it", mb, taken, "s", alone)
        yield Row("joiners", "  sent by the trainer", mb, sent / 1e9, "GB", version.num_bytes / 1e9)
        taken, _, _ = measure(options, version, folder, NUM, one_killed)
        yield Row("joiners", "one killed half-way", mb, taken, "s", alone, 1.7, is_at_most=True)


def measure(
    options: Options,
    version: VersionFile,
    folder: Path,
    num: int,
    scenario: Callable[[World], tuple[float, float]],
) -> tuple[float, float, float]:
    """Seconds until all were done, bytes that the trainer sent, and figures of the scenario."""
    with network.Switch(num + 1, options.line).up() as switch:
        names = ["trainer", *(f"n{k}" for k in range(num))]
        given = zip(names, switch.hosts, switch.spaces, strict=True)
        with nodes(*given) as members:
            world = World(members, version, folder, options.streams)
            before = switch.sent_bytes(0)
            taken, own = scenario(world)
            sent = switch.sent_bytes(0) - before
    for name in names[1:]:
        for path in folder.glob(f"{name}*"):
            path.unlink()
    return taken, sent, own


def one(world: World) -> tuple[float, float]:
    return all_at_once(world)


def all_at_once(world: World) -> tuple[float, float]:
    for node in world.nodes:
        world.begin(node, world.nodes)
    stats = world.finish(world.nodes)
    return max(s["wall_s"] for s in stats), 0.0


def with_a_ninth(world: World) -> tuple[float, float]:
    *eight, ninth = world.nodes
    for node in eight:
        world.begin(node, eight)
    eight[0].until_proved(world.version.num_bytes // 2)
    world.begin(ninth, world.nodes)
    stats = world.finish(eight)
    taken = max(s["wall_s"] for s in stats)
    return taken, world.finish([ninth])[0]["wall_s"]


def one_killed(world: World) -> tuple[float, float]:
    for node in world.nodes:
        world.begin(node, world.nodes)
    killed, *others = world.nodes
    killed.until_proved(world.version.num_bytes // 2)
    killed.kill()
    return max(s["wall_s"] for s in world.finish(others)), 0.0
