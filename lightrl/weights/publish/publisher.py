"""How the ranks of a trainer make a version together: each writes its own rows into one mapped file
and hashes its share of the buckets.

Owns the writing side of a version, on one rank. Nothing is gathered, and no tensor is made in
another dtype than the one that is served. Which file it is, `buffers.py` knows; what lies where,
`version/layout.py`. Imports torch; daemons must not import this.
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

# So many times the ranks say how far they are, unless the version is so small that each would have
# written less in between.
STRETCHES = 16
STRETCH_BYTES = 16 << 20
MAX_THREADS = 32
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # which torch can compare
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; Python has no name for it


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a tensor: its elements from `first` on, in the order of the whole.

    Example, of the second of two ranks: Shard("w", torch.bfloat16, (3, 4), <4 float32>, 8, 8)
    """

    name: str
    # in which it is to be written
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
        """Of the whole."""
        return math.prod(self.shape)


class Publisher:
    """The files of a trainer's versions, on one of its ranks. With several, all of them call the
    same methods in the same order, and the default process group must have a backend for the CPU.
    """

    def __init__(
        self, buffers: Buffers, rank: int = 0, world: int = 1, num_local: int | None = None
    ) -> None:
        """`buffers`: rank 0 alone takes and names files. `num_local` ranks, the first, all by
        default, are on its machine and write to the file; each of the others sends to one of them.
        """
        self._buffers = buffers
        self._rank = rank
        self._world = world
        self._num_local = local = min(world, num_local or world)
        self._is_local = rank < local
        self._exchange = Exchange(rank, world, local) if local < world else None
        num_threads = max(1, min(MAX_THREADS, num_cores() // local))
        self._threads = ThreadPoolExecutor(num_threads, "weights-publish")
        # made by all ranks, in the same order
        group = dist.new_group(list(range(local)), backend="gloo") if local < world else None
        self._deltas = DeltaWriter(buffers.folder, rank, local, num_threads, group)
        # the last two that were published: their keys, and on rank 0 their files
        self._published: list[tuple[int, VersionFile | None]] = []
        self._mapped: dict[int, Tensor] = {}  # uint8, by the key of the file
        self._specs: tuple[TensorSpec, ...] = ()

    def publish(
        self, policy_version: int, shards: Sequence[Shard], base: str = ""
    ) -> VersionFile | None:
        """Writes a version, of which these are this rank's shards; on rank 0 it comes back when all
        ranks have done so. `base`, there: the digest of the version that it adapts, if any.

        Raises OSError if there is no room for it, WeightsError for what cannot be a version: no
        engine can sample from weights that are not finite.
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
        """On rank 0, if it pays: the version before the last, and what makes the last one of it,
        which is the caller's file."""
        if len(self._published) < 2 or not self._is_local:
            return None
        (base, old), (target, new) = self._published
        views = [memoryview(_array(self._mapped[key])) for key in (base, target)]
        files = (old, new) if old and new else None
        delta = self._deltas.write(views[0], views[1], self._specs, files)
        return (old, delta) if old and delta else None

    def allocate_second(self) -> None:
        """The next version's file, after the first version, so that the first step need not.

        Raises OSError if there is no room for it.
        """
        size = num_bytes(self._specs)
        lacks = self._rank == 0 and self._buffers.lacks_a_second()
        draft = self._buffers.take(size) if lacks else None
        try:
            self._map(draft, size)
            self._agree(0)  # it is locked as long as somebody may be at it
        finally:
            if draft is not None:
                self._buffers.give_back(draft)

    def close(self) -> None:
        self._threads.shutdown()
        self._mapped.clear()

    def _map(self, draft: Draft | None, size: int) -> int:
        """The key of the file that rank 0 has taken, now mapped; -1 if it has none."""
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
        """The memory of a file that is gone is there until the last rank gives it back, which takes
        a while."""
        for key in self._mapped.keys() - self._buffers.keys():
            gone = [self._mapped.pop(key)]
            self._threads.submit(gone.clear)

    def _touch(self, mapped: mmap.mmap) -> None:
        """Has this rank's share of a new file's pages made now, not when they are written."""
        pages = -(-len(mapped) // mmap.PAGESIZE)
        start = pages * self._rank // self._num_local * mmap.PAGESIZE
        end = pages * (self._rank + 1) // self._num_local * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # an old kernel: they come when they are written
            mapped.madvise(_POPULATE_WRITE, start, min(end, len(mapped)) - start)

    def _write(self, file: Tensor | None, size: int, shards: Sequence[Shard]) -> bytes:
        """Digests of all buckets, on rank 0; of those that this rank has hashed, on others. Without
        a `file` this rank is on another machine and sends what it has.

        Each rank writes in the order of the file. What all of them have passed is hashed while they
        go on.
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
        """This rank's work in so many parts of as many bytes that all ranks have as many."""
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
        """The least that any rank says, once all of them have said it."""
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
    """A shard, cut where buckets begin."""
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
    """What is on a device is cast there."""
    with torch.no_grad():
        for piece in pieces:
            target = file[piece.offset : piece.offset + piece.num_bytes]
            target.view(piece.dtype).copy_(piece.values)


def _hash(file: Tensor, bucket: int, digests: bytearray) -> None:
    start, end = bucket_range(bucket, len(file))
    place = bucket * DIGEST_BYTES
    digests[place : place + DIGEST_BYTES] = hash_bucket(memoryview(_array(file[start:end])))


def _array(data: Tensor) -> Any:
    """Something that has a buffer of the same bytes."""
    return data.numpy()


def _finish(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def require_finite(policy_version: int, shards: Sequence[Shard]) -> None:
    """Raises WeightsError, which names the first tensor, for NaN and for what is infinite in the
    dtype in which it is served. One pass over the values, on their device."""
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
