"""A pull with its proof beside what sockets and hash can do, on loopback or over a line."""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lightrl.weights.version.manifest import VersionFile
from scripts.bench.weights_lib import files
from scripts.bench.weights_lib.nodes import ROOT, nodes
from scripts.bench.weights_lib.table import Options, Row

HOST = "127.0.0.1"
BARE = "scripts.bench.weights_lib.bare"


def rows(options: Options) -> Iterator[Row]:
    for mb in options.sizes:
        with files.folder() as folder:
            version = files.make(folder / "v1", mb)
            took = {kind: list[float]() for kind in ("pull", "whole", "portions", "alone")}
            for _ in range(options.repeat):  # in turn, so that a busy moment hits all of them
                for kind, times in took.items():
                    times.append(seconds(kind, version, folder, options.streams))
            rate = {k: version.num_bytes / statistics.median(t) / 1e9 for k, t in took.items()}
        hashed = max(rate["whole"], rate["portions"])
        yield Row("pull", "bare sockets into the file", mb, rate["alone"], "GB/s")
        yield Row("pull", "  and a hash call for each bucket", mb, rate["whole"], "GB/s")
        yield Row("pull", "  and a hash, by portions", mb, rate["portions"], "GB/s")
        yield Row("pull", "pull, of sockets and hash", mb, rate["pull"], "GB/s", hashed, 0.90)
        yield Row("pull", "pull, of sockets alone", mb, rate["pull"], "GB/s", rate["alone"])


def seconds(
    kind: str,
    version: VersionFile,
    folder: Path,
    streams: int,
    spaces: tuple[str, str] = ("", ""),
    host: str = HOST,
) -> float:
    """Of one transfer from the first to the second network namespace."""
    if kind == "pull":
        with nodes(("trainer", host, spaces[0]), ("a", "0.0.0.0", spaces[1])) as (trainer, node):
            trainer.publish(version)
            node.pull(version, folder / "pulled", [trainer], streams)
            taken = node.stats()["stats"]["seconds"]
        (folder / "pulled").unlink()
        return taken
    inside = [["ip", "netns", "exec", space] if space else [] for space in spaces]
    bare = [sys.executable, "-m", BARE]
    serve = [*inside[0], *bare, "serve", version.path, host, str(streams)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        words = (host, port, str(streams), str(version.num_bytes), str(folder / "bare"), kind)
        receive = [*inside[1], *bare, "receive", *words]
        done = subprocess.run(receive, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    return float(done.stdout)
