"""Versions to be served, and a server of them on loopback."""

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from lightrl.messages import Manifest
from lightrl.tickets import pull_ticket
from lightrl.weights import manifest as m
from lightrl.weights.pull import PullStats, WeightServer
from lightrl.weights.pull import pull as pull_as

SECRET = "c0ffee" * 6
NODE = "rollout-0"
TICKET = pull_ticket(SECRET, NODE, 1)
BUCKET = 1 << 18


def make_version(
    path: Path, policy_version: int = 1, num_buckets: int = 4, bucket: int = BUCKET
) -> Manifest:
    data = random.Random(policy_version).randbytes(bucket)
    tensors = [
        m.TensorBytes(f"layer.{i}", "uint8", (bucket,), memoryview(bytes([i]) + data[1:]))
        for i in range(num_buckets)
    ]
    return m.write_version(path, policy_version, tensors, bucket)


async def pull(
    manifest: Manifest,
    holders: Sequence[str],
    secret: str,
    path: Path,
    *,
    node: str = NODE,
    **options: Any,
) -> PullStats:
    """With the ticket of `node` for this version."""
    ticket = pull_ticket(secret, node, manifest.policy_version)
    return await pull_as(manifest, holders, ticket, path, node=node, **options)


@contextlib.asynccontextmanager
async def serving(manifest: Manifest, path: Path, **settings: float) -> AsyncIterator[str]:
    server = WeightServer(**settings)  # pyright: ignore[reportArgumentType]
    try:
        address = await server.start("127.0.0.1")
        server.publish(manifest, path, SECRET)
        yield address
    finally:
        await server.close()
