"""A pull over a line that is slower than the machine."""

import statistics
from collections.abc import Iterator

from scripts.bench.weights_lib import files, network
from scripts.bench.weights_lib.pull import seconds
from scripts.bench.weights_lib.table import Options, Row

LINES = (0.1e9, 1e9)  # bytes/s


def rows(options: Options) -> Iterator[Row]:
    if why := network.why_not():
        print(f"lines: not measured: {why}")
        return
    for line in LINES:
        mb = max(options.sizes)
        with files.folder() as folder, network.Switch(2, line).up() as switch:
            version = files.make(folder / "v1", mb)
            spaces = switch.spaces[0], switch.spaces[1]
            rate = dict[str, float]()
            for kind in ("alone", "portions", "pull"):
                times = [
                    seconds(kind, version, folder, options.streams, spaces, switch.hosts[0])
                    for _ in range(options.repeat if line > 5e8 else 1)
                ]
                rate[kind] = version.num_bytes / statistics.median(times) / 1e9
        of = f"on a line of {line / 1e9:g} GB/s"
        yield Row("lines", f"bare sockets {of}", mb, rate["alone"], "GB/s", line / 1e9)
        yield Row("lines", f"bare sockets and hash {of}", mb, rate["portions"], "GB/s", line / 1e9)
        if rate["portions"] > 0.98 * line / 1e9:
            yield Row("lines", f"pull {of}", mb, rate["pull"], "GB/s", line / 1e9, 0.97)
        else:  # the machine is slower than the line
            ceiling, what = rate["portions"], f"pull {of}, of sockets and hash"
            yield Row("lines", what, mb, rate["pull"], "GB/s", ceiling, 0.90)
