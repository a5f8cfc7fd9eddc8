"""What a machine may run out of, and what others may kill, in the middle of a whole run."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightrl.config.schema import Config
from lightrl.coordinator.daemon import CoordinatorDaemon
from lightrl.core.state import RunState
from lightrl.errors import RewardError
from lightrl.history.lengths import FILE_NAME as LENGTHS
from lightrl.journal.disk import segments
from lightrl.keys import read_key
from lightrl.launch.local import in_foreground
from lightrl.metrics.sinks import FILE_NAME as METRICS
from lightrl.metrics.sinks import read
from lightrl.wire import from_json
from tests.daemon.test_runs import busy, children_of, require_exact
from tests.support.daemons import (
    DEADLINE_S,
    QUICKSTART,
    Running,
    ScriptedTrainer,
    a_run,
    make_config,
)

pytestmark = pytest.mark.usefixtures("warm_daemons")

# Two steps of two waves of 0.6 s: long enough for things to happen in the middle.
SLOW = {
    "rollout": {"engine_args": {"t0_ms": 10.0, "mean_length": 0.0}, "max_response_length": 60},
    "train": {"steps": 2},
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB, for the run directory."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "lightrl-test", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    hog = place / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass
    return hog


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110 - neither files nor lines tell anybody
            await asyncio.sleep(0.01)


def lines(run: Running) -> list[str]:
    """What the coordinator has said so far."""
    return [text for _, text in run.head._records._events]


def number_of(run: Running, text: str) -> int:
    return sum(text in line for line in lines(run))


def test_full_disk_holds_training_back_until_there_is_space(small_disk: Path):
    async def scenario():
        async with a_run(small_disk, **SLOW) as run:
            await run.add_rollout("a")
            await run.until(lambda s: busy(s, "a"))
            hog = fill(small_disk)
            await until(lambda: number_of(run, "journal: cannot write") == 1)
            journaling = len(run.trainer.shards)
            step = await run.until(lambda s: s.responses_done == 16)  # sampling has gone on
            assert step.step == 0
            assert len(run.trainer.shards) == journaling
            assert journaling < 4
            hog.unlink()
            await run.until_finished()
            assert run.head.succeeded
            assert number_of(run, "journal: cannot write") == 1
            assert number_of(run, "journal is writable again") == 1
            assert require_exact(run, small_disk) == 32

    asyncio.run(scenario())
    assert [r["step"] for r in read(small_disk / "test")] == [1, 2]
    assert (small_disk / "test" / "summary.json").exists()


@pytest.mark.e2e
def test_disk_that_stays_full_ends_the_run_in_order(small_disk: Path):
    async def scenario():
        async with a_run(small_disk, max_trouble_s=1.0, **SLOW) as run:
            await run.add_rollout("a")
            await run.until(lambda s: busy(s, "a"))
            fill(small_disk)
            await run.until_finished()
            assert run.head._core.state is RunState.FAILED
            assert (
                sum(t.startswith("run failed: nothing could be written to") for t in lines(run))
                == 1
            )
            assert number_of(run, "summary.json: cannot write (No space left on device)") == 1
            assert await asyncio.wait_for(run.processes["a"].wait(), DEADLINE_S) == 0  # it was told
            await asyncio.wait_for(run.training, DEADLINE_S)
            assert run.trainer.shards == []

    asyncio.run(scenario())
    run_dir = small_disk / "test"
    assert not (run_dir / "snapshot.json").exists()  # rather than half of one
    assert not (run_dir / "address").exists()


FAILING = """
import pathlib
assert not pathlib.Path({flag!r}).exists(), "no more"
def reward(sample):
    return 1.0
