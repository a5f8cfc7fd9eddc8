"""The pieces of a version that ranks of other machines send to the ranks at the file.

Owns the order of sending: each remote rank sends its pieces, cast to the served dtype, to one local
rank, bucket by bucket, so that at most a bucket is held twice. Imports torch; daemons must not
import this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """These values become the bytes of the file from `offset` on."""

    values: Tensor
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.dtype.itemsize


Work = Sequence[Sequence[Piece]]  # the pieces of each bucket


class Exchange:
    """Sends or receives the pieces of one rank. All ranks call `plan` for each version, then
    `carry_out` per stretch."""

    def __init__(self, rank: int, world: int, num_local: int) -> None:
        self._rank = rank
        self._is_local = rank < num_local
        self._partner = rank % num_local
        # ranks that send to this one
        self._senders = list(range(rank + num_local, world, num_local)) if self._is_local else []
        # by sender: (stretch, bucket in it, offset, bytes) of each piece
        self._plans: dict[int, list[tuple[int, int, int, int]]] = {}
        self._is_planned = False

    def plan(self, stretches: Sequence[Work]) -> None:
        """Exchange what will be sent. The layout is the same for all versions."""
        if self._is_planned:
            return
        self._is_planned = True
        if not self._is_local:
            mine = [
                (s, b, piece.offset, piece.num_bytes)
                for s, work in enumerate(stretches)
                for b, pieces in enumerate(work)
                for piece in pieces
            ]
            dist.send(torch.tensor(len(mine)), self._partner)
            if mine:
                dist.send(torch.tensor(mine), self._partner)
        for sender in self._senders:
            count = torch.tensor(0)
            dist.recv(count, sender)
            rows = torch.zeros((int(count), 4), dtype=torch.int64)
            if int(count):
                dist.recv(rows, sender)
            self._plans[sender] = [(a, b, c, d) for a, b, c, d in rows.tolist()]

    def carry_out(self, stretch: int, work: Work, file: Tensor | None) -> None:
        """Send or receive one stretch. Received pieces are written to `file`, bytes."""
        if file is None:
            for pieces in work:
                dist.send(torch.cat([_bytes_of(piece) for piece in pieces]), self._partner)
            return
        for sender in self._senders:
            buckets: dict[int, list[tuple[int, int]]] = {}
            for s, bucket, offset, size in self._plans[sender]:
                if s == stretch:
                    buckets.setdefault(bucket, []).append((offset, size))
            for places in buckets.values():
                received = torch.empty(sum(size for _, size in places), dtype=torch.uint8)
                dist.recv(received, sender)
                begin = 0
                for offset, size in places:
                    file[offset : offset + size] = received[begin : begin + size]
                    begin += size


def _bytes_of(piece: Piece) -> Tensor:
    """Cast on the device of the values."""
    with torch.no_grad():
        return piece.values.to(piece.dtype).cpu().contiguous().view(torch.uint8)
