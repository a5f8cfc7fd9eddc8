"""Messages that are larger than a frame may be: how they are cut, and put together again.

Pure. ZeroMQ takes a message of many frames in whole before it hands anything on, without any bound;
so a large message travels as several messages, each with one part. Tokens need no putting together:
they mean the same in pieces, and so no peer's tokens wait in memory for their rest.

A part is two frames: HEADER and up to so many bytes. Parts of one peer come in order. When its
connection breaks, parts may be missing: what is left of that message is dropped, as all is that was
under way.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace

from lightrl.errors import ProtocolError
from lightrl.messages.responses import ResponseTokens, TokenChunk

# number of the message, where in it the part begins, its size in bytes
HEADER = struct.Struct("<QQQ")

_TOKEN = 8  # bytes, with its logprob
_CHUNK_BYTES = 512  # of a chunk without its responses, at most
_ITEM_BYTES = 160  # of a response's tokens without these and its name, at most


def cut(frame: bytes, number: int, most: int) -> Iterator[list[bytes]]:
    """The parts of message `number`, with up to `most` bytes each."""
    for begin in range(0, len(frame), most):
        yield [HEADER.pack(number, begin, len(frame)), frame[begin : begin + most]]


class Assembly:
    """The message of one peer of which parts have come."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._number = -1
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        """That have come of it."""
        return len(self._data)

    def add(self, header: bytes, part: bytes) -> bytes | None:
        """The message, when this was its last part. Raises ProtocolError if it is too large, or no
        part."""
        if len(header) != HEADER.size or not part:
            raise ProtocolError("not a part of a message")
        number, begin, size = HEADER.unpack(header)
        if size > self._max_bytes:
            raise ProtocolError(f"a message of {size} bytes exceeds {self._max_bytes}")
        if begin == 0:
            self._number, self._data = number, bytearray()
        if number != self._number or begin != len(self._data):
            self._data = bytearray()  # the connection has broken in the middle of it
            self._number = -1
            return None
        if begin + len(part) > size:
            raise ProtocolError("a part beyond its message")
        self._data += part
        if len(self._data) < size:
            return None
        whole, self._data, self._number = bytes(self._data), bytearray(), -1
        return whole


def in_pieces(chunk: TokenChunk, most: int) -> Iterator[TokenChunk]:
    """The same tokens in chunks of up to `most` bytes each on the wire; a long response goes on in
    the next.

    `most` >= 2048.
    """
    piece: list[ResponseTokens] = []
    left = room = most - _CHUNK_BYTES
    for item in chunk.responses:
        overhead = _ITEM_BYTES + len(item.response.encode(errors="surrogatepass"))
        rest: ResponseTokens | None = item
        while rest is not None:
            if piece and left < min(overhead + len(rest.token_ids) * 2, room // 2):
                yield replace(chunk, responses=tuple(piece))
                piece, left = [], room
            num_tokens = max(1, (left - overhead) // _TOKEN)
            first, rest = _divided(rest, num_tokens)
            piece.append(first)
            left -= overhead + len(first.token_ids) * 2
    yield replace(chunk, responses=tuple(piece))


def _divided(item: ResponseTokens, num_tokens: int) -> tuple[ResponseTokens, ResponseTokens | None]:
    """The first `num_tokens`, and what follows them."""
    end = num_tokens * 4
    if len(item.token_ids) <= end:
        return item, None
    first = replace(
        item, token_ids=item.token_ids[:end], logprobs=item.logprobs[:end], finish_reason=None
    )
    rest = replace(
        item,
        offset=item.offset + num_tokens,
        token_ids=item.token_ids[end:],
        logprobs=item.logprobs[end:],
    )
    return first, rest
