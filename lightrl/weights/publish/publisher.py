"""Publish a version from the ranks of a trainer: each writes its own rows into one mapped file and
hashes its share of the buckets.

Owns the part of one rank. Nothing is gathered, and no tensor is created in another dtype than the
served one. `buffers.py` chooses the file, `version/layout.py` the places in it. Imports torch;
daemons must not import this.
"""

import contextlib
import math
import mmap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.errors import WeightsError
from lightrl.system.threads import num_cores
from lightrl.weights.publish.buffers import Buffers, Draft, draft_path
from lightrl.weights.publish.delta_writer import DeltaWriter
from lightrl.weights.publish.exchange import Exchange, Piece
from lightrl.weights.version.layout import (
    BUCKET_BYTES,
    TensorSpec,
    bucket_range,
    num_buckets,
    num_bytes,
    plan,
)
from lightrl.weights.version.manifest import (
    DIGEST_BYTES,
    AdapterManifest,
    Manifest,
    VersionFile,
    encode,
    hash_bucket,
)
from lightrl.weights.version.tensors import dtype_name

# The ranks agree so many times how far they are, less often for small versions.
STRETCHES = 16
STRETCH_BYTES = 16 << 20
MAX_THREADS = 32
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # for NaN and infinity
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; Python has no name for it


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one rank has: elements from `first` on, in the order of the whole.

    Example, of the second of two ranks: Shard("w", torch.bfloat16, (3, 4), <4 float32>, 8, 8)
    """

    name: str
    # of the served tensor
    dtype: torch.dtype
    # of the whole
    shape: tuple[int, ...]
    # 1-D, of any dtype, on any device
    values: Tensor
    first: int = 0
    # elements from where one rank's part begins to where the next one's does; 0: rank 0 has all
    stride: int = 0

    @property
    def numel(self) -> int:
        """The number of elements of the whole."""
        return math.prod(self.shape)


class Publisher:
    """Publishes a trainer's versions, on one of its ranks. Of several ranks, all call the same
    methods in the same order, and the default process group must have a backend for the CPU.
    """

    def __init__(
        self, buffers: Buffers, rank: int = 0, world: int = 1, num_local: int | None = None
    ) -> None:
        """`buffers`: of rank 0. The first `num_local` ranks, all by default, are on its machine and
        write to the file; each of the others sends to one of them.
        """
        self._buffers = buffers
        self._rank = rank
        self._world = world
        self._num_local = local = min(world, num_local or world)
        self._is_local = rank < local
        self._exchange = Exchange(rank, world, local) if local < world else None
        num_threads = max(1, min(MAX_THREADS, num_cores() // local))
        self._threads = ThreadPoolExecutor(num_threads, "weights-publish")
        # created by all ranks, in the same order
        group = dist.new_group(list(range(local)), backend="gloo") if local < world else None
        self._deltas = DeltaWriter(buffers.folder, rank, local, num_threads, group)
        # the last two that were published: their keys, and on rank 0 their files
        self._published: list[tuple[int, VersionFile | None]] = []
        self._mapped: dict[int, Tensor] = {}  # uint8, by the key of the file
        self._specs: tuple[TensorSpec, ...] = ()

    def publish(
        self, policy_version: int, shards: Sequence[Shard], base: str = ""
    ) -> VersionFile | None:
        """Write a version, of which these are this rank's shards. Rank 0 returns it when all ranks
        have written. `base`, on rank 0: the digest of the version that it adapts, if any.

        Raises OSError if there is no room for it, WeightsError for weights that are not finite,
        which no engine can sample from.
        """
        require_finite(policy_version, shards)
        self._specs = self._specs or plan(
            (shard.name, dtype_name(shard.dtype), shard.shape) for shard in shards
        )
        size = num_bytes(self._specs)
        draft = self._buffers.take(size) if self._rank == 0 else None
        try:
            key = self._map(draft, size)
            digests = self._write(self._mapped.get(key), size, shards)
        except BaseException:
            if draft is not None:
                self._buffers.give_back(draft)
            raise
        file: VersionFile | None = None
        if draft is not None:
            whole = Manifest(self._specs, size, digests)
            adapted = AdapterManifest(self._specs, size, digests, base)
            encoded = encode(adapted if base else whole)
            file = self._buffers.finish(draft, policy_version, encoded)
        self._published = [*self._published[-1:], (key, file)]
        return file

    def publish_delta(self) -> tuple[VersionFile, VersionFile] | None:
        """Rank 0 returns the version before the last, and the delta to the last one, whose file is
        the caller's; None if there is no delta that is small enough."""
        if len(self._published) < 2 or not self._is_local:
            return None
        (base, old), (target, new) = self._published
        views = [memoryview(_array(self._mapped[key])) for key in (base, target)]
        files = (old, new) if old and new else None
        delta = self._deltas.write(views[0], views[1], self._specs, files)
        return (old, delta) if old and delta else None

    def allocate_second(self) -> None:
        """Allocate the next version's file after the first version, so that the first step need
        not. Raises OSError if there is no room for it."""
        size = num_bytes(self._specs)
        lacks = self._rank == 0 and self._buffers.lacks_a_second()
        draft = self._buffers.take(size) if lacks else None
        try:
            self._map(draft, size)
            self._agree(0)  # the lock is kept until all ranks have mapped it
        finally:
            if draft is not None:
                self._buffers.give_back(draft)

    def close(self) -> None:
        self._threads.shutdown()
        self._mapped.clear()

    def _map(self, draft: Draft | None, size: int) -> int:
        """Map the file that rank 0 has taken, and return its key; -1 if it has none."""
        chosen = torch.tensor(-1 if draft is None else draft.key)
        if self._world > 1:
            dist.broadcast(chosen, 0)
        key = int(chosen)
        if not self._is_local:
            return key
        self._forget_removed()
        if key >= 0 and key not in self._mapped:
            with draft_path(self._buffers.folder, key).open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), size)
            self._touch(mapped)
            self._mapped[key] = torch.frombuffer(mapped, dtype=torch.uint8)
        return key

    def _forget_removed(self) -> None:
        """Unmap removed files, in threads: their memory is released by the last rank."""
        for key in self._mapped.keys() - self._buffers.keys():
            gone = [self._mapped.pop(key)]
            self._threads.submit(gone.clear)

    def _touch(self, mapped: mmap.mmap) -> None:
        """Allocate this rank's share of a new file's pages now, not when they are written."""
        pages = -(-len(mapped) // mmap.PAGESIZE)
        start = pages * self._rank // self._num_local * mmap.PAGESIZE
        end = pages * (self._rank + 1) // self._num_local * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # an old kernel: they come later
            mapped.madvise(_POPULATE_WRITE, start, min(end, len(mapped)) - start)

    def _write(self, file: Tensor | None, size: int, shards: Sequence[Shard]) -> bytes:
        """Write the shards. Rank 0 returns the digests of all buckets. Without a `file` this rank
        is on another machine and sends its shards.

        Each rank writes in the order of the file. Buckets that all of them have passed are hashed
        meanwhile.
        """
        digests = bytearray(DIGEST_BYTES * num_buckets(size))
        stretches = self._stretches(shards, size)
        if self._exchange is not None:
            self._exchange.plan([stretch.work for stretch in stretches])
        hashing: list[Future[None]] = []
        num_ready = 0  # buckets that all ranks have passed
        writing = self._submit(file, stretches[0].work)
        for i, following in enumerate([*stretches[1:], None]):
            if self._exchange is not None:
                self._exchange.carry_out(i, stretches[i].work, file)
            _finish(writing)
            if following is not None:
                writing = self._submit(file, following.work)
            passed = num_buckets(size) if following is None else following.begin
            ready = self._agree(passed)
            if file is not None:
                local = self._num_local
                share = [b for b in range(num_ready, ready) if b % local == self._rank]
                hashing += [self._threads.submit(_hash, file, bucket, digests) for bucket in share]
            num_ready = ready
        _finish(hashing)
        if self._world > 1:
            dist.reduce(torch.frombuffer(digests, dtype=torch.uint8), 0)
        return bytes(digests)

    def _stretches(self, shards: Sequence[Shard], size: int) -> list["_Stretch"]:
        """Split this rank's work into parts of equal bytes, as many as the other ranks have."""
        specs = {spec.name: spec for spec in self._specs}
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for shard in shards:
            for bucket, piece in _pieces(shard, specs[shard.name]):
                pieces[bucket].append(piece)
        number = max(1, min(STRETCHES, size // (self._world * STRETCH_BYTES)))
        total = sum(piece.num_bytes for some in pieces.values() for piece in some)
        stretches = [_Stretch(num_buckets(size), []) for _ in range(number)]
        done = 0
        for bucket in sorted(pieces):
            stretch = stretches[min(number - 1, done * number // max(1, total))]
            stretch.work.append(pieces[bucket])
            stretch.begin = min(stretch.begin, bucket)
            done += sum(piece.num_bytes for piece in pieces[bucket])
        for stretch, following in reversed(list(pairwise(stretches))):
            stretch.begin = min(stretch.begin, following.begin)  # of one without work
        return stretches

    def _submit(self, file: Tensor | None, work: list[list["Piece"]]) -> list[Future[None]]:
        if file is None:
            return []
        return [self._threads.submit(_copy, file, pieces) for pieces in work]

    def _agree(self, number: int) -> int:
        """Return the least of the numbers of all ranks."""
        if self._world == 1:
            return number
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


@dataclass(slots=True)
class _Stretch:
    begin: int  # no bucket before this one is written in this stretch, or in a later one
    work: list[list[Piece]]  # by bucket


def _pieces(shard: Shard, spec: TensorSpec) -> Iterator[tuple[int, Piece]]:
    """Cut a shard where buckets begin."""
    itemsize = shard.dtype.itemsize
    begin = spec.offset + shard.first * itemsize
    end = begin + shard.values.numel() * itemsize
    while begin < end:
        bucket = begin // BUCKET_BYTES
        stop = min(end, (bucket + 1) * BUCKET_BYTES)
        i = (begin - spec.offset) // itemsize - shard.first
        values = shard.values[i : i + (stop - begin) // itemsize]
        yield bucket, Piece(values, shard.dtype, begin)
        begin = stop


def _copy(file: Tensor, pieces: list[Piece]) -> None:
    """Cast on the device of the values."""
    with torch.no_grad():
        for piece in pieces:
            target = file[piece.offset : piece.offset + piece.num_bytes]
            target.view(piece.dtype).copy_(piece.values)


def _hash(file: Tensor, bucket: int, digests: bytearray) -> None:
    start, end = bucket_range(bucket, len(file))
    place = bucket * DIGEST_BYTES
    digests[place : place + DIGEST_BYTES] = hash_bucket(memoryview(_array(file[start:end])))


def _array(data: Tensor) -> Any:
    """An object with a buffer of the same bytes."""
    return data.numpy()


def _finish(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def require_finite(policy_version: int, shards: Sequence[Shard]) -> None:
    """Raises WeightsError, which names the first tensor, for NaN and for values that are infinite
    in the served dtype. One pass over the values, on their device."""
    shards = [s for s in shards if s.values.dtype in CHECKED and s.values.numel()]
    if not shards:
        return
    device = shards[0].values.device  # one transfer
    found = [torch.stack(torch.aminmax(s.values)).double().to(device) for s in shards]
    for shard, (low, high) in zip(shards, torch.stack(found).tolist(), strict=True):
        most = torch.finfo(shard.dtype).max if shard.dtype.is_floating_point else math.inf
        if not -most <= low <= high <= most:
            what = "NaN" if math.isnan(low) else f"a value beyond {dtype_name(shard.dtype)}"
            raise WeightsError(
                f"version {policy_version}: the weights are not finite: {shard.name} holds {what}"
            )
