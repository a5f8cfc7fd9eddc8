"""Versions to be served, a server of them on loopback, and pulls from it."""

import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightrl.messages.weights import WeightsSource
from lightrl.tickets import pull_ticket
from lightrl.weights.pull.connection import Wanted
from lightrl.weights.pull.transfer import Pull, PullLimits, PullStats
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES, bucket_range
from lightrl.weights.version.manifest import Manifest, VersionFile, hash_bucket
from lightrl.weights.version.write import TensorBytes, write_version

NODE = "rollout-0"


def make_version(
    path: Path, policy_version: int = 1, num_buckets: int = 4, bucket: int = BUCKET_BYTES
) -> VersionFile:
    """Of `num_buckets` tensors of `bucket` bytes, in `path`."""
    data = random.Random(policy_version).randbytes(bucket)
    tensors = [
        TensorBytes(f"layer.{i:04}", "uint8", (bucket,), memoryview(bytes([i % 256]) + data[1:]))
        for i in range(num_buckets)
    ]
    return write_version(path, policy_version, tensors)


def wanted(version: VersionFile) -> Wanted:
    size = version.manifest_bytes()
    return Wanted(version.policy_version, version.digest, version.num_bytes, size)


def source(
    server: WeightServer,
    node: str = NODE,
    policy_version: int = 1,
    *,
    name: str = "trainer",
    via: str | None = None,
) -> WeightsSource:
    """`server` as `node` is told of it, at another address if `via` says so."""
    ticket = pull_ticket(server.secret, node, policy_version)
    return WeightsSource(name, server.addresses if via is None else (via,), ticket)


async def pull(
    version: VersionFile,
    sources: Sequence[WeightsSource],
    path: Path,
    *,
    node: str = NODE,
    **options: Any,
) -> PullStats:
    limits = PullLimits(**{k: options.pop(k) for k in ("streams", "timeout_s") if k in options})
    one = Pull(wanted(version), node, path, limits=limits, **options)
    one.add_sources(sources)
    return await one.run()


@contextlib.asynccontextmanager
async def serving(*versions: VersionFile, **settings: float) -> AsyncIterator[WeightServer]:
    server = WeightServer(**settings)  # pyright: ignore[reportArgumentType]
    try:
        await server.start("127.0.0.1")
        for version in versions:
            server.serve(version)
        yield server
    finally:
        await server.close()


def wrong_buckets(data: memoryview, manifest: Manifest) -> Iterator[int]:
    """Buckets of a version's bytes that are not what the manifest says."""
    for i in range(manifest.num_buckets):
        start, end = bucket_range(i, manifest.num_bytes)
        if hash_bucket(data[start:end]) != manifest.digest_of(i):
            yield i
