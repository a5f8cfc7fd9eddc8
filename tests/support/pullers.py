"""Many nodes that pull: `python -m tests.support.pullers ADDRESS FOLDER FIRST COUNT TIMEOUT_S
STREAMS`.

Pulls version 1 of `versions.make_version(..., *SHAPE)` into FOLDER for nodes nFIRST and so on, all
at once when its input ends. Prints a line before that, a line for each pull that fails and, at its
end, how long the slowest took, in seconds.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from lightrl.errors import WeightsError
from tests.support.versions import SECRET, make_version, pull

SHAPE = (2, 32 << 10)  # buckets, bytes of each


async def main(address: str, folder: Path, nodes: range, timeout_s: float, streams: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        manifest = make_version(Path(file.name), 1, *SHAPE)

    async def one(k: int) -> float:
        options = {"node": f"n{k}", "timeout_s": timeout_s, "streams": streams}
        try:
            return (await pull(manifest, [address], SECRET, folder / f"p{k}", **options)).seconds
        except WeightsError as e:
            print(f"n{k}: {e}", flush=True)
            return 0.0

    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(max(await asyncio.gather(*map(one, nodes))))


if __name__ == "__main__":
    first, count = int(sys.argv[3]), int(sys.argv[4])
    nodes = range(first, first + count)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), nodes, float(sys.argv[5]), int(sys.argv[6])))
