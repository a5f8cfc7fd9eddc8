"""A version sent by all training ranks to all engine workers of a group: each rank its own rows.

Owns the two sides of a broadcast and the memory on its way; the order comes from pieces.py, the
operations from group.py. With gloo a piece goes from the rank that has it to the first receiver,
and from each receiver to the next while others come: over each line once in each direction. NCCL
does the like itself. Receivers get whole tensors in the order of the version's file, each with
memory of its own: vLLM keeps references to what it has been given until a layer is complete.
Imports torch; daemons must not import this.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from lightrl.errors import WeightsError, first_line
from lightrl.weights.broadcast.group import Group
from lightrl.weights.broadcast.pieces import Piece, byte_range, schedule
from lightrl.weights.broadcast.proof import AddedBeside, Proof
from lightrl.weights.broadcast.rendezvous import IsUnwanted
from lightrl.weights.version.layout import TensorSpec

IN_FLIGHT = 6  # pieces at a time, in each direction: small ones keep the line busy

# From this size on memory is asked for in large pages: to get it in small ones takes as long as to
# receive into it.
HUGE_BYTES = 4 << 20
REUSED_BYTES = 1 << 20  # from this size on
KEPT_BYTES = 128 << 20  # at most

# What a rank holds of tensors[i]: its rows, in the dtype that is served.
Rows = Callable[[int], torch.Tensor]


def send(
    group: Group,
    tensors: Sequence[TensorSpec],
    rows: Rows,
    proof: Proof | None = None,
    is_unwanted: IsUnwanted | None = None,
) -> None:
    """A training rank's side. Returns when all pieces have been sent, not when they have arrived.

    `rows` is asked once for each tensor of which this rank has any, in order; what it returns must
    not change until this returns. Adds all of it to `proof`, beside, piece by piece: the sums are
    complete at the end. Raises WeightsError, and the group is over; also where `is_unwanted` says
    so, which is asked several times a second.
    """
    with _Ending(group), _beside(proof) as beside:
        spare = [
            torch.empty(group.piece_bytes, dtype=torch.uint8, device=group.device)
            for _ in range(IN_FLIGHT if group.num_ranks > 1 and not group.is_chain else 0)
        ]
        mine = _Mine(group, tensors, rows)
        works: deque[Any] = deque()
        for i, piece in enumerate(schedule(tensors, group.num_ranks, group.piece_bytes)):
            is_mine = piece.root == group.rank
            if group.is_chain and not is_mine:
                continue
            if len(works) == IN_FLIGHT:
                group.wait(works.popleft(), is_unwanted)
            # what other ranks send is nothing to this one
            data = mine.data(piece, beside) if is_mine else spare[i % IN_FLIGHT][: piece.num_bytes]
            if group.is_chain:
                works.append(group.send(data, group.num_ranks, i))
            else:
                works.append(group.broadcast(data, piece.root))
        for work in works:
            group.wait(work, is_unwanted)


def receive(
    group: Group,
    tensors: Sequence[TensorSpec],
    proof: Proof | None = None,
    is_unwanted: IsUnwanted | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """An engine worker's side: all tensors, complete, in order, on the group's device.

    Adds each piece to `proof` as it comes, while it is in the cache, beside what else is done; the
    sums are complete at the end, and only then is it known whether they are right. A consumer must
    not write to a tensor meanwhile. Raises WeightsError, and the group is over: what has been given
    out is then of no use. A consumer that stops in the middle ends the group, too, and so does one
    that says meanwhile that it is unwanted.
    """
    with _Ending(group), _beside(proof) as beside:
        yield from _received(group, tensors, beside, is_unwanted)


def _beside(proof: Proof | None) -> AbstractContextManager[AddedBeside | None]:
    return nullcontext() if proof is None else AddedBeside(proof)


def _received(
    group: Group,
    tensors: Sequence[TensorSpec],
    beside: AddedBeside | None,
    is_unwanted: IsUnwanted | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    coming = _Coming(group, tensors, beside)
    works: deque[tuple[Any, int, Piece, torch.Tensor]] = deque()
    onward: deque[Any] = deque()
    pieces = enumerate(schedule(tensors, group.num_ranks, group.piece_bytes))
    given = 0
    while True:
        while len(works) < IN_FLIGHT and (numbered := next(pieces, None)) is not None:
            i, piece = numbered
            data = coming.data(piece)
            works.append((_come(group, data, piece.root, i), i, piece, data))
        if not works:
            break
        work, i, piece, data = works.popleft()
        group.wait(work, is_unwanted)
        if group.is_chain and group.rank + 1 < group.world:
            if len(onward) == IN_FLIGHT:
                group.wait(onward.popleft(), is_unwanted)
            onward.append(group.send(data, group.rank + 1, i))
        coming.arrived(piece, data)
        while given < len(tensors) and coming.is_complete(given):
            yield tensors[given].name, coming.take(given)
            given += 1
    for i in range(given, len(tensors)):  # those without a byte, at the end
        yield tensors[i].name, coming.take(i)
    for work in onward:
        group.wait(work, is_unwanted)


def _come(group: Group, data: torch.Tensor, root: int, tag: int) -> Any:
    if not group.is_chain:
        return group.broadcast(data, root)
    source = root if group.rank == group.num_ranks else group.rank - 1
    return group.receive(data, source, tag)


class _Ending:
    """Whatever ends a transfer before its end ends the group: others may be waiting. What torch
    raises where memory or a device fails it becomes a WeightsError: the process goes on."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        if self._group.over is not None:
            raise WeightsError(f"broadcast: {self._group.over}")

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            return
        self._group.abandon(f"member {self._group.rank} has left ({kind.__name__})")
        if isinstance(error, RuntimeError | MemoryError):
            raise WeightsError(f"broadcast: {first_line(error)}") from error


