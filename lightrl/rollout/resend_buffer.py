"""Tokens that may have to be sent again: of all that an engine generates, and of what it has
finished lately.

Owns which attempts a node can still account for. Must not send anything, nor decide what is wanted:
the coordinator trims what it has and aborts what it does not want.

What runs is kept from the attempt's first token; what has finished, until the next version is
loaded: by then the coordinator has heard of it, or the connection is broken and it is kept as long
as it may be trained.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from lightrl.messages.fields import MAX_RESPONSES
from lightrl.messages.responses import FinishReason, ResponseRequest, ResponseTokens, TokenChunk

MAX_FINISHED_BYTES = 256 << 20  # beyond that, what finished first is forgotten
CHUNK_BYTES = 4 << 20  # about so many are sent at once, so that no event loop is held up


@dataclass(slots=True)
class _Piece:
    """Consecutive tokens of one response under one version. `load` counts the versions loaded
    here."""

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
    # None: it runs
    finish_reason: FinishReason | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(p.token_ids) + len(p.logprobs) for p in self.pieces)


class ResendBuffer:
    """The attempts of one node. At most one of each response: an older one was given up."""

    def __init__(self, max_staleness: int, max_finished_bytes: int = MAX_FINISHED_BYTES) -> None:
        self._max_staleness = max_staleness
        self._max_finished_bytes = max_finished_bytes
        self._running: dict[str, _Attempt] = {}
        self._finished: dict[str, _Attempt] = {}  # in the order in which they finished
        self._finished_bytes = 0
        self._num_loads = 0

    def start(self, requests: Iterable[ResponseRequest]) -> None:
        """They begin to run. An order that comes twice changes nothing."""
        for r in requests:
            running = self._running.get(r.response)
            if running is None or running.attempt < r.attempt:
                self._forget_finished(r.response)
                self._running[r.response] = _Attempt(r.attempt)

    def add(self, chunk: TokenChunk) -> None:
        """Keeps what is new in a chunk of the engine; attempts that were forgotten are skipped."""
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
                self._finish(item.response, item.finish_reason)

    def forget(self, attempts: Iterable[tuple[str, int]]) -> None:
        """The coordinator does not want them."""
        for response, attempt in attempts:
            if (kept := self._running.get(response)) is not None and kept.attempt == attempt:
                del self._running[response]
            if (kept := self._finished.get(response)) is not None and kept.attempt == attempt:
                self._forget_finished(response)

    def end_all(self) -> None:
        """What ran is gone with its engine: it ends as if aborted, with the tokens that came."""
        for response, kept in list(self._running.items()):
            if kept.pieces:
                self._finish(response, "abort")
            else:
                del self._running[response]

    def loaded(self, version: int, in_touch: bool) -> None:
        """The engine has loaded a version; `in_touch`: all that was finished has been sent."""
        self._num_loads += 1
        oldest = version - self._max_staleness
        for response, kept in list(self._finished.items()):
            if in_touch or not all(oldest <= p.version <= version for p in kept.pieces):
                self._forget_finished(response)

    def unacked(self) -> tuple[tuple[str, int], ...]:
        """(response, attempt) of all that is accounted for: each runs, or its end is in `chunks`.

        What runs comes first, for the coordinator may have no room for all, nor a hello for more
        than MAX_RESPONSES.
        """
        kept = islice((self._running | self._finished).items(), MAX_RESPONSES)
        return tuple((r, a.attempt) for r, a in kept)

    def chunks(self) -> list[TokenChunk]:
        """All that is kept, for each response in the order of its tokens."""
        items: dict[tuple[int, int, str], list[ResponseTokens]] = {}
        for response, kept in (self._finished | self._running).items():
            for piece in kept.pieces:
                item = ResponseTokens(
                    response,
                    kept.attempt,
                    piece.offset,
                    bytes(piece.token_ids),
                    bytes(piece.logprobs),
                    kept.finish_reason if piece is kept.pieces[-1] else None,
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
    """In portions of about CHUNK_BYTES."""
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
