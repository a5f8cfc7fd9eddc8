"""The sums that prove a broadcast: what they follow, and what they notice."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from lightrl.weights.broadcast.proof import BLOCK_BYTES, NUM_SUMS, Proof

SEED = bytes(range(32))


def bytes_of(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


def sums(data: torch.Tensor, offset: int = 0, at_once: int | None = 1) -> tuple[int, ...]:
    proof = Proof(SEED, blocks_at_once=at_once)
    proof.add(data, offset)
    return proof.sums()


def test_sums_are_those_of_the_definition():
    """Byte by byte in Python's own integers."""
    from blake3 import blake3

    from lightrl.weights.broadcast.proof import DIGITS

    data = bytes_of(2 * BLOCK_BYTES + 37)
    expected = [0] * NUM_SUMS
    blocks = blake3(b"blocks", key=SEED).digest(8 * NUM_SUMS * 3)
    digits = blake3(b"bytes", key=SEED).digest(BLOCK_BYTES * NUM_SUMS * DIGITS)
    for i, byte in enumerate(data.view(torch.int8).tolist()):
        block, j = divmod(i, BLOCK_BYTES)
        for s in range(NUM_SUMS):
            k = int.from_bytes(blocks[8 * (NUM_SUMS * block + s) :][:8], "little")
            of_byte = digits[DIGITS * (NUM_SUMS * j + s) :][:DIGITS]
            m = sum((d - 256 * (d > 127) >> 1) << 7 * n for n, d in enumerate(of_byte))
            expected[s] = (expected[s] + byte * k * m) % (1 << 64)
    assert sums(data) == tuple(expected)
    assert sums(data, at_once=None) == tuple(expected)


def test_products_of_matrices_are_exact_where_bytes_and_digits_are_largest():
    """By numbers all of whose digits are the least or the largest."""
    for digit in (-64, 63):
        for byte in (0x80, 0x7F, 0xFF):
            data = torch.full((2, BLOCK_BYTES), byte, dtype=torch.uint8).view(torch.int8)
            here, there = Proof(SEED), Proof(SEED, blocks_at_once=2)
            for proof in (here, there):
                proof._digits.fill_(digit)
            expected = data[0, 0].item() * digit * BLOCK_BYTES
            if here._is_here:  # else this CPU does them as a device
                assert (here._of_blocks_here(data, 0) == expected).all()
            assert (there._of_blocks(data, 0) == expected).all()


def test_a_cpu_that_cuts_products_of_bytes_off_makes_the_same_sums():
    """One without VNNI, as oneDNN takes this one for: of all members of a group some may be."""
    code = (
        "from tests.weights.test_proof import bytes_of, sums, BLOCK_BYTES;"
        "from lightrl.weights.broadcast import proof; assert proof._multiplies_exactly();"
        "print(sums(bytes_of(3 * BLOCK_BYTES + 5), at_once=None))"
    )
    older = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    said = subprocess.check_output([sys.executable, "-c", code], env=older, text=True, timeout=60)
    assert said.strip() == str(sums(bytes_of(3 * BLOCK_BYTES + 5)))


@pytest.mark.parametrize("offset", [0, 2, 64, BLOCK_BYTES - 6, 5 * BLOCK_BYTES])
def test_parts_in_any_order_and_cut_anywhere_add_up_in_each_way(offset):
    data = bytes_of(9 * BLOCK_BYTES + 1234)
    whole = sums(data, offset)
    assert sums(data, offset, at_once=4) == whole
    assert sums(data, offset, at_once=None) == whole
    cuts = [0, 1, 777, BLOCK_BYTES + 2, 5 * BLOCK_BYTES + 3, 5 * BLOCK_BYTES + 7, len(data)]
    parts = list(pairwise(cuts))
    proof = Proof(SEED, blocks_at_once=3)
    of_ranks = []
    for start, end in reversed(parts):
        proof.add(data[start:end], offset + start)
        of_ranks.append(sums(data[start:end].clone(), offset + start))
    assert proof.sums() == whole
    assert tuple(sum(s) % (1 << 64) for s in zip(*of_ranks, strict=True)) == whole


def test_sums_follow_a_difference():
    old, new = bytes_of(BLOCK_BYTES * 2 + 10), bytes_of(BLOCK_BYTES * 2 + 10)
    new[1000:1010] = 7
    new[-3:] = 1
    proof = Proof(SEED)
    proof.add(old, 0)
    for start, end in ((1000, 1010), (len(new) - 3, len(new))):
        proof.add(old[start:end], start, sign=-1)
        proof.add(new[start:end], start)
    assert proof.sums() == sums(new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_a_tensor_is_its_bytes(dtype):
    data = bytes_of(4096) % 2 if dtype == torch.bool else bytes_of(4096)
    assert sums(data.view(dtype).view(-1, 2), 128) == sums(data, 128)


def changed(data: torch.Tensor, *flips: tuple[int, int]) -> torch.Tensor:
    """With bit `bit` of byte `i` flipped for each (i, bit)."""
    data = data.clone()
    for i, bit in flips:
        data[i] ^= 1 << bit
    return data


def test_cancelling_flips_of_top_bits_are_noticed():
    """Two bytes of one block, of two blocks, four in a rectangle of two blocks; with sums of
    64-bit words instead of bytes every second pair would pass."""
    data = bytes_of(4 * BLOCK_BYTES)
    before = sums(data)
    for i in range(64):
        top = 8 * i + 7
        assert sums(changed(data, (top, 7), (top + 800, 7))) != before
        assert sums(changed(data, (top, 7), (top + BLOCK_BYTES, 7))) != before
        four = (top, top + 800, top + BLOCK_BYTES, top + 800 + BLOCK_BYTES)
        assert sums(changed(data, *((at, 7) for at in four))) != before


def test_each_sum_alone_notices_what_it_should():
    """No sum is a copy of another one, or blind: of each alone, no two of many versions agree."""
    data = bytes_of(4096)
    versions = [sums(changed(data, (i, 7))) for i in range(3, 4096, 16)]
    for s in range(NUM_SUMS):
        assert len({v[s] for v in versions}) == len(versions)
    assert all(len(set(v)) == NUM_SUMS for v in versions)


def test_a_moved_tensor_and_another_seed_give_other_sums():
    data = bytes_of(4096)
    assert sums(data, 64) != sums(data, 0)
    other = Proof(bytes(32))
    other.add(data, 0)
    assert other.sums() != sums(data, 0)


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        Proof(SEED).add(torch.zeros(4, 4).T, 0)
