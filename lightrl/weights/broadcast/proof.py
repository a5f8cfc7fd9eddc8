"""Sums by which all members of a broadcast see that they hold the same bytes, on any device.

Every 32-bit word of a version's file is multiplied by a secret 64-bit number of its own, and the
products are added up modulo 2^64, NUM_SUMS times with independent numbers. A sum is linear in the
bytes: parts may come in any order, sums over parts add up to the sum over the whole, and the sum
over a difference is the difference of the sums.

The number of word j of block b is K[b] * m[j]: both uniform, from BLAKE3 keyed by a seed that no
stranger knows. Why words of 32 bits: let two versions differ, by d != 0 (|d| < 2^32) in some words,
of which the one with the fewest trailing zero bits has v of them; v <= 31. Then e = sum of K[b]*d
over the blocks is 2^v times something uniform, for the right j, and m[j]*e + anything is zero with
probability (66-v)/2 * 2^-(64-v) < 2^-28 at most: two sums are equal for two different versions with
probability < 2^-57, whatever the difference is. Two flips of the top bit, for one, cancel only if
two numbers agree in 33 bits. With words of 64 bits they would in half of the cases.

This is MULTILINEAR of Lemire and Kaser, "Strongly universal string hashing is fast" (The Computer
Journal 57(11), 2014), with products of two keys so that a block needs no new ones: Carter and
Wegman's tree of universal hashes in its linear form. Good for one seed against who does not see the
sums; both go over encrypted channels. Imports torch; daemons must not import this.
"""

import queue
import threading
from types import TracebackType
from typing import Self

import torch
from blake3 import blake3

from lightrl.errors import WeightsError

NUM_SUMS = 2
SEED_BYTES = 32
BLOCK_WORDS = 1 << 11  # 32-bit words
BLOCK_BYTES = 4 * BLOCK_WORDS
MAX_WAITING = 4  # pieces that have come and are not added up yet
BLOCKS_AT_ONCE = 2048  # on a device: 16 MiB of weights
BLOCKS_HERE = 128  # on a CPU, in the cache of which they stay: at most, see `_add_blocks_here`
DIGITS = 4  # of 16 bits, in a number
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
        """`seed`: SEED_BYTES, known to the members only, used for one version. `blocks_at_once`:
        as on a device, also on a CPU; it changes the speed, not the sums."""
        self._seed = seed
        self.device = torch.device(device)
        self._is_here = self.device.type == "cpu" and blocks_at_once is None
        self._at_once = blocks_at_once or (BLOCKS_HERE if self._is_here else BLOCKS_AT_ONCE)
        # [NUM_SUMS, BLOCK_WORDS] int64, wrapping: sum over blocks of K[b] * word
        self._total = torch.zeros(NUM_SUMS, BLOCK_WORDS, dtype=torch.int64, device=device)
        if self._is_here:
            # the same by digits of K[b], which are to be added to it
            self._by_digit = torch.zeros(NUM_SUMS * DIGITS, BLOCK_WORDS, dtype=torch.int64)
            self._words = torch.empty(BLOCKS_HERE, BLOCK_WORDS, dtype=torch.float64)

    def add(self, tensor: torch.Tensor, offset: int, sign: int = 1) -> None:
        """Adds a contiguous tensor of any dtype whose bytes lie at `offset` in the version's file;
        sign -1 takes them away again. Raises ValueError if it is not contiguous."""
        if not tensor.is_contiguous():
            raise ValueError("not contiguous")
        data = tensor.detach().reshape(-1).view(torch.uint8).to(self.device)
        position, end = offset, offset + data.numel()
        while position < end:
            block, start = divmod(position, BLOCK_BYTES)
            num = min((end - position) // BLOCK_BYTES, self._at_once) if start == 0 else 0
            stop = position + num * BLOCK_BYTES if num > 1 else (block + 1) * BLOCK_BYTES
            stop = min(stop, end)
            part = data[position - offset : stop - offset]
            if num > 1 and _is_aligned(part):
                (self._add_blocks_here if self._is_here else self._add_blocks)(part, block, sign)
            else:
                stop = min((block + 1) * BLOCK_BYTES, end)
                self._add_part(part[: stop - position], block, start, sign)
            position = stop

    def sums(self) -> tuple[int, ...]:
        """NUM_SUMS numbers below 2^64."""
        numbers = blake3(b"words", key=self._seed).digest(8 * NUM_SUMS * BLOCK_WORDS)
        by_word = torch.frombuffer(bytearray(numbers), dtype=torch.int64).view(NUM_SUMS, -1)
        total = self._total
        if self._is_here:
            by_digit = self._by_digit.view(NUM_SUMS, DIGITS, BLOCK_WORDS)
            total = sum((by_digit[:, i] << 16 * i for i in range(DIGITS)), start=total)
        totals = (total * by_word.to(self.device)).sum(1)
        return tuple(total % (1 << 64) for total in totals.tolist())

    def _add_part(self, data: torch.Tensor, block: int, start: int, sign: int) -> None:
        """Bytes of one block, from byte `start` of it. A word of which only some bytes are here
        counts as if the others were zero: whoever has those adds the rest."""
        lead, first = start % 4, start // 4
        end = -(-(start + data.numel()) // 4)
        if lead or data.numel() % 4 or not _is_aligned(data):
            padded = torch.zeros(4 * (end - first), dtype=torch.uint8, device=self.device)
            padded[lead : lead + data.numel()] = data
            data = padded
        words = data.view(torch.int32).to(torch.int64)
        numbers = (sign * self._of_blocks(block, 1))[:, 0].tolist()
        for total, number in zip(self._total, numbers, strict=True):
            total[first:end].add_(words, alpha=number)

    def _add_blocks(self, data: torch.Tensor, block: int, sign: int) -> None:
        """As `_add_part` for whole blocks: few large operations, as a device wants them."""
        words = data.view(torch.int32).view(-1, BLOCK_WORDS).to(torch.int64)
        numbers = sign * self._of_blocks(block, len(words)).to(self.device)
        for total, of_blocks in zip(self._total, numbers, strict=True):
            total += (words * of_blocks[:, None]).sum(0)

    def _add_blocks_here(self, data: torch.Tensor, block: int, sign: int) -> None:
        """As `_add_blocks` by what a CPU does best: products of matrices of doubles. They are
        exact: digits are at most 2^15, words 2^31, both signed; 2^7 blocks make at most 2^53."""
        words = data.view(torch.int32).view(-1, BLOCK_WORDS)
        num = len(words)
        rest, digits = sign * self._of_blocks(block, num), []
        for _ in range(DIGITS):
            digits.append(((rest + (1 << 15)) & 0xFFFF) - (1 << 15))
            rest = (rest - digits[-1]) >> 16  # what it loses at the top is a multiple of 2^64
        numbers = torch.stack(digits, 1).view(-1, num).to(torch.float64)
        part = self._words[:num]
        part.copy_(words)
        self._by_digit += torch.mm(numbers, part).to(torch.int64)

    def _of_blocks(self, first: int, num: int) -> torch.Tensor:
        """K of these blocks for each sum: [NUM_SUMS, num] int64."""
        size = 8 * NUM_SUMS
        numbers = blake3(b"blocks", key=self._seed).digest(size * num, seek=size * first)
        return torch.frombuffer(bytearray(numbers), dtype=torch.int64).view(num, NUM_SUMS).T


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


def _is_aligned(data: torch.Tensor) -> bool:
    """Whether bytes can be seen as 32-bit words."""
    return data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
