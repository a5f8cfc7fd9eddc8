"""Who sends what in a broadcast, and in which order: the same list on all sides, from nothing but
the tensors and the number of training ranks.

Owns the order and the sizes. Pure; must not import torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lightrl.weights.version.layout import BUCKET_BYTES, TensorSpec

# Parts from this size on are sent from and into the tensor itself; smaller ones share a buffer,
# which costs a copy and saves operations.
DIRECT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one tensor. Example: Part(tensor=3, start=0, end=1024), of tensors[3]."""

    tensor: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """One operation: the training rank that sends, and what, back to back."""

    root: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def rows(length: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """(first, end) of the rows that a rank holds, as torch.chunk and so FSDP2 divide them: the
    last ranks may have fewer, or none."""
    chunk = -(-length // num_ranks)
    return min(rank * chunk, length), min((rank + 1) * chunk, length)


def byte_range(tensor: TensorSpec, rank: int, num_ranks: int) -> tuple[int, int]:
    """(start, end) in bytes of what a rank sends of this tensor. A scalar is rank 0's."""
    if not tensor.shape:
        return (0, tensor.num_bytes) if rank == 0 else (tensor.num_bytes, tensor.num_bytes)
    first, end = rows(tensor.shape[0], rank, num_ranks)
    row = tensor.num_bytes // max(1, tensor.shape[0])
    return first * row, end * row


def schedule(
    tensors: Sequence[TensorSpec], num_ranks: int, piece_bytes: int = BUCKET_BYTES
) -> Iterator[Piece]:
    """All pieces in the order in which every member takes part in them.

    Tensor after tensor, so that a receiver completes them in order and holds few at a time; within
    a batch of tensors the ranks take turns, so that more than one line is busy.
    """
    batch: list[int] = []
    size = 0
    for i, tensor in enumerate(tensors):
        if batch and size + tensor.num_bytes > piece_bytes * num_ranks:
            yield from _pieces(tensors, batch, num_ranks, piece_bytes)
            batch, size = [], 0
        batch.append(i)
        size += tensor.num_bytes
    yield from _pieces(tensors, batch, num_ranks, piece_bytes)


def _pieces(
    tensors: Sequence[TensorSpec], batch: list[int], num_ranks: int, piece_bytes: int
) -> Iterator[Piece]:
    by_rank = [
        _cut(rank, [Part(i, *byte_range(tensors[i], rank, num_ranks)) for i in batch], piece_bytes)
        for rank in range(num_ranks)
    ]
    for turn in zip_longest(*by_rank):
        yield from (piece for piece in turn if piece is not None)


def _cut(root: int, parts: list[Part], piece_bytes: int) -> Iterator[Piece]:
    packed: list[Part] = []
    size = 0
    for part in parts:
        is_direct = part.num_bytes >= min(DIRECT_BYTES, piece_bytes)
        if packed and (is_direct or size + part.num_bytes > piece_bytes):
            yield Piece(root, tuple(packed))
            packed, size = [], 0
        if is_direct:
            for start in range(part.start, part.end, piece_bytes):
                end = min(start + piece_bytes, part.end)
                yield Piece(root, (Part(part.tensor, start, end),))
        elif part.num_bytes:
            packed.append(part)
            size += part.num_bytes
    if packed:
        yield Piece(root, tuple(packed))
