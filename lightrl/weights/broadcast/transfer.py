"""A version sent by training rank 0 to all engine workers of a group, bucket by bucket.

Owns the two sides of a broadcast. A bucket is that of a pull, with the digest that the manifest
has: what a worker received is checked as what a node pulled. Workers get whole tensors in the order
of the version's file, each with memory of its own: vLLM keeps references to what it has been given
until a layer is complete. Imports torch; daemons must not import this.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from lightrl.errors import WeightsError, first_line
from lightrl.weights.broadcast.group import WorkerGroup
from lightrl.weights.broadcast.membership import IN_FLIGHT, IsUnwanted
from lightrl.weights.version.layout import BUCKET_BYTES, TensorSpec, bucket_range
from lightrl.weights.version.manifest import Manifest, hash_bucket


def send(group: WorkerGroup, data: torch.Tensor, is_unwanted: IsUnwanted | None = None) -> None:
    """Rank 0's side: `data` is the version's file, as bytes.

    Returns when all buckets have been sent, not when they have arrived. Raises WeightsError, and
    the group is over; also as soon as `is_unwanted`.
    """
    pending: deque[Future[None]] = deque()
    for bucket in data.split(BUCKET_BYTES):
        on_device = bucket.to(group.device)
        pending.append(group.submit(partial(group.broadcast, on_device)))
        if len(pending) > 1:
            group.wait(pending.popleft(), is_unwanted)
    pending.append(group.submit(group.flush))
    for result in pending:
        group.wait(result, is_unwanted)


def receive(
    group: WorkerGroup, manifest: Manifest, is_unwanted: IsUnwanted | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A worker's side: all tensors, complete, in order, on the group's device.

    Each bucket is checked when it arrives. Raises WeightsError, and the group is over: tensors that
    were yielded before are then of no use. A consumer that stops early ends the group, too.
    """
    try:
        yield from _cut(manifest.tensors, _buckets(group, manifest, is_unwanted), group.device)
    except BaseException as e:
        group.abort(f"a member has left ({type(e).__name__})")
        if isinstance(e, RuntimeError | MemoryError):  # of memory or a device: not fatal
            raise WeightsError(f"broadcast: {first_line(e)}") from e
        raise


def _buckets(
    group: WorkerGroup, manifest: Manifest, is_unwanted: IsUnwanted | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset in the file, bytes) of each bucket; the bytes change when the next one is asked
    for."""
    num = manifest.num_buckets
    room = [
        torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=group.device)
        for _ in range(min(num, IN_FLIGHT))
    ]
    pending: deque[tuple[int, torch.Tensor, Future[None]]] = deque()

    def begin(i: int) -> None:
        start, end = bucket_range(i, manifest.num_bytes)
        bucket = room[i % len(room)][: end - start]
        pending.append((start, bucket, group.submit(partial(group.broadcast, bucket))))

    for i in range(len(room)):
        begin(i)
    for i in range(num):
        start, bucket, result = pending.popleft()
        group.wait(result, is_unwanted)
        received: Any = bucket.cpu().numpy()
        if hash_bucket(memoryview(received)) != manifest.digest_of(i):
            raise WeightsError(f"broadcast: bucket {i}: digest differs")
        yield start, bucket
        if group.device.type == "cuda":  # the consumer's copies are done before the next bucket
            torch.cuda.current_stream(group.device).synchronize()
        if i + len(room) < num:
            begin(i + len(room))
    group.wait(group.submit(group.flush), is_unwanted)


def _cut(
    tensors: Iterable[TensorSpec],
    buckets: Iterator[tuple[int, torch.Tensor]],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    offset, bucket = 0, torch.empty(0, dtype=torch.uint8, device=device)
    for spec in tensors:
        data = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)
        position, end = spec.offset, spec.offset + spec.num_bytes
        while position < end:
            while position >= offset + len(bucket):
                offset, bucket = next(buckets)
            part = bucket[position - offset : end - offset]
            data[position - spec.offset :][: len(part)] = part
            position += len(part)
        yield spec.name, data.view(getattr(torch, spec.dtype)).view(spec.shape)
    for _ in buckets:  # what is left passes it on
        pass
