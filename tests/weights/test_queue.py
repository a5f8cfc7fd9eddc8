"""More nodes that pull at once than a line can serve at once: they wait, and waiting is no
failure."""

import asyncio
import sys

import pytest

from lightrl.weights.serve.server import WeightServer
from tests.support.pullers import SHAPE
from tests.support.versions import make_version, serving

pytestmark = pytest.mark.e2e

DEADLINE_S = 60


def test_six_hundred_pullers_on_a_narrow_line_all_get_the_version(tmp_path):
    """Most of them wait for longer than they bear silence, and there are places for every tenth."""
    num_pullers, processes, places, timeout_s, line_s = 600, 3, 60, 4, 8

    async def start(server: WeightServer, number: int) -> asyncio.subprocess.Process:
        count = num_pullers // processes
        arguments = (
            server.addresses[0],
            server.secret,
            tmp_path,
            number * count,
            count,
            timeout_s,
            1,
        )
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.pullers", *map(str, arguments)),
            stdin=pipe,
            stdout=pipe,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        return process

    async def scenario() -> list[list[str]]:
        version = make_version(tmp_path / "v1", 1, *SHAPE)
        pace = num_pullers * SHAPE[0] * SHAPE[1] / line_s
        async with (
            serving(version, max_connections=places, max_bytes_per_s=pace) as server,
            asyncio.timeout(DEADLINE_S),
        ):
            pullers = await asyncio.gather(*(start(server, number) for number in range(processes)))
            said = await asyncio.gather(*(process.communicate(b"go\n") for process in pullers))
        return [output.decode().splitlines() for output, _ in said]

    said = asyncio.run(scenario())
    assert [len(lines) for lines in said] == [1] * processes, said  # nobody failed
    assert max(float(seconds) for [seconds] in said) > timeout_s  # or there was no need to wait
    data = (tmp_path / "v1").read_bytes()
    assert all((tmp_path / f"p{k}").read_bytes() == data for k in range(num_pullers))