"""


def pool_that_fails(
    config: Config, scratch: Path, refuse: Callable[[], object]
) -> Callable[[Path], int]:
    """A coordinator's daemon whose rewards cannot be had any more once a checkpoint is there, and
    whose disk refuses what is written at the end."""

    async def run(run_dir: Path) -> None:
        head = CoordinatorDaemon(config, run_dir, "head", read_key(run_dir / "key"))
        run = Running(config, head, ScriptedTrainer(scratch))
        async with asyncio.timeout(DEADLINE_S):
            await until((run_dir / "address").exists)
            (run_dir / "checkpoints" / "step_0").mkdir(parents=True)
            (run_dir / "checkpoints" / "step_0" / "trainer.json").touch()
            refuse()
            for worker in workers(run):
                os.kill(worker, signal.SIGKILL)
            try:
                await run.finished
            finally:
                run.training.cancel()
                await asyncio.gather(run.training, return_exceptions=True)

    return lambda run_dir: asyncio.run(run(run_dir)) or 0


@pytest.mark.e2e
@pytest.mark.parametrize("disk", ["full", "refuses one file"])
def test_a_foreground_coordinator_that_fails_leaves_what_can_be_resumed(
    tmp_path: Path, request: pytest.FixtureRequest, disk: str
):
    """Nothing says how the run has ended, so that it looks as if it had never begun."""
    place = request.getfixturevalue("small_disk") if disk == "full" else tmp_path
    flag = tmp_path / "flag"
    rewards = tmp_path / "reward.py"
    rewards.write_text(FAILING.format(flag=str(flag)))
    config = make_config(place, reward={"functions": f"{rewards}:reward"})

    def refuse() -> None:
        flag.touch()
        if disk == "full":
            fill(place)
        else:
            (config.run_dir / ".snapshot.json.draft").mkdir()

    with pytest.raises(RewardError, match="no more"):
        in_foreground(config, pool_that_fails(config, tmp_path, refuse))
    assert not (config.run_dir / "snapshot.json").exists()
    assert not (config.run_dir / "address").exists()
    assert segments(config.run_dir / "journal")
    assert (config.run_dir / "checkpoints" / "step_0" / "trainer.json").exists()
    assert (config.run_dir / "key").exists()


@pytest.mark.e2e
def test_a_foreground_coordinator_whose_rewards_never_were_leaves_its_name_free(tmp_path: Path):
    """Its journal only says that a run begins."""
    config = make_config(tmp_path, reward={"functions": f"{QUICKSTART / 'reward.py'}:none"})

    def daemon(run_dir: Path) -> int:
        async def run() -> None:
            head = CoordinatorDaemon(config, run_dir, "head", read_key(run_dir / "key"))
            (run_dir / ".snapshot.json.draft").mkdir()
            await head.run()

        asyncio.run(run())
        return 0

    with pytest.raises(RewardError, match="none"):
        in_foreground(config, daemon)
    assert not config.run_dir.exists()


@pytest.mark.e2e
def test_figures_that_cannot_be_written_are_left_out(tmp_path: Path, small_disk: Path):
    """The journal has its own place, so that only what may be lost is lost."""

    async def scenario():
        async with a_run(tmp_path / "elsewhere", **SLOW) as run:
            await run.add_rollout("a")
            run_dir = run.config.run_dir
            for name in (METRICS, LENGTHS):
                (run_dir / name).symlink_to(small_disk / name)
            await until(lambda: (run_dir / "address").exists())
            fill(small_disk)
            await run.until_finished()
            assert run.head.succeeded
            assert number_of(run, f"{METRICS}: cannot write (No space left on device)") == 1
            assert number_of(run, f"{LENGTHS}: cannot write (No space left on device)") == 1
            assert require_exact(run, tmp_path / "elsewhere") == 32

    asyncio.run(scenario())
    assert read(tmp_path / "elsewhere" / "test") == []
    summary = from_json((tmp_path / "elsewhere" / "test" / "summary.json").read_bytes(), dict)
    assert (summary["state"], summary["steps"]) == ("finished", 2)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.e2e
def test_without_descriptors_nobody_comes_and_then_they_do(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            await until(lambda: bool(run.trainer.files) and len(workers(run)) == 1)
            await until(lambda: (run.config.run_dir / "address").exists())
            await run.add_rollout("a")
            [worker] = workers(run)
            with no_descriptors():
                with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                    os.open(os.devnull, os.O_RDONLY)
                os.kill(worker, signal.SIGKILL)
                await until(
                    lambda: number_of(run, "reward-0 cannot be started: Too many open files") == 1
                )
                await until(lambda: number_of(run, "no free file descriptors") == 1)
                await asyncio.sleep(1.5)  # both are tried again meanwhile
                assert number_of(run, "Too many open files") == 1 + number_of(
                    run, "journal: cannot write"
                )
            await run.until_finished()
            assert run.head.succeeded
            assert number_of(run, "there are free file descriptors again") == 1
            assert require_exact(run, tmp_path) == 32

    asyncio.run(scenario())


def workers(run: Running) -> list[int]:
    """Reward workers: children of this process that are not daemons of the run."""
    daemons = {p.pid for p in run.processes.values()}
    return [pid for pid in children_of(os.getpid()) if pid not in daemons and is_worker(pid)]


def is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"lightrl.rewards.worker:main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.mark.e2e
def test_reward_workers_that_are_killed_come_back(tmp_path: Path):
    """Idle, all at once, while they start, and in the middle of a job."""
    source = tmp_path / "slow.py"
    source.write_text(
        "import time\n\ndef reward(sample):\n    time.sleep(0.05)\n    return "
        "len(sample.response_ids) % 2\n"
    )
    changes = {**SLOW, "reward": {"functions": f"{source}:reward", "workers": 2}}

    async def scenario():
        async with a_run(tmp_path, **changes) as run:
            await until(lambda: (run.config.run_dir / "address").exists())
            idle = workers(run)
            assert len(idle) == 2
            for pid in idle:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: len(set(workers(run)) - set(idle)) == 2)
            os.kill(workers(run)[0], signal.SIGKILL)  # it imports something at this moment
            await run.add_rollout("a")
            await run.until(lambda s: s.responses_done > 0)
            await until(lambda: len(workers(run)) == 2)
            for pid in workers(run):
                os.kill(pid, signal.SIGKILL)
            await run.until_finished()
            assert run.head.succeeded
            assert number_of(run, "killed by SIGKILL") >= 3
            failed = require_exact(run, tmp_path)
            summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
            assert summary["counters"]["rewards_failed"] <= 2  # of those that were in the middle
            assert failed >= 32 - 4 * summary["counters"]["rewards_failed"]

    asyncio.run(scenario())
