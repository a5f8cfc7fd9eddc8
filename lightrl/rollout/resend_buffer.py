"""Tokens that may have to be sent again: those of running responses, and of recently finished ones.

Owns which attempts a node has in full. Sends nothing: the coordinator drops the tokens that it has,
and aborts what it does not want.

A running attempt is kept from its first token. A finished one is kept until the next version is
loaded: by then the coordinator has received it. While the connection is broken it is kept as long
as it may be trained.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from lightrl.messages.fields import MAX_RESPONSES
from lightrl.messages.responses import FinishReason, ResponseRequest, ResponseTokens, TokenChunk

MAX_FINISHED_BYTES = 256 << 20  # beyond that, the first to finish is dropped
CHUNK_BYTES = 4 << 20  # of one message, about, so that no event loop is blocked


@dataclass(slots=True)
class _Piece:
    """Consecutive tokens of one response under one version, the `load`-th of this node."""

    load: int
    version: int
    digest: str
    offset: int
    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Attempt:
    attempt: int
    pieces: list[_Piece] = field(default_factory=list["_Piece"])
    # None: running
    finish_reason: FinishReason | None = None
    num_cached: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(p.token_ids) + len(p.logprobs) for p in self.pieces)


class ResendBuffer:
    """The attempts of one node, the newest of each response."""

    def __init__(self, max_staleness: int, max_finished_bytes: int = MAX_FINISHED_BYTES) -> None:
        self._max_staleness = max_staleness
        self._max_finished_bytes = max_finished_bytes
        self._running: dict[str, _Attempt] = {}
        self._finished: dict[str, _Attempt] = {}  # the first to finish first
        self._finished_bytes = 0
        self._num_loads = 0

    def start(self, requests: Iterable[ResponseRequest]) -> None:
        """Start attempts. A request that comes twice changes nothing."""
        for r in requests:
            running = self._running.get(r.response)
            if running is None or running.attempt < r.attempt:
                self._forget_finished(r.response)
                self._running[r.response] = _Attempt(r.attempt)

    def add(self, chunk: TokenChunk) -> None:
        """Keep the tokens of a chunk; attempts that were dropped are skipped."""
        for item in chunk.responses:
            kept = self._running.get(item.response)
            if kept is None or kept.attempt != item.attempt:
                continue
            if not kept.pieces or kept.pieces[-1].load != self._num_loads:
                piece = _Piece(self._num_loads, chunk.policy_version, chunk.digest, item.offset)
                kept.pieces.append(piece)
            kept.pieces[-1].token_ids += item.token_ids
            kept.pieces[-1].logprobs += item.logprobs
            if item.finish_reason is not None:
                kept.num_cached = item.num_cached
                self._finish(item.response, item.finish_reason)

    def forget(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Drop attempts that the coordinator does not want."""
        for response, attempt in attempts:
            if (kept := self._running.get(response)) is not None and kept.attempt == attempt:
                del self._running[response]
            if (kept := self._finished.get(response)) is not None and kept.attempt == attempt:
                self._forget_finished(response)

    def end_all(self) -> None:
        """The engine has died: running attempts end as aborted, with the tokens that arrived."""
        for response, kept in list(self._running.items()):
            if kept.pieces:
                self._finish(response, "abort")
            else:
                del self._running[response]

    def loaded(self, version: int, is_connected: bool) -> None:
        """The engine has loaded a version; `is_connected`: all finished attempts were sent."""
        self._num_loads += 1
        oldest = version - self._max_staleness
        for response, kept in list(self._finished.items()):
            if is_connected or not all(oldest <= p.version <= version for p in kept.pieces):
                self._forget_finished(response)

    def unacked(self) -> tuple[tuple[str, int], ...]:
        """(response, attempt) of all attempts that run, or whose end is in `chunks`.

        Running ones come first: the coordinator may have no room for all, and a Hello has room for
        MAX_RESPONSES.
        """
        kept = islice((self._running | self._finished).items(), MAX_RESPONSES)
        return tuple((r, a.attempt) for r, a in kept)

    def chunks(self) -> list[TokenChunk]:
        """All tokens that are kept, those of each response in order."""
        items: dict[tuple[int, int, str], list[ResponseTokens]] = {}
        for response, kept in (self._finished | self._running).items():
            for piece in kept.pieces:
                is_last = piece is kept.pieces[-1]
                item = ResponseTokens(
                    response,
                    kept.attempt,
                    piece.offset,
                    bytes(piece.token_ids),
                    bytes(piece.logprobs),
                    kept.finish_reason if is_last else None,
                    kept.num_cached if is_last else None,
                )
                items.setdefault((piece.load, piece.version, piece.digest), []).append(item)
        return [
            TokenChunk(version, digest, tuple(part))
            for (_, version, digest), of_version in sorted(items.items())
            for part in _parts(of_version)
        ]

    def _finish(self, response: str, reason: FinishReason) -> None:
        kept = self._running.pop(response)
        kept.finish_reason = reason
        self._finished[response] = kept
        self._finished_bytes += kept.num_bytes
        while self._finished_bytes > self._max_finished_bytes:
            self._forget_finished(next(iter(self._finished)))

    def _forget_finished(self, response: str) -> None:
        if (kept := self._finished.pop(response, None)) is not None:
            self._finished_bytes -= kept.num_bytes


def _parts(items: list[ResponseTokens]) -> Iterable[list[ResponseTokens]]:
    """Split into portions of about CHUNK_BYTES."""
    part: list[ResponseTokens] = []
    size = 0
    for item in items:
        part.append(item)
        size += len(item.token_ids) + len(item.logprobs)
        if size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
