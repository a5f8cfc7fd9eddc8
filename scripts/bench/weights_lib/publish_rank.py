"""One rank of the benchmark: python -m scripts.bench.weights_lib.publish_rank RANK WORLD FOLDER MB
DTYPE REPEAT. Rank 0 prints a line of JSON."""

import json
import re
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.publish.publisher import Publisher, Shard
from lightrl.weights.version.layout import BUCKET_BYTES, bucket_range, num_buckets
from lightrl.weights.version.manifest import hash_bucket

CHANGED = 0.01  # of the elements


def shapes(num_elements: int) -> list[tuple[str, tuple[int, ...]]]:
    """An embedding of an eighth, layers of matrices and norms."""
    hidden = 1024
    rows = num_elements // 8 // hidden
    found: list[tuple[str, tuple[int, ...]]] = [("embed_tokens.weight", (rows, hidden))]
    layers = max(1, (num_elements - rows * hidden) // (12 * hidden * hidden))
    rows = (num_elements - rows * hidden) // layers // 3 // hidden
    for i in range(layers):
        found += [(f"layers.{i:02}.{name}.weight", (rows, hidden)) for name in "qkv"]
        found.append((f"layers.{i:02}.norm.weight", (hidden,)))
    return found


def shards(rank: int, world: int, mb: int, dtype: torch.dtype) -> list[Shard]:
    """Float32 master weights, of which each rank has as many rows."""
    made: list[Shard] = []
    for name, shape in shapes(mb * 1_000_000 // dtype.itemsize):
        rows = -(-shape[0] // world)
        stride = rows * prod(shape[1:])
        first = min(rank * stride, prod(shape))
        values = torch.randn(min(stride, prod(shape) - first))
        made.append(Shard(name, dtype, shape, values, first, stride))
    return made


def bare(rank: int, world: int, file: torch.Tensor, given: list[Shard]) -> None:
    """As many bytes copied, cast and hashed; nothing else is done."""
    at = rank * len(file) // world // 64 * 64
    for shard in given:
        for some in shard.values.split(BUCKET_BYTES // shard.dtype.itemsize):
            size = len(some) * shard.dtype.itemsize
            at = at if at + size <= len(file) else 0
            file[at : at + size].view(shard.dtype).copy_(some)
            at += size // 64 * 64
    dist.barrier()
    for bucket in range(rank, num_buckets(len(file)), world):
        start, end = bucket_range(bucket, len(file))
        hash_bucket(memoryview(file[start:end].numpy()))  # pyright: ignore[reportArgumentType]


def timed(act: Callable[[], object]) -> float:
    """Until all ranks are done."""
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


def anonymous_bytes() -> int:
    """Private memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    rank, world, folder, mb = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    dtype, repeat = getattr(torch, sys.argv[5]), int(sys.argv[6])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.FileStore(str(folder / "rendezvous"), world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    given = shards(rank, world, int(mb), dtype)
    publisher = Publisher(Buffers(folder / "versions"), rank, world)
    dist.barrier()
    before = anonymous_bytes()
    first_s = timed(lambda: publisher.write(0, given))
    publisher.allocate_second()
    publisher.write(1, given)
    took: dict[str, list[float]] = {"publish": [], "bare": [], "delta": []}
    # Of its own: what is published must stay what its digests say.
    file = torch.zeros_like(next(iter(publisher._mapped.values())))
    anonymous = anonymous_bytes() - before - len(file)
    for version in range(2, 2 + max(3, repeat)):
        for shard in given:
            changed = torch.randint(len(shard.values), (int(CHANGED * len(shard.values)),))
            shard.values[changed] *= 1.02
        took["publish"].append(timed(lambda v=version: publisher.write(v, given)))
        took["bare"].append(timed(lambda: bare(rank, world, file, given)))
        took["delta"].append(timed(publisher.write_delta))
    if rank == 0:
        reported = {"seconds": took, "first_s": first_s, "num_bytes": len(file)}
        print(json.dumps({**reported, "anonymous_bytes": anonymous}))


if __name__ == "__main__":
    main()
