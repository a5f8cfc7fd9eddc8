"""What the writer promises: soon, in order, and never said too early, also when the disk is
full."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightrl.core.log_entries import LogEntry, RoundOpened, SnapshotBegan, TokensTaken
from lightrl.errors import JournalError
from lightrl.journal import disk
from lightrl.journal.disk import is_in_use
from lightrl.journal.read import LOG, newest, read_segment, segments
from lightrl.journal.write import JournalWriter
from lightrl.messages.responses import ResponseTokens
from lightrl.system import framing
from tests.journal.conftest import item, within

Writer = JournalWriter[LogEntry]


def writer_on(
    folder: Path,
    flush_ms: float = 5,
    on_trouble: Callable[[str], None] = pytest.fail,
    keep: bool = False,
) -> Writer:
    return JournalWriter(folder, LOG, flush_ms, on_trouble, keep)


async def flushed(writer: Writer) -> None:
    done = asyncio.Event()
    writer.after_flush(done.set)
    await done.wait()


def steps_in(path: Path) -> list[int]:
    return [f.step for f in read_segment(path, LOG) if isinstance(f, RoundOpened)]


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.005)


def test_what_is_appended_is_on_the_disk_soon_without_being_asked(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path)
        writer.begin(0, [SnapshotBegan()])
        await flushed(writer)
        [segment] = segments(tmp_path)
        for k in range(3):
            writer.append(RoundOpened(k, "plain"))
            await until(lambda k=k: steps_in(segment.path) == list(range(k + 1)))
        await writer.close()

    within(story)


def test_acts_are_called_in_order_after_their_records_and_never_at_once(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path, flush_ms=10_000)
        writer.begin(0, [SnapshotBegan()])
        called: list[tuple[int, list[int]]] = []
        for k in range(50):
            writer.append(RoundOpened(k, "plain"))
            if k == 20:
                writer.begin(1, [SnapshotBegan(step=1)])
            writer.after_flush(
                lambda k=k: called.append(
                    (k, [s for g in segments(tmp_path) for s in steps_in(g.path)])
                )
            )
            if k % 7 == 0:
                await asyncio.sleep(0)
        assert called == []
        await until(lambda: len(called) == 50)
        assert [k for k, _ in called] == list(range(50))
        assert all(k in on_disk for k, on_disk in called)
        assert [len(steps_in(s.path)) for s in segments(tmp_path)] == [21, 29]
        await flushed(writer)  # nothing waits: it is called all the same
        await writer.close()

    within(story)


def test_an_act_that_is_asked_for_starts_the_flush_at_once(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path, flush_ms=60_000)
        writer.begin(0, [SnapshotBegan()])
        writer.append(RoundOpened(0, "plain"))
        await flushed(writer)
        await asyncio.sleep(0)
        # this one waits for its time, which close() does not
        writer.append(RoundOpened(1, "plain"))
        await writer.close()
        assert steps_in(segments(tmp_path)[0].path) == [0, 1]

    within(story)


def test_a_segment_has_its_name_only_when_its_base_is_whole(tmp_path):
    async def story() -> None:
        for name in ("00000005_step_0.log.tmp", ".00000005_step_0.log.draft"):
            (tmp_path / name).write_bytes(b"left behind")  # by earlier versions, and by this one
        writer = writer_on(tmp_path)
        writer.begin(4, [SnapshotBegan(step=4)])
        assert writer.is_beginning
        writer.append(RoundOpened(4, "plain"))
        assert writer.news_bytes == framing.size(LOG.encode(RoundOpened(4, "plain")))
        await flushed(writer)
        assert not writer.is_beginning
        assert writer.base_bytes > disk.HEADER_BYTES
        [segment] = segments(tmp_path)
        assert (segment.number, segment.step) == (6, 4)
        assert segment.path.stat().st_size == writer.base_bytes + writer.news_bytes
        assert {f.name for f in tmp_path.iterdir()} == {"lock", segment.path.name}
        await writer.close()

    within(story)


def test_old_segments_are_dropped_but_never_the_newest(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path)
        for step in (0, 1, 1, 2):
            writer.begin(step, [SnapshotBegan(step=step)])
        await flushed(writer)
        writer.drop_before(1)
        await until(lambda: [s.step for s in segments(tmp_path)] == [1, 1, 2])
        writer.drop_before(9)
        await until(lambda: [s.step for s in segments(tmp_path)] == [2])
        writer.append(RoundOpened(2, "plain"))
        await writer.close()
        assert newest(tmp_path, LOG)[1] == [SnapshotBegan(step=2), RoundOpened(2, "plain")]

    within(story)


def test_what_was_set_aside_is_dropped_with_the_segments_of_its_steps(tmp_path):
    for name in (
        "00000001_step_1.log.damaged",
        "00000002_step_3.log.rewound",
        "00000003_step_0.log.mine",
    ):
        (tmp_path / name).write_text("?")

    def left() -> list[str]:
        return sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".log" and p.name != "lock")

    async def story() -> None:
        writer = writer_on(tmp_path)
        writer.begin(4, [SnapshotBegan(step=4)])
        await flushed(writer)
        writer.drop_before(1)
        await writer.close()
        assert len(left()) == 3
        writer = writer_on(tmp_path)
        writer.begin(4, [SnapshotBegan(step=4)])
        await flushed(writer)
        writer.drop_before(3)
        await until(lambda: left() == ["00000002_step_3.log.rewound", "00000003_step_0.log.mine"])
        writer.drop_before(4)
        await until(lambda: left() == ["00000003_step_0.log.mine"])
        await writer.close()

    within(story)


def test_what_was_the_newest_when_it_was_to_be_dropped_goes_with_the_next_segment(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path)
        writer.begin(0, [SnapshotBegan()])
        await flushed(writer)
        writer.drop_before(1)
        for _ in range(2):  # the thread sweeps between them
            await flushed(writer)
        assert [s.step for s in segments(tmp_path)] == [0]
        writer.begin(1, [SnapshotBegan(step=1)])
        await writer.close()
        assert [s.step for s in segments(tmp_path)] == [1]

    within(story)


def test_history_can_be_kept(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path, keep=True)
        for step in range(3):
            writer.begin(step, [SnapshotBegan(step=step)])
        writer.drop_before(2)
        await writer.close()
        assert len(segments(tmp_path)) == 3

    within(story)


def test_two_writers_on_one_folder_are_refused(tmp_path):
    async def story() -> None:
        assert not is_in_use(tmp_path)
        writer = writer_on(tmp_path)
        assert is_in_use(tmp_path)
        with pytest.raises(JournalError, match="another process"):
            writer_on(tmp_path)
        await writer.close()
        assert not is_in_use(tmp_path)
        await writer_on(tmp_path).close()

    within(story)


def test_a_folder_that_cannot_be_is_one_line(tmp_path):
    async def story() -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(JournalError, match="file"):
            writer_on(tmp_path / "file")

    within(story)


def test_a_record_that_could_not_be_read_again_is_not_written(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path)
        writer.begin(0, [SnapshotBegan()])
        ids = bytes(130 << 20)
        with pytest.raises(JournalError, match="exceeds"):
            writer.append(TokensTaken(0, (ResponseTokens("a", 1, 0, ids, ids),)))
        await writer.close()
        assert newest(tmp_path, LOG)[1] == [SnapshotBegan()]

    within(story)


# kill -9

CHILD = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from lightrl.core.log_entries import SnapshotBegan, TokensTaken, RoundOpened
from lightrl.journal.read import LOG
from lightrl.journal.write import JournalWriter
from lightrl.messages.responses import ResponseTokens
from tests.journal.conftest import item

async def main():
    writer = JournalWriter(Path(sys.argv[1]), LOG, 1, print)
    writer.begin(0, [SnapshotBegan()])
    for k in range(10**9):
        if k % 40 == 39:
            writer.begin(k, [SnapshotBegan(step=k), RoundOpened(k, "plain")])
        writer.append(TokensTaken(k, (item("a", 0, k % 50),)))
        writer.append(RoundOpened(k, "plain"))
        writer.after_flush(lambda k=k: print(k, flush=True))
        if k % 3 == 0:
            await asyncio.sleep(0)
        if k > 20:
            await asyncio.sleep(0.0005)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "num_acts", [1, 60, *(pytest.param(n, marks=pytest.mark.e2e) for n in (7, 38, 171))]
)
def test_what_was_acknowledged_survives_kill_9(tmp_path, num_acts):
    """Killed as soon as so many acknowledgements were seen: at a moment that it does not choose."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", CHILD.format(root=root), str(tmp_path / "j")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(num_acts)]
    os.kill(child.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    child.stdout.close()
    child.wait()
    assert acknowledged == list(range(len(acknowledged)))
    assert not is_in_use(tmp_path / "j")
    segment, facts, _ = newest(tmp_path / "j", LOG)
    assert facts[0] == SnapshotBegan(step=segment.step)
    steps = [s for g in segments(tmp_path / "j") for s in dict.fromkeys(steps_in(g.path))]
    assert list(dict.fromkeys(steps)) == list(range(max(steps) + 1))
    assert max(steps) >= acknowledged[-1]


# A disk that refuses


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "lightrl-test", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    hog = place / "hog"
    with open(hog, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return hog


def test_a_full_disk_holds_everything_back_and_loses_nothing(tiny_disk):
    async def story() -> None:
        told: list[str] = []
        writer = writer_on(tiny_disk / "j", on_trouble=told.append)
        writer.begin(0, [SnapshotBegan()])
        await flushed(writer)
        hog = fill(tiny_disk)
        acts: list[int] = []
        for k in range(40):
            writer.append(TokensTaken(k, (item("a", 0, 50),)))
            writer.append(RoundOpened(k, "plain"))
            writer.after_flush(lambda k=k: acts.append(k))
        await until(lambda: bool(told))
        first = len(acts)
        assert first < 40
        assert "No space left on device" in told[0]
        writer.check_alive()
        [segment] = segments(tiny_disk / "j")
        assert steps_in(segment.path)[:first] == list(range(first))
        hog.unlink()
        await until(lambda: len(acts) == 40)
        assert told[1:] == ["journal is writable again"]
        assert acts == list(range(40))
        assert steps_in(segment.path) == list(range(40))
        assert read_whole(segment.path)
        await writer.close()

    within(story)


def test_a_new_segment_waits_for_space_and_dropping_old_ones_makes_it(tiny_disk):
    async def story() -> None:
        told: list[str] = []
        writer = writer_on(tiny_disk / "j", on_trouble=told.append)
        # 24 kB of 64
        base: list[LogEntry] = [SnapshotBegan(), TokensTaken(0, (item("a", 0, 3000),))]
        writer.begin(0, base)
        writer.begin(1, base)
        writer.begin(2, base)
        writer.append(RoundOpened(2, "plain"))
        acts: list[int] = []
        writer.after_flush(lambda: acts.append(1))
        await until(lambda: bool(told))
        assert [s.step for s in segments(tiny_disk / "j")] == [0, 1]
        assert acts == []
        writer.drop_before(1)
        await until(lambda: bool(acts))
        assert [s.step for s in segments(tiny_disk / "j")] == [1, 2]
        assert all(read_whole(s.path) for s in segments(tiny_disk / "j"))
        await writer.close()

    within(story)


def test_closing_on_a_full_disk_ends_with_a_line(tiny_disk):
    async def story() -> None:
        told: list[str] = []
        writer = writer_on(tiny_disk / "j", on_trouble=told.append)
        writer.begin(0, [SnapshotBegan()])
        await flushed(writer)
        fill(tiny_disk)
        writer.append(TokensTaken(0, (item("a", 0, 3000),)))
        await writer.close()
        assert "were not written" in told[-1]
        [segment] = segments(tiny_disk / "j")
        assert newest(tiny_disk / "j", LOG)[1] == [SnapshotBegan()]
        assert segment.path.stat().st_size < 64 << 10

    within(story)


def read_whole(path: Path) -> bool:
    reading = read_segment(path, LOG)
    return bool(list(reading)) and reading.damage is None


def test_without_descriptors_a_new_segment_waits(tmp_path):
    async def story() -> None:
        told: list[str] = []
        writer = writer_on(tmp_path, on_trouble=told.append)
        writer.begin(0, [SnapshotBegan()])
        await flushed(writer)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
        try:
            writer.begin(1, [SnapshotBegan(step=1)])
            await until(lambda: bool(told))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in told[0]
        await flushed(writer)
        assert told[1:] == ["journal is writable again"]
        assert newest(tmp_path, LOG)[1] == [SnapshotBegan(step=1)]
        await writer.close()

    within(story)


def is_alive(writer: JournalWriter[LogEntry]) -> bool:
    try:
        writer.check_alive()
    except JournalError:
        return False
    return True


def test_too_long_is_the_end(tiny_disk):
    async def story() -> None:
        told: list[str] = []
        writer = JournalWriter(tiny_disk / "j", LOG, 5, told.append, max_trouble_s=0.2)
        writer.begin(0, [SnapshotBegan()])
        await flushed(writer)
        writer.check_alive()
        fill(tiny_disk)
        writer.append(TokensTaken(0, (item("a", 0, 3000),)))
        await until(lambda: bool(told))
        await until(lambda: not is_alive(writer))
        with pytest.raises(JournalError, match=r"for 0\.2 s: No space left on device"):
            writer.check_alive()
        await writer.close()

    within(story)


def test_latency_to_durability_is_bounded_by_the_flush_and_one_sync(tmp_path):
    async def story() -> None:
        writer = writer_on(tmp_path, flush_ms=50)
        writer.begin(0, [SnapshotBegan()])
        await flushed(writer)
        [segment] = segments(tmp_path)
        size, waits = segment.path.stat().st_size, []
        for k in range(10):
            begun = time.monotonic()
            writer.append(RoundOpened(k, "plain"))
            size += framing.size(LOG.encode(RoundOpened(k, "plain")))
            await until(lambda: segment.path.stat().st_size >= size)  # noqa: B023
            waits.append(time.monotonic() - begun)
        assert sorted(waits)[5] < 0.05 + 0.5, "half of them far beyond 50 ms, on whatever machine"
        assert min(waits) > 0.03, "it waits for company"
        await writer.close()

    within(story)