class _Mine:
    """What this rank sends."""

    def __init__(self, group: Group, tensors: Sequence[TensorSpec], rows: Rows) -> None:
        self._group, self._tensors, self._rows = group, tensors, rows
        self._last: tuple[int, torch.Tensor] | None = None

    def data(self, piece: Piece, beside: AddedBeside | None) -> torch.Tensor:
        parts = [self._part(part.tensor, part.start, part.end) for part in piece.parts]
        if beside is not None:
            for part, data in zip(piece.parts, parts, strict=True):
                beside.add(data, self._tensors[part.tensor].offset + part.start)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, index: int, start: int, end: int) -> torch.Tensor:
        spec = self._tensors[index]
        first, last = byte_range(spec, self._group.rank, self._group.num_ranks)
        if self._last is None or self._last[0] != index:
            tensor = self._rows(index).detach().to(self._group.device).contiguous()
            data = tensor.reshape(-1).view(torch.uint8)
            if data.numel() != last - first or tensor.dtype != getattr(torch, spec.dtype):
                raise WeightsError(
                    f"broadcast: {spec.name}: {data.numel()} bytes of {tensor.dtype}, "
                    f"not {last - first} of {spec.dtype}"
                )
            self._last = (index, data)
        return self._last[1][start - first : end - first]


class _Coming:
    """The tensors that are on their way here."""

    def __init__(
        self, group: Group, tensors: Sequence[TensorSpec], beside: AddedBeside | None
    ) -> None:
        self._device, self._tensors, self._beside = group.device, tensors, beside
        self._memory = _Memory()
        self._data: dict[int, torch.Tensor] = {}
        self._missing: dict[int, int] = {}  # bytes

    def data(self, piece: Piece) -> torch.Tensor:
        """Where a piece goes: into the tensor itself, or a buffer if it has several."""
        for part in piece.parts:
            self._begin(part.tensor)
        if len(piece.parts) == 1:
            [part] = piece.parts
            return self._data[part.tensor][part.start : part.end]
        return self._bytes(piece.num_bytes)

    def arrived(self, piece: Piece, data: torch.Tensor) -> None:
        position = 0
        for part in piece.parts:
            if len(piece.parts) > 1:
                self._data[part.tensor][part.start : part.end] = data[
                    position : position + part.num_bytes
                ]
                position += part.num_bytes
            if self._beside is not None:
                came = self._data[part.tensor][part.start : part.end]
                self._beside.add(came, self._tensors[part.tensor].offset + part.start)
            self._missing[part.tensor] -= part.num_bytes

    def is_complete(self, index: int) -> bool:
        return self._missing.get(index, self._tensors[index].num_bytes) == 0

    def take(self, index: int) -> torch.Tensor:
        self._begin(index)
        spec = self._tensors[index]
        del self._missing[index]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return self._data.pop(index).view(dtype).view(spec.shape)

    def _begin(self, index: int) -> None:
        if index not in self._data:
            self._missing[index] = self._tensors[index].num_bytes
            self._data[index] = self._bytes(self._missing[index])

    def _bytes(self, size: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return self._memory.take(size)
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class _Memory:
    """Of tensors on a CPU. What nobody holds any more is given out again, for a tensor of the same
    size, as layers repeat: to get new memory takes a third as long as to receive into it."""

    def __init__(self) -> None:
        # each with the last view of it, which its tensor alone holds
        self._kept: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []
        self._size = 0

    def take(self, size: int) -> torch.Tensor:
        if size < REUSED_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        for i, (memory, last) in enumerate(self._kept):
            if len(memory) == size and last() is None:
                view = memoryview(memory)
                self._kept[i] = (memory, weakref.ref(view))
                return torch.frombuffer(view, dtype=torch.uint8)
        try:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise WeightsError(f"broadcast: no memory for a tensor of {size} bytes: {e}") from e
        if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        if self._size + size <= KEPT_BYTES:
            self._kept.append((memory, weakref.ref(view)))
            self._size += size
        return torch.frombuffer(view, dtype=torch.uint8)
