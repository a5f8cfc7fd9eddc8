"""Many nodes that pull: `python -m tests.support.pullers ADDRESS SECRET FOLDER FIRST COUNT
TIMEOUT_S STREAMS`.

Pulls version 1 of `versions.make_version(..., *SHAPE)` into FOLDER for nodes nFIRST and so on, all
at once when its input ends. Prints a line before that, a line for each pull that fails and, at its
end, how long the slowest took, in seconds.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from lightrl.errors import WeightsError
from lightrl.messages.weights import WeightsSource
from lightrl.tickets import pull_ticket
from tests.support.versions import make_version, pull

SHAPE = (2, 32 << 10)  # tensors, bytes of each


async def main(
    address: str, secret: str, folder: Path, nodes: range, timeout_s: float, streams: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        version = make_version(Path(scratch) / "v1", 1, *SHAPE)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)

        async def one(k: int) -> float:
            sources = [WeightsSource("trainer", (address,), pull_ticket(secret, f"n{k}", 1))]
            options = {"node": f"n{k}", "timeout_s": timeout_s, "streams": streams}
            try:
                return (await pull(version, sources, folder / f"p{k}", **options)).seconds
            except WeightsError as e:
                print(f"n{k}: {e}", flush=True)
                return 0.0

        print(max(await asyncio.gather(*map(one, nodes))))


if __name__ == "__main__":
    address, secret, folder, first, count, timeout_s, streams = sys.argv[1:]
    nodes = range(int(first), int(first) + int(count))
    asyncio.run(main(address, secret, Path(folder), nodes, float(timeout_s), int(streams)))
