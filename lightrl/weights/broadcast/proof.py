"""Sums by which all members of a broadcast see that they hold the same bytes, on any device.

Every byte of a version's file, as a signed number, is multiplied by a secret 64-bit number of its
own, and the products are added up modulo 2^64, NUM_SUMS times with independent numbers. A sum is
linear in the bytes: parts may come in any order, sums over parts add up to the sum over the whole,
and the sum over a difference is the difference of the sums.

The number of byte j of block b is K[b] * m[j]: uniform, K[b] of 64 bits and m[j] of 56, from BLAKE3
keyed by a seed that no stranger knows. Let two versions differ, by d != 0 (|d| < 2^8) in some
bytes, of which the one with the fewest trailing zero bits has v of them; v <= 7. Then e = sum of
K[b]*d over the blocks is 2^v times something uniform, for the right j, and m[j]*e + anything is
zero with probability 2^-56 + (66-v)/2 * 2^-(64-v) < 2^-52 at most: two sums are equal for two
different versions with probability < 2^-104, whatever the difference is. Two flips of the top bit
of bytes, for one, cancel only if two numbers agree in their low 57 bits. With words of 64 bits
instead of bytes they would in half of the cases.

Bytes, because a CPU multiplies matrices of bytes several times faster than anything larger; m[j] is
DIGITS such digits.

This is MULTILINEAR of Lemire and Kaser, "Strongly universal string hashing is fast" (The Computer
Journal 57(11), 2014), with products of two keys so that a block needs no new ones: Carter and
Wegman's tree of universal hashes in its linear form. Good for one seed against who does not see the
sums; both go over encrypted channels. Imports torch; daemons must not import this.
"""

import queue
import threading
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch
from blake3 import blake3

from lightrl.errors import WeightsError

NUM_SUMS = 2
BLOCK_BYTES = 1 << 13
MAX_WAITING = 4  # pieces that have come and are not added up yet
BLOCKS_AT_ONCE = 1024  # 8 MiB of weights
# Of m[j], signed: m[j] is the sum of digit[i] * 2^(DIGIT_BITS * i). Not of 8 bits, for CPUs without
# VNNI: they add up two products at a time in 16 bits, and those fit. Not ten of them, because a CPU
# does 16 columns at a time: it took half as long again.
DIGITS, DIGIT_BITS = 8, 7
# Products of two signed bytes, so many, add up exactly in a float32; on a device also in its
# matrix units, which round what they multiply to 8 bits at worst.
EXACT_BYTES = 1 << 9
_SEED_CONTEXT = "lightrl 2026 broadcast proof"


def proof_seed(group: str, policy_version: int) -> bytes:
    """Of the sums of one version, for the members of the group with this (secret) name."""
    said = f"{group}/{policy_version}".encode()
    return blake3(said, derive_key_context=_SEED_CONTEXT).digest()


