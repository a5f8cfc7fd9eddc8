"""Write the delta between the last two versions of a trainer, on all its ranks.

Owns the part of one rank: it encodes its share of the buckets, by threads, and writes it to its
place in one file. Imports torch; daemons must not import this.
"""

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightrl.system.files import write_at
from lightrl.weights.delta.file import (
    MAX_DELTA_RATIO,
    DeltaManifest,
    encode_buckets,
    header,
    may_be_small,
    seal,
)
from lightrl.weights.version.layout import TensorSpec, num_buckets
from lightrl.weights.version.manifest import VersionFile

_TOO_LARGE = 1 << 50  # in place of a bucket's size


@dataclass(eq=False)
class DeltaWriter:
    """Encodes and writes the share of one rank. All ranks call `write` at the same time.

    `group`: of these ranks, if there are other ranks, too.
    """

    _folder: Path
    _rank: int
    _world: int
    _num_threads: int
    _group: Any = None

    def write(
        self,
        base: memoryview,
        target: memoryview,
        tensors: Sequence[TensorSpec],
        files: tuple[VersionFile, VersionFile] | None,
    ) -> VersionFile | None:
        """`files`, on rank 0: the versions in `base` and `target`. Rank 0 returns the delta, as a
        file of the newer version; None if it is too large, or there is no room for it."""
        if not may_be_small(base, target, tensors):
            return None  # on all ranks: they probe the same bytes
        count = num_buckets(len(target))
        share = range(count * self._rank // self._world, count * (self._rank + 1) // self._world)
        sizes = torch.zeros(count, dtype=torch.int64)
        most = int(MAX_DELTA_RATIO * len(target))
        parts: list[bytes] = []
        total = 0
        encoded = encode_buckets(base, target, tensors, share, self._num_threads)
        for bucket, part in zip(share, encoded, strict=True):
            parts.append(part)
            sizes[bucket] = len(part)
            total += len(part)
            if total > most:
                sizes[bucket] = _TOO_LARGE
                break
        self._sum(sizes)
        if not 0 < int(sizes.sum()) <= most:
            return None
        begin = b""
        if files is not None:
            digests = files[0].digest, files[1].digest
            begin = header(DeltaManifest(*digests, len(target), tuple(sizes.tolist())))
        path = self._place(begin, parts, sizes, share)
        if path is None or files is None:
            return None
        with contextlib.suppress(OSError):
            return _finish(path, files[1].policy_version)
        return None

    def _place(
        self, begin: bytes, parts: list[bytes], sizes: torch.Tensor, share: range
    ) -> Path | None:
        """Return the file when all ranks have written to it; None if there is no room for one.
        `begin`, on rank 0: the bytes before all parts."""
        key = -1
        if self._rank == 0:
            key = self._new_file(len(begin) + int(sizes.sum()), begin)
        place = torch.tensor([key, len(begin)])
        if self._world > 1:
            dist.broadcast(place, 0, group=self._group)
        key, length = (int(value) for value in place)
        if key < 0:
            return None
        path = self._draft(key)
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            offset = length + int(sizes[: share.start].sum())
            for part in parts:
                offset = write_at(descriptor, offset, part)
        finally:
            os.close(descriptor)
        self._sum(torch.zeros(1))  # all ranks have written
        return path

    def _new_file(self, size: int, begin: bytes) -> int:
        """Create the file and return its key; -1 if there is no room: the run does without it."""
        for left in self._folder.glob("draft.*.delta"):  # by processes that died
            left.unlink()
        key = secrets.randbits(60)
        path = self._draft(key)
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                file.write(begin)
        except OSError:
            path.unlink(missing_ok=True)
            return -1
        return key

    def _draft(self, key: int) -> Path:
        return self._folder / f"draft.{key:015x}.delta"

    def _sum(self, values: torch.Tensor) -> None:
        if self._world > 1:
            dist.all_reduce(values, group=self._group)


def _finish(draft: Path, policy_version: int) -> VersionFile:
    path = draft.with_name(draft.name.replace("draft", f"to_{policy_version}", 1))
    draft.rename(path)
    return seal(path, policy_version)
