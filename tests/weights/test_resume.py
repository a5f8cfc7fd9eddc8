"""What was proved is not pulled again: not by a daemon that starts again after it was killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.errors import WeightsError
from lightrl.weights.machine.local import partial_path
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import manifest_path
from tests.support.versions import NODE, make_version, pull, serving, source, wanted

DEADLINE_S = 60

# Pulls from one source and says how many buckets are proved.
PULLER = """
import asyncio, sys
from pathlib import Path
from lightrl.messages.weights import WeightsSource
from lightrl.weights.pull.connection import Wanted
from lightrl.weights.pull.transfer import Pull
digest, num_bytes, manifest_bytes, path, address, ticket = sys.argv[1:]
wanted = Wanted(1, digest, int(num_bytes), int(manifest_bytes))
said = lambda progress: print(progress.num_bytes >> 23, flush=True)
one = Pull(wanted, "rollout-0", Path(path), on_progress=said)
one.add_sources([WeightsSource("trainer", (address,), ticket)])
asyncio.run(one.run())
"""


def test_a_killed_puller_goes_on_where_it_was_and_only_with_what_is_right(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=12)
        asked, path = wanted(version), tmp_path / "pulled"
        async with serving(version, max_bytes_per_s=40e6) as server, asyncio.timeout(DEADLINE_S):
            arguments = (
                asked.digest, asked.num_bytes, asked.manifest_bytes, path, server.addresses[0],
                source(server).ticket,
            )  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PULLER, *map(str, arguments)),
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            proved = 0
            while proved < 5:
                proved = int(await process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            await process.wait()
            spoil(path, version.path)
            stats = await pull(version, [source(server)], path)
        assert stats.num_bytes <= version.num_bytes - (proved - 1) * BUCKET_BYTES
        assert path.read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def spoil(path: Path, right: str) -> None:
    """A bit of one bucket that is right."""
    size = BUCKET_BYTES
    with partial_path(path).open("r+b") as part, Path(right).open("rb") as whole:
        offset = 0
        while part.read(size) != whole.read(size):
            offset += size
        os.pwrite(part.fileno(), bytes(64), offset + 4711)


def test_nothing_is_asked_of_the_network_when_all_is_there(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=3)
        path = tmp_path / "pulled"
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            await pull(version, [source(server)], path)
            path.rename(partial_path(path))
            stats = await pull(version, [source(server)], path)
            assert (stats.num_bytes, path.exists()) == (0, True)
            path.rename(partial_path(path))
            manifest_path(path).write_bytes(b"not it")  # it is fetched again
            stats = await pull(version, [source(server)], path, node=NODE)
            assert (stats.num_bytes, path.exists()) == (0, True)

    asyncio.run(scenario())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_fills_up_meanwhile_ends_the_pull_with_one_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", disk], check=True)
    try:
        asyncio.run(fill_up(tmp_path, disk))
    finally:
        subprocess.run(["umount", disk], check=True)


async def fill_up(tmp_path: Path, disk: Path) -> None:
    version = make_version(tmp_path / "v1", num_buckets=10)
    moving = asyncio.Event()
    async with serving(version, max_bytes_per_s=20e6) as server, asyncio.timeout(DEADLINE_S):
        pulling = asyncio.create_task(
            pull(version, [source(server)], disk / "pulled", on_progress=lambda _: moving.set())
        )
        await moving.wait()
        filler = disk / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, 1 << 30)
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        with pytest.raises(WeightsError, match="version 1: cannot write: No space left"):
            await pulling
        assert not (disk / "pulled").exists()
        filler.unlink()
        await pull(version, [source(server)], disk / "pulled")