class Proof:
    """The sums over what has been added so far. Not for several threads at a time."""

    def __init__(
        self, seed: bytes, device: torch.device | str = "cpu", blocks_at_once: int | None = None
    ) -> None:
        """`seed`: 32 bytes, known to the members only, used for one version. `blocks_at_once`:
        as on a device, also on a CPU; it changes the speed, not the sums."""
        self._seed = seed
        self.device = torch.device(device)
        is_here = self.device.type == "cpu" and blocks_at_once is None
        self._is_here = is_here and _multiplies_exactly()
        self._at_once = blocks_at_once or BLOCKS_AT_ONCE
        self._total = torch.zeros(NUM_SUMS, dtype=torch.int64, device=device)  # wrapping
        numbers = bytearray(blake3(b"bytes", key=seed).digest(BLOCK_BYTES * NUM_SUMS * DIGITS))
        digits = torch.frombuffer(numbers, dtype=torch.int8).view(BLOCK_BYTES, -1)
        digits >>= 8 - DIGIT_BITS
        if not self._is_here:
            digits = digits.to(self.device, torch.float32).view(-1, EXACT_BYTES, digits.shape[1])
        self._digits = digits
        values = torch.tensor([1 << DIGIT_BITS * i for i in range(DIGITS)], dtype=torch.int64)
        self._values = values.to(self.device)  # what each digit stands for

    def add(self, tensor: torch.Tensor, offset: int, sign: int = 1) -> None:
        """Adds a contiguous tensor of any dtype whose bytes lie at `offset` in the version's file;
        sign -1 takes them away again. Raises ValueError if it is not contiguous."""
        if not tensor.is_contiguous():
            raise ValueError("not contiguous")
        data = tensor.detach().reshape(-1).view(torch.int8).to(self.device)
        position, end = offset, offset + data.numel()
        while position < end:
            block, start = divmod(position, BLOCK_BYTES)
            num = min((end - position) // BLOCK_BYTES, self._at_once) if start == 0 else 0
            # whole blocks, or what is here of one
            size = num * BLOCK_BYTES or min(BLOCK_BYTES - start, end - position)
            part = data[position - offset :][:size].view(max(1, num), -1)
            of_blocks = self._of_blocks_here if self._is_here else self._of_blocks
            products = (of_blocks(part, start) * self._values).sum(2)
            numbers = sign * self._numbers(block, len(part)).to(self.device)
            self._total += (products * numbers).sum(0)
            position += size

    def sums(self) -> tuple[int, ...]:
        """NUM_SUMS numbers below 2^64."""
        return tuple(total % (1 << 64) for total in self._total.tolist())

    def _of_blocks_here(self, data: torch.Tensor, start: int) -> torch.Tensor:
        """Sums over the bytes of each block of the byte times each digit of its m[j], on a CPU.

        data: [blocks, bytes] int8, which begin at byte `start` of their blocks. Result: [blocks,
        NUM_SUMS, DIGITS] int64. Exact: 2^13 products of a byte and a digit make at most 2^26.
        """
        digits = self._digits[start : start + data.shape[1]]
        int_mm: Any = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
        return int_mm(data, digits).view(-1, NUM_SUMS, DIGITS).to(torch.int64)

    def _of_blocks(self, data: torch.Tensor, start: int) -> torch.Tensor:
        """As `_of_blocks_here`, by products that every device has, of matrices of float32."""
        if data.shape[1] < BLOCK_BYTES:
            padded = torch.zeros(len(data), BLOCK_BYTES, dtype=torch.int8, device=self.device)
            padded[:, start : start + data.shape[1]] = data
            data = padded
        by_part = data.to(torch.float32).view(len(data), -1, EXACT_BYTES).transpose(0, 1)
        of_parts = torch.bmm(by_part, self._digits)
        return of_parts.to(torch.int64).sum(0).view(-1, NUM_SUMS, DIGITS)

    def _numbers(self, first: int, num: int) -> torch.Tensor:
        """K of these blocks for each sum: [num, NUM_SUMS] int64."""
        size = 8 * NUM_SUMS
        numbers = blake3(b"blocks", key=self._seed).digest(size * num, seek=size * first)
        return torch.frombuffer(bytearray(numbers), dtype=torch.int64).view(num, NUM_SUMS)


@cache
def _multiplies_exactly() -> bool:
    """Whether matrices of bytes are multiplied as they are on this CPU, by this release of torch:
    seen with oneDNN for SSE 4.1, AVX2 and AVX-512, with and without VNNI."""
    int_mm: Any = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
    for byte in (-128, 127):
        for digit in (-(1 << DIGIT_BITS - 1), (1 << DIGIT_BITS - 1) - 1):
            data = torch.full((2, BLOCK_BYTES), byte, dtype=torch.int8)
            digits = torch.full((BLOCK_BYTES, NUM_SUMS * DIGITS), digit, dtype=torch.int8)
            if (int_mm(data, digits) != byte * digit * BLOCK_BYTES).any():
                return False
    return True


class AddedBeside:
    """Adds to a proof in a thread, beside what its caller does; torch lets the interpreter go
    meanwhile. On a device all of it is beside anyway, and there is no thread.

    `with AddedBeside(proof) as beside`: all is added at the end of the block, unless it ends with
    an exception. What goes wrong in the thread ends it with a WeightsError.
    """

    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        self._error: BaseException | None = None  # the end of the thread
        self._is_dropped = False  # what waits, as the block ends with an exception
        self._waiting: queue.SimpleQueue[tuple[torch.Tensor, int] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(MAX_WAITING)
        self._thread: threading.Thread | None = None
        if proof.device.type == "cpu":
            self._thread = threading.Thread(target=self._run, daemon=True, name="broadcast proof")

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def add(self, tensor: torch.Tensor, offset: int) -> None:
        """As `Proof.add`, soon; waits while MAX_WAITING others do. Raises WeightsError where one
        before has failed."""
        if self._thread is None:
            self._proof.add(tensor, offset)
            return
        if self._error is None:
            self._room.acquire()
        self._require_no_error()
        self._waiting.put((tensor, offset))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._is_dropped = error is not None
        self._waiting.put(None)
        self._thread.join()
        if error is None:
            self._require_no_error()

    def _require_no_error(self) -> None:
        if (e := self._error) is not None:
            what = f"{type(e).__name__}: {e}".splitlines()[0]
            raise WeightsError(f"broadcast: the sums cannot be made: {what}") from e

    def _run(self) -> None:
        try:
            # what the caller made in that mode may be changed in that mode only
            with torch.inference_mode():
                while (given := self._waiting.get()) is not None:
                    if not self._is_dropped:
                        self._proof.add(*given)
                    del given
                    self._room.release()
        except BaseException as e:  # whatever it is: the caller waits for us
            self._error = e
            raise
        finally:
            self._room.release()
