"""A disk that is slow, or that keeps nobody from going on: what waits for it is bounded, nothing
fails."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from lightrl.config import sections
from lightrl.coordinator.journaling import Journaling
from lightrl.core.coordinator import Coordinator
from lightrl.core.log_entries import LogEntry, RoundOpened, SnapshotBegan, TokensTaken
from lightrl.errors import JournalError
from lightrl.journal import disk
from lightrl.journal.read import LOG, newest, read_segment, segments
from lightrl.journal.write import JournalWriter
from lightrl.messages.responses import ResponseTokens
from tests.core.conftest import SETTINGS
from tests.journal.conftest import within


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """The disk writes as often as this is released."""
    allowed, write = threading.Semaphore(0), os.pwrite

    def pwrite(file: int, data: bytes, offset: int) -> int:
        allowed.acquire()
        return write(file, data, offset)

    monkeypatch.setattr(disk.os, "pwrite", pwrite)
    return allowed


async def flushed(writer: JournalWriter[LogEntry]) -> None:
    done = asyncio.Event()
    writer.after_flush(done.set)
    await done.wait()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - a thread changes it
        await asyncio.sleep(0.001)


MEBIBYTE = bytes(1 << 19)  # of tokens, and as much of logprobs


def big(k: int) -> TokensTaken:
    return TokensTaken(0, (ResponseTokens(f"r{k}", 1, 0, MEBIBYTE, MEBIBYTE),))


def test_however_much_waits_for_a_slow_disk_it_is_written_and_nothing_fails(tmp_path, may_write):
    async def story() -> None:
        writer = JournalWriter(tmp_path, LOG, 5, pytest.fail)
        writer.begin(0, [SnapshotBegan()])
        for k in range(24):
            writer.append(big(k))
        assert writer.pending_bytes > 20 << 20
        writer.check_alive()
        may_write.release(1000)
        await flushed(writer)
        assert writer.pending_bytes == 0
        writer.check_alive()
        await writer.close()
        assert len(list(read_segment(segments(tmp_path)[0].path, LOG))) == 25

    within(story)


def test_what_a_segment_begins_with_is_made_as_it_is_written(tmp_path, may_write):
    """One piece at a time, and not in the event loop."""
    made: list[int] = []
    threads: set[int] = set()

    class Base:
        def __iter__(self) -> Iterator[LogEntry]:
            yield SnapshotBegan(step=1)
            for k in range(20):
                made.append(k)
                threads.add(threading.get_ident())
                yield big(k)

    async def story() -> None:
        writer = JournalWriter(tmp_path, LOG, 5, pytest.fail)
        writer.begin(1, Base())
        assert made == []
        writer.append(RoundOpened(1, "plain"))
        for _ in range(3):
            may_write.release()
        await until(lambda: len(made) >= 12)  # as many as three writes hold
        assert len(made) <= 4 * (disk.PIECE_BYTES >> 20) + 1
        assert writer.is_beginning
        assert not segments(tmp_path)
        may_write.release(1000)
        await flushed(writer)
        assert len(made) == 20
        assert threading.get_ident() not in threads
        [segment] = segments(tmp_path)
        assert segment.path.stat().st_size == writer.base_bytes + writer.news_bytes
        await writer.close()
        facts = newest(tmp_path, LOG)[1]
        assert facts[-1] == RoundOpened(1, "plain")
        [reading] = [read_segment(segment.path, LOG)]
        assert len(list(reading)) == 22
        assert reading.num_base == 21

    within(story)


def test_a_segment_is_not_begun_anew_while_its_base_is_not_written(tmp_path, may_write):
    """However much comes meanwhile: how large the base is, against which it counts, is not known
    yet."""

    async def story() -> None:
        durable = Journaling(tmp_path, sections.Journal(segment_mb=1), pytest.fail)
        durable.begin(Coordinator(SETTINGS, 0.0), b"note")
        for k in range(3):
            durable.record(big(k))
        assert durable.pending_bytes > 2 << 20
        assert not durable.is_due
        may_write.release(1000)
        written = asyncio.Event()
        durable.when_durable(written.set)
        await written.wait()
        assert durable.is_due
        await durable.close()

    within(story)


def test_a_base_that_cannot_be_written_ends_the_journal_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("lightrl.journal.write.MAX_FRAME_BYTES", 1 << 19)

    async def story() -> None:
        writer = JournalWriter(tmp_path, LOG, 5, pytest.fail)
        writer.begin(0, [SnapshotBegan(), big(0)])
        await until(lambda: not is_alive(writer))
        with pytest.raises(JournalError, match="exceeds"):
            writer.check_alive()
        assert not list(tmp_path.glob("*.log*"))
        await writer.close()

    within(story)


def is_alive(writer: JournalWriter[LogEntry]) -> bool:
    try:
        writer.check_alive()
    except JournalError:
        return False
    return True


def test_much_is_synced_in_parts_so_that_a_slow_disk_shows_that_it_lives(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(disk, "sync_data", lambda file: synced.append(os.fstat(file).st_size))
    monkeypatch.setattr(disk, "SYNC_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 18)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    signs: list[int] = []
    end = disk.write_at(
        file, 0, (bytes(1 << 18) for _ in range(16)), lambda: signs.append(len(synced))
    )
    os.close(file)
    assert end == 4 << 20
    assert synced == [1 << 20, 2 << 20, 3 << 20, 4 << 20]
    assert len(signs) == 20
