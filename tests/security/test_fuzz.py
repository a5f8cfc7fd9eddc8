"""Garbage at every socket, 200,000 frames and more, while a run goes on: it does not notice."""

import asyncio
import sys
from pathlib import Path

import pytest

from ..node.harness import DEADLINE_S, Running, a_run
from ..node.test_runs import require_exact

ROOT = Path(__file__).parents[2]
MAX_GROWTH_BYTES = 64 << 20
BUSY = {
    "rollout": {"engine_args": {"t0_ms": 10.0, "mean_length": 0.0}, "max_response_length": 100},
    "train": {"steps": 6},
}


@pytest.mark.timeout(120)
def test_garbage_at_every_socket_changes_nothing(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path, **BUSY) as run:
            await run.add_rollout("a")
            await run.until(lambda s: s.rollout_tokens > 50)
            before = resident_bytes()
            run.trainer.may_publish.clear()  # the run shall not be over before the attack is
            hub, key = run.head.address, str(run.key_file)
            sent = await asyncio.gather(
                attack("stranger", hub, 1, 12_000),
                attack("wrong_key", hub, 2, 6_000),
                attack("insider", hub, 3, 85_000, key),
                attack("insider", hub, 4, 85_000, key),
                attack("puller", run.trainer.holder, 5, 5_000),
                attack("coordinator", "-", 6, 20_000, key),
                steps_go_on(run),
            )
            grown = resident_bytes() - before
            run.trainer.may_publish.set()
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 6 * 4 * 4
            assert sum(sent) >= 200_000
            assert grown < MAX_GROWTH_BYTES, f"{grown >> 20} MiB"
            assert run.processes["a"].returncode in {None, 0}

    asyncio.run(scenario())


async def attack(kind: str, target: str, seed: int, count: int, *key: str) -> int:
    """The frames that it has sent. Raises AssertionError if it could not."""
    command = (sys.executable, "-m", "tests.security.attacker", kind, target, str(seed), str(count), *key)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{kind}: {err.decode()}"
    return int(out)


async def steps_go_on(run: Running) -> int:
    """Under attack steps are trained as ever, all but the last."""
    for step in range(5):
        await run.until(lambda s, step=step: s.step >= step)
        run.trainer.may_publish.set()
        await run.until(lambda s, step=step: s.step > step)
        run.trainer.may_publish.clear()
    return 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
