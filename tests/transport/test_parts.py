"""Messages cut into parts and put together again: whole, bounded, and nothing of a broken
connection."""

import random

import pytest

from lightrl.errors import ProtocolError
from lightrl.messages.responses import ResponseTokens, TokenChunk
from lightrl.transport.parts import HEADER, Assembly, cut, in_pieces
from lightrl.wire import MESSAGES


def test_what_was_cut_comes_out_whole_at_its_last_part():
    frame = random.Random(1).randbytes(10_001)
    assembly = Assembly(1 << 20)
    for number in (1, 2):
        *parts, last = [assembly.add(*part) for part in cut(frame, number, 1000)]
        assert parts == [None] * 10
        assert last == frame


def test_a_message_that_lacks_a_part_is_dropped_and_the_next_one_is_not():
    assembly = Assembly(1 << 20)
    old, new = list(cut(b"a" * 100, 7, 10)), list(cut(b"b" * 100, 8, 10))
    broken = [*old[:3], *old[4:], *new[:2], *old[2:]]
    assert [assembly.add(*part) for part in broken] == [None] * len(broken)
    assert [assembly.add(*part) for part in new][-1] == b"b" * 100


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (b"", b"x"),
        (bytes(HEADER.size), b""),
        (bytes(HEADER.size + 1), b"x"),
        (HEADER.pack(1, 0, 1001), b"x"),  # announces too much
        (HEADER.pack(1, 0, 1 << 63), b"x"),
        (HEADER.pack(1, 0, 3), b"more"),
    ],
)
def test_what_is_no_part_or_too_large_is_refused(header: bytes, part: bytes):
    with pytest.raises(ProtocolError):
        Assembly(1000).add(header, part)


@pytest.mark.parametrize("most", [2048, 10_000, 1 << 16])
def test_tokens_in_pieces_are_the_same_tokens(most: int):
    rng = random.Random(2)
    items = tuple(
        ResponseTokens(f"p{k}@0#é", 3, 5 * k, rng.randbytes(4 * n), rng.randbytes(4 * n), "stop")
        for k, n in enumerate([1, 30_000, 0, 700, *[3] * 200, 2000])
    )
    together: dict[str, list[ResponseTokens]] = {}
    for piece in in_pieces(TokenChunk(4, "d" * 64, items), most):
        assert len(MESSAGES.encode(piece)) <= most
        assert (piece.policy_version, piece.digest) == (4, "d" * 64)
        for item in piece.responses:
            together.setdefault(item.response, []).append(item)
    for item, parts in zip(items, together.values(), strict=True):
        assert b"".join(p.token_ids for p in parts) == item.token_ids
        assert b"".join(p.logprobs for p in parts) == item.logprobs
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["stop"]
        at = item.offset
        for p in parts:
            assert (p.response, p.attempt, p.offset) == (item.response, 3, at)
            at += len(p.token_ids) // 4
