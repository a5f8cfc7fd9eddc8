"""Append records to the journal of a running run, and call back when they are durable.

A thread writes the newest segment. The event loop is never blocked: `append` encodes and returns,
and the thread encodes the base of a new segment piece by piece. When a write fails, records stay in
memory and are written again later. A slow disk delays the callbacks of `after_flush`.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from lightrl.errors import JournalError
from lightrl.journal import disk
from lightrl.system import files, framing
from lightrl.wire import MAX_FRAME_BYTES, Codec

T = TypeVar("T")

RETRY_S = 1.0
MAX_TROUBLE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Begin:
    """A new segment and its base; each call of `frames` encodes the base again."""

    step: int
    frames: Callable[[], Iterator[bytes]]


_Act: TypeAlias = Callable[[], object]
_Job: TypeAlias = bytes | _Begin | _Act


class JournalWriter(Generic[T]):
    """Appends records to the newest segment of a folder. Create it in a running event loop.

    `on_trouble` is called in the loop with one line for each kind of error, and with one line when
    writes succeed again.
    """

    def __init__(
        self,
        folder: Path,
        codec: Codec[T],
        flush_ms: float,
        on_trouble: Callable[[str], None],
        keep_history: bool = False,
        max_trouble_s: float = MAX_TROUBLE_S,
    ) -> None:
        """Open the folder. Raises JournalError if it cannot be used or is in use."""
        self.news_bytes = 0  # since `begin`
        self.base_bytes = 0  # of the newest segment that is on the disk, as begun
        self._folder = folder
        self._codec = codec
        self._flush_s = flush_ms / 1000
        self._on_trouble = on_trouble
        self._keep_history = keep_history
        self._max_trouble_s = max_trouble_s
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        try:
            files.make_folder(folder)
            self._number = disk.last_number(folder)  # of the newest segment
            self._lock_file = disk.hold(folder)
            disk.remove_drafts(folder)
        except OSError as e:
            raise JournalError(f"{folder}: {e.strerror}") from None

        # Shared with the thread, under this lock.
        self._wake = threading.Condition()
        self._jobs: list[_Job] = []
        self._oldest = 0.0  # when the first of them came
        self._urgent = False
        self._closing = False
        self._drop_below = 0
        self._num_pending = 0  # bytes appended that are not durable
        self._num_begins = 0  # segments whose base is not durable
        self._trouble_since: float | None = None
        self._trouble = "the disk does not answer"
        self._busy_since: float | None = None  # without any progress

        # The thread's own.
        self._file: int | None = None
        self._end = 0  # of what is durable in it
        self._torn = False  # something may lie behind the end
        self._dropped_below = 0
        self._reported: set[int | None] = set()  # errnos since the last successful write
        self._begun = False
        self._failure: JournalError | None = None  # what cannot be written by any disk
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: T) -> None:
        """Encode a record and return; it becomes durable about `flush_ms` later."""
        assert self._begun, "a journal begins with its first segment"
        frame = self._encode(record)
        num_bytes = framing.size(frame)
        self.news_bytes += num_bytes
        with self._wake:
            self._num_pending += num_bytes
            self._add(frame)

    def after_flush(self, act: _Act) -> None:
        """Flush now, and call `act` in the loop once all records appended so far are durable.

        Callbacks run in the order of the calls, never before `after_flush` returns.
        """
        with self._wake:
            self._add(act, urgent=True)

    def begin(self, step: int, records: Iterable[T]) -> None:
        """Start a new segment with `records` as its base, from which the run can be restored.

        The thread iterates over them once for each try to write: do not pass an iterator.
        """
        self._begun = True
        self.news_bytes = 0
        with self._wake:
            self._num_begins += 1
            self._add(_Begin(step, lambda: map(self._encode, records)), urgent=True)

    @property
    def is_beginning(self) -> bool:
        """Return whether the newest segment is not on disk yet: `base_bytes` is outdated."""
        return self._num_begins > 0

    @property
    def pending_bytes(self) -> int:
        """Bytes appended that are not durable yet."""
        return self._num_pending

    def drop_before(self, step: int) -> None:
        """Remove segments that begin before `step`, also those set aside, but not the newest."""
        if self._keep_history:
            return
        with self._wake:
            self._drop_below = max(self._drop_below, step)
            self._wake.notify()

    def check_alive(self) -> None:
        """Raises JournalError if nothing could be written for `max_trouble_s`."""
        with self._wake:
            now, why = time.monotonic(), self._trouble
            starts = [t for t in (self._trouble_since, self._busy_since) if t is not None]
            ended = not self._thread.is_alive() and not self._closing
        if ended:
            raise self._failure or JournalError("the journal's thread has ended")
        if starts and now - min(starts) > self._max_trouble_s:
            limit = f"{self._max_trouble_s:g} s"
            raise JournalError(f"nothing could be written to {self._folder} for {limit}: {why}")

    async def close(self) -> None:
        """Write pending records, with one more try after an error, and unlock the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        try:
            async with asyncio.timeout(self._max_trouble_s):
                await self._ended.wait()
        except TimeoutError:
            self._on_trouble(
                f"journal: {self._num_pending} bytes were not written: the disk does not answer"
            )
            return  # its thread still holds the files
        for file in (self._file, self._lock_file):
            if file is not None:
                with contextlib.suppress(OSError):
                    os.close(file)
        self._file = None

    def _encode(self, record: T) -> bytes:
        frame = self._codec.encode(record)
        if len(frame) > MAX_FRAME_BYTES:  # it could not be read again
            raise JournalError(f"a record of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
        return frame

    def _add(self, job: _Job, urgent: bool = False) -> None:
        if not self._jobs:
            self._oldest = time.monotonic()
        if not self._jobs or (urgent and not self._urgent):
            self._wake.notify()  # not for every record: each costs a switch of threads
        self._urgent = self._urgent or urgent
        self._jobs.append(job)

    # In the thread

    def _work(self) -> None:
        try:
            while (jobs := self._next_jobs()) is not None and self._carry_out(jobs):
                self._sweep()
        except JournalError as e:
            self._failure = e
        finally:
            self._call(self._ended.set)

    def _next_jobs(self) -> list[_Job] | None:
        """Wait `flush_ms` from the first job, and return all jobs; None after `close`."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._jobs or self._closing or self._drop_below > self._dropped_below
            )
            if self._jobs:
                left = self._oldest + self._flush_s - time.monotonic()
                self._wake.wait_for(lambda: self._urgent or self._closing, max(0.0, left))
            elif self._closing:
                return None
            jobs, self._jobs, self._urgent = self._jobs, [], False
            return jobs

    def _carry_out(self, jobs: list[_Job]) -> bool:
        """Return False if the journal is being closed and cannot be written."""
        frames: list[bytes] = []
        acts: list[_Act] = []
        for job in jobs:
            if isinstance(job, bytes):
                frames.append(job)
            elif not isinstance(job, _Begin):
                acts.append(job)
            else:
                if not self._flush(frames, acts) or not self._insist(
                    lambda job=job: self._start(job)
                ):
                    return False
                frames, acts = [], []
        return self._flush(frames, acts)

    def _flush(self, frames: list[bytes], acts: list[_Act]) -> bool:
        if frames and not self._insist(lambda: self._write(frames)):
            return False
        with self._wake:
            self._num_pending -= sum(framing.size(f) for f in frames)
        for act in acts:
            self._call(act)
        return True

    def _insist(self, act: _Act) -> bool:
        """Retry `act` until it succeeds; return False if the journal is closed first."""
        while True:
            self._progress()
            try:
                act()
            except OSError as e:
                self._report(e)
            else:
                self._busy_since = None
                self._recovered()
                return True
            self._sweep()  # it may be what makes room
            with self._wake:
                if self._closing:
                    self._report_line(
                        f"WARNING: journal: {self._num_pending} bytes were not written: "
                        f"{self._trouble}"
                    )
                    return False
                self._wake.wait_for(lambda: self._closing, RETRY_S)

    def _write(self, frames: list[bytes]) -> None:
        assert self._file is not None
        # also after a failed sync: what it left behind may or may not be on the disk
        if self._torn:
            os.ftruncate(self._file, self._end)
        self._torn = True
        end = disk.write_at(self._file, self._end, framing.framed(frames), self._progress)
        disk.sync_data(self._file)
        self._end, self._torn = end, False

    def _start(self, begin: _Begin) -> None:
        segment = disk.segment_at(self._folder, self._number + 1, begin.step)
        file, end = disk.create(segment, begin.frames(), self._progress)
        if self._file is not None:
            with contextlib.suppress(OSError):  # all of it is durable
                os.close(self._file)
        self._file, self._end, self._torn, self._number = file, end, False, segment.number
        self.base_bytes = end
        self._dropped_below = -1  # what was the newest when it was last looked at may go now
        with self._wake:
            self._num_begins -= 1

    def _progress(self) -> None:
        self._busy_since = time.monotonic()

    def _sweep(self) -> None:
        """Remove old segments, oldest first. Segments that cannot be removed are tried again with
        the next segment or `drop_before`."""
        below = self._drop_below
        if below == self._dropped_below:
            return
        self._dropped_below = below
        with contextlib.suppress(OSError):
            for segment in (*disk.segments(self._folder), *disk.set_aside(self._folder)):
                if segment.step < below and segment.number < self._number:
                    os.unlink(segment.path)

    def _report(self, e: OSError) -> None:
        self._trouble = e.strerror or str(e)
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
        if e.errno not in self._reported:
            self._reported.add(e.errno)
            self._report_line(
                f"WARNING: journal: cannot write ({self._trouble}); kept in memory, tried again "
                "every second"
            )

    def _recovered(self) -> None:
        if self._trouble_since is not None:
            self._trouble_since = None
            self._trouble = "the disk does not answer"
            self._reported.clear()
            self._report_line("journal is writable again")

    def _report_line(self, line: str) -> None:
        self._call(lambda: self._on_trouble(line))

    def _call(self, act: _Act) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act)
