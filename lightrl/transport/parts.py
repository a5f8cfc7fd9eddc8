"""Split messages larger than a frame, and assemble them.

Pure. ZeroMQ buffers a message of many frames as a whole, without any limit; so a large message is
sent as several messages, each with one part. Chunks of tokens are split into smaller chunks
instead, which need no assembly.

A part has two frames: HEADER and a piece of the message. Parts of one peer arrive in order. When
its connection breaks, parts may be missing, and the rest of that message is dropped.
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
    """Yield the parts of message `number`, of up to `most` bytes each."""
    for begin in range(0, len(frame), most):
        yield [HEADER.pack(number, begin, len(frame)), frame[begin : begin + most]]


class Assembly:
    """Assembles the parts of one peer's message."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._number = -1
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        """Bytes received of the current message."""
        return len(self._data)

    def add(self, header: bytes, part: bytes) -> bytes | None:
        """Add a part, and return the message if it was the last one.

        Raises ProtocolError if the message is too large or the frames are no part.
        """
        if len(header) != HEADER.size or not part:
            raise ProtocolError("not a part of a message")
        number, begin, size = HEADER.unpack(header)
        if size > self._max_bytes:
            raise ProtocolError(f"a message of {size} bytes exceeds {self._max_bytes}")
        if begin == 0:
            self._number, self._data = number, bytearray()
        if number != self._number or begin != len(self._data):
            self._data = bytearray()  # the connection broke in the middle of the message
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
    """Yield the tokens of `chunk` in chunks of up to `most` >= 2048 bytes on the wire.

    A long response continues in the next chunk.
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
    """Return the first `num_tokens` and the rest, or None if there is no rest."""
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
