"""The files that a coordinator leaves for others, on a disk that refuses."""

import asyncio
from pathlib import Path

from lightrl.node import left


def test_the_address_is_written_as_soon_as_it_can_be(tmp_path: Path):
    run_dir = tmp_path / "run"  # not there yet, so nothing can be written

    async def scenario():
        told: list[str] = []
        announcing = asyncio.create_task(left.announce(run_dir, "tcp://127.0.0.1:5600", told.append))
        while not told:  # noqa: ASYNC110 - a line tells nobody
            await asyncio.sleep(0.01)
        assert left.old_address(run_dir) == ""
        run_dir.mkdir()
        await asyncio.wait_for(announcing, 20)
        assert told == [
            "WARNING: address: cannot write (No such file or directory); tried again every second"
        ]

    asyncio.run(scenario())
    assert left.old_address(run_dir) == "tcp://127.0.0.1:5600"
    assert [f.name for f in run_dir.iterdir()] == ["address"]


def test_an_end_that_cannot_be_written_leaves_nothing_half(tmp_path: Path):
    told: list[str] = []
    left.end(tmp_path, b"{}", b"{}", told.append)
    assert told == []
    assert sorted(f.name for f in tmp_path.iterdir()) == ["snapshot.json", "summary.json"]
    left.go_on(tmp_path)
    assert list(tmp_path.iterdir()) == []
    left.end(tmp_path / "gone", b"{}", b"{}", told.append)
    assert [line.partition(":")[2].partition(":")[0] for line in told] == [" summary.json", " snapshot.json"]
