"""Two ranks that publish, beside what copy, write and hash allow the same two processes."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from scripts.bench.weights_lib import files
from scripts.bench.weights_lib.nodes import ROOT
from scripts.bench.weights_lib.table import Options, Row

RANK = "scripts.bench.weights_lib.publish_rank"
WORLD = 2


def rows(options: Options) -> Iterator[Row]:
    for mb in options.sizes:
        for dtype in ("bfloat16", "float32"):
            took = measured(mb, dtype, options.repeat)
            size = took["num_bytes"]
            rate = {k: size / statistics.median(t) / 1e9 for k, t in took["seconds"].items()}
            what = f"two ranks, served in {dtype}"
            yield Row("publish", what, mb, rate["publish"], "GB/s", rate["bare"], 0.80)
            first = size / took["first_s"] / 1e9
            yield Row("publish", "  the first time, files made", mb, first, "GB/s")
            extra = took["anonymous_bytes"] / 1e6
            yield Row("publish", "  private memory of a rank grew by", mb, extra, "MB")
            if dtype == "bfloat16":
                yield Row("publish", "  difference found, 1 % changed", mb, rate["delta"], "GB/s")


def measured(mb: int, dtype: str, repeat: int) -> dict:
    """The report of rank 0."""
    with files.folder() as folder:
        words = [str(WORLD), str(folder), str(mb), dtype, str(repeat)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", RANK, str(rank), *words],
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(WORLD)
        ]
        reported = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return json.loads(reported[0])
