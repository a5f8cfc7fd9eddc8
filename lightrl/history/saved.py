"""Save the history of a run in history.bin, for a resumed coordinator.

A thread writes the file, so that a slow disk does not block the coordinator. The history affects
speed only, so a torn or damaged file is no error: readable records are used, and records that
cannot be written are dropped.

A record is a `_Record` in msgpack, framed as in system/framing.py. Records are appended. When the
file is about twice as large as its live records, it is rewritten; until then it takes up to three
times `speculation.history_mb` on disk.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightrl.core.arrays import decode, encode
from lightrl.errors import ProtocolError
from lightrl.history.store import History, PastResponse, PromptAnswers
from lightrl.system import files, framing
from lightrl.system.append_file import AppendFile
from lightrl.wire import from_bytes, to_bytes

FILE_NAME = "history.bin"
RESPONSE_BYTES = 32  # of a response beside its tokens, about
SLACK_BYTES = 8 << 20  # a file is not rewritten for less
PIECE_BYTES = 4 << 20  # of one write, about
MAX_WAITING_BYTES = 256 << 20  # not written yet; a slower disk is given up
MAX_DAMAGED = 64  # records skipped: after a wrong length all that follows is noise


@dataclass(frozen=True, slots=True)
class _Record:
    """The answers of one group."""

    prompt: str
    epoch: int
    # index, int32 tokens, finished, reward
    responses: list[tuple[int, bytes, bool, float | None]]


class SavedHistory:
    """The file of one run."""

    def __init__(
        self,
        run_dir: Path,
        history: History,
        report: Callable[[str], None],
        slack_bytes: int = SLACK_BYTES,
    ) -> None:
        """`report` is called from another thread."""
        self._path = run_dir / FILE_NAME
        self._history = history
        self._report = report
        self._slack_bytes = slack_bytes
        self._file = AppendFile(self._path, report)
        self._num_bytes = 0  # of the file when all is written, about
        self._given_up = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._waiting: list[tuple[Future[None], int]] = []  # writes, and bytes held for them

    def begin(self) -> None:
        """Remove the file of an earlier run in this directory."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def recall(self) -> None:
        """Add the records of the file to the history. Damage is reported once, and repaired."""
        damage: list[str] = []
        try:
            for record in read(self._path, damage):
                self._num_bytes += _size([record])
                self._history.add(record)
        except FileNotFoundError:
            return
        except OSError as e:
            damage.append(e.strerror or str(e))
        if damage:
            self._report(
                f"WARNING: {FILE_NAME}: {damage[0]}; {self._history.num_responses} "
                "responses are left"
            )
            self._rewrite()

    def append(self, answers: list[PromptAnswers]) -> None:
        """Queue the answers of a closed round; does not block."""
        size = _size(answers)
        self._num_bytes += size
        live = self._history.num_bytes + RESPONSE_BYTES * self._history.num_responses
        if self._num_bytes > 2 * live + self._slack_bytes:
            self._rewrite()
        else:
            self._submit(self._append, answers, size)

    def close(self) -> None:
        """Wait until all records are written or dropped."""
        self._thread.shutdown()
        self._file.close()
        for write, _ in self._waiting:
            write.result()  # raises errors other than those of the disk

    def _rewrite(self) -> None:
        if self._given_up:
            return
        everything = list(self._history.all())
        self._num_bytes = _size(everything)
        self._submit(self._replace, everything, 0)  # it shares its tokens with the history

    def _submit(
        self, write: Callable[[list[PromptAnswers]], None], answers: list[PromptAnswers], size: int
    ) -> None:
        if self._given_up:
            return
        self._waiting = [(work, n) for work, n in self._waiting if not work.done()]
        if self._waiting and sum(n for _, n in self._waiting) + size > MAX_WAITING_BYTES:
            self._give_up("the disk is too slow")
            return
        try:
            self._waiting.append((self._thread.submit(write, answers), size))
        except RuntimeError as e:  # no thread can be started
            self._give_up(str(e))

    # In the thread

    def _append(self, answers: list[PromptAnswers]) -> None:
        if not self._given_up:
            for piece in _pieces(answers):
                self._file.append(piece)

    def _replace(self, answers: list[PromptAnswers]) -> None:
        """Replace the file by the live records, atomically. A failure ends saving, since the file
        could grow without bound."""
        if self._given_up:
            return
        try:
            with files.replacing(self._path, lasting=False) as file:
                end = 0
                for piece in _pieces(answers):
                    end = files.write_at(file, end, piece)
            self._file.close()  # it is opened again, under its name
        except OSError as e:
            self._give_up(e.strerror or str(e))

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._report(f"WARNING: {FILE_NAME}: not saved any more ({why}): a resume will draft less")


def read(path: Path, damage: list[str]) -> Iterator[PromptAnswers]:
    """Yield the readable records in order; append one line to `damage` for each other one.

    Raises OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while (left := size - file.tell()) and len(damage) < MAX_DAMAGED:
            try:
                record = _decode(framing.read_payload(file, left))
            except framing.TornRecord:
                damage.append("its end is torn")
                return
            except ProtocolError as e:  # damaged, or of another version of this program
                damage.append(str(e))
            else:
                yield record


def _pieces(answers: Iterable[PromptAnswers]) -> Iterator[bytes]:
    """Yield encoded records, in pieces of about PIECE_BYTES."""
    parts: list[bytes] = []
    num_bytes = 0
    for answered in answers:
        payload = _encode(answered)
        parts += framing.framed([payload])
        num_bytes += len(payload)
        if num_bytes >= PIECE_BYTES:
            yield b"".join(parts)
            parts, num_bytes = [], 0
    if parts:
        yield b"".join(parts)


def _encode(answered: PromptAnswers) -> bytes:
    known = [(index, past) for index, past in answered.responses if past.tokens]
    responses = [(i, encode(r.tokens), r.finished, r.reward) for i, r in known]
    return to_bytes(_Record(answered.prompt, answered.epoch, responses))


def _decode(payload: bytes) -> PromptAnswers:
    """Raises ProtocolError."""
    record = from_bytes(payload, _Record)
    if any(len(tokens) % 4 for _, tokens, _, _ in record.responses):
        raise ProtocolError("a record with a part of a token")
    responses = (
        (index, PastResponse(record.epoch, decode("i", tokens), finished, reward))
        for index, tokens, finished, reward in record.responses
    )
    return PromptAnswers(record.prompt, record.epoch, tuple(responses))


def _size(answers: Iterable[PromptAnswers]) -> int:
    """Return the approximate size in the file."""
    return sum(each.num_bytes + RESPONSE_BYTES * len(each.responses) for each in answers)
