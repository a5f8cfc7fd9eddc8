"""The files that a coordinator leaves for others, on a disk that refuses."""

import asyncio
import os
from pathlib import Path

from lightrl.coordinator import run_files


def test_the_address_is_written_as_soon_as_it_can_be(tmp_path: Path):
    run_dir = tmp_path / "run"  # not there yet, so nothing can be written

    async def scenario():
        told: list[str] = []
        announcing = asyncio.create_task(
            run_files.announce(run_dir, "tcp://127.0.0.1:5600", told.append)
        )
        while not told:  # noqa: ASYNC110 - a line tells nobody
            await asyncio.sleep(0.01)
        assert run_files.old_address(run_dir) == ""
        run_dir.mkdir()
        await asyncio.wait_for(announcing, 90)
        assert told == [
            "WARNING: address: cannot write (No such file or directory); tried again every second"
        ]

    asyncio.run(scenario())
    assert run_files.old_address(run_dir) == "tcp://127.0.0.1:5600"
    assert [f.name for f in run_dir.iterdir()] == ["address"]


def test_an_address_that_is_being_written_is_not_left_to_come_later(tmp_path: Path):
    draft = tmp_path / ".address.draft"
    os.mkfifo(draft)  # opening it to write does not return before somebody reads

    async def scenario():
        announcing = asyncio.create_task(
            run_files.announce(tmp_path, "tcp://127.0.0.1:5600", lambda line: None)
        )
        await asyncio.sleep(0)
        announcing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        was_done = announcing.done()
        reader = os.open(draft, os.O_RDONLY | os.O_NONBLOCK)
        await asyncio.wait({announcing}, timeout=90)
        os.close(reader)
        assert not was_done
        assert announcing.cancelled()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []  # no pipe lasts, so it was refused, and cleared away


def test_an_end_that_cannot_be_written_leaves_nothing_half(tmp_path: Path):
    told: list[str] = []
    asyncio.run(run_files.end(tmp_path, b"{}", b"{}", told.append))
    assert told == []
    assert sorted(f.name for f in tmp_path.iterdir()) == ["snapshot.json", "summary.json"]
    run_files.reopen(tmp_path)
    assert list(tmp_path.iterdir()) == []
    asyncio.run(run_files.end(tmp_path / "gone", b"{}", b"{}", told.append))
    assert [line.partition(":")[2].partition(":")[0] for line in told] == [
        " summary.json",
        " snapshot.json",
    ]


def test_the_end_is_written_beside_the_event_loop_and_also_when_cancelled(tmp_path: Path):
    draft = tmp_path / ".summary.json.draft"
    os.mkfifo(draft)  # opening it to write does not return before somebody reads

    async def scenario():
        ending = asyncio.create_task(run_files.end(tmp_path, b"{}", b"{}", lambda line: None))
        await asyncio.sleep(0)
        ending.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not ending.done()
        reader = os.open(draft, os.O_RDONLY | os.O_NONBLOCK)
        await asyncio.wait({ending}, timeout=90)
        os.close(reader)
        assert ending.cancelled()

    asyncio.run(scenario())
    assert [f.name for f in tmp_path.iterdir()] == ["snapshot.json"]  # a pipe is refused
