"""Daemons with several roles, as on reserved nodes: real ranks, real engines, the command line."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lightrl.client import ask
from lightrl.keys import read_key
from lightrl.wire import from_json
from tests.support.daemons import DEADLINE_S, QUICKSTART

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("warm_runs")]
COMMON = (
    "rollout.engine=torch",
    "train.prompts_per_step=4",
    "rollout.group_size=4",
    "eval.path=''",
)
EMULATED = ("rollout.engine=emulated", "train.engine=emulated")


@asynccontextmanager
async def daemon(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "lightrl.cli", "up", *arguments)
    out = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdout=out, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def address_of(run_dir: Path, process: asyncio.subprocess.Process) -> str:
    """Where the coordinator listens, once nodes have joined: it says so in its first lines."""
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        while line := await process.stdout.readline():
            if b"joined as" in line:
                while not (run_dir / "address").exists():
                    await process.stdout.readline()
                return (run_dir / "address").read_text().strip()
    raise AssertionError("the daemon ended without a node")


def run_toml(tmp_path: Path, *settings: str) -> list[str]:
    return [str(QUICKSTART / "run.toml"), f"run.dir={tmp_path}", "run.name=r", *COMMON, *settings]


def test_one_daemon_with_all_roles_runs_to_the_end(tmp_path: Path):
    async def scenario():
        arguments = ("--role", "coordinator,trainer,rollout", "--name", "head")
        async with daemon(*run_toml(tmp_path, "train.steps=2"), *arguments) as process:
            output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
            assert process.returncode == 0, output.decode()

    asyncio.run(scenario())
    summary = from_json((tmp_path / "r" / "summary.json").read_bytes(), dict)
    assert (summary["state"], summary["steps"], summary["trained_responses"]) == ("finished", 2, 32)
    assert (tmp_path / "r" / "checkpoints" / "step_2" / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("how", "emulated", "file"),
    [("down", EMULATED, "state/digest"), ("SIGTERM", (), "state/.metadata")],
    ids=["down", "SIGTERM"],
)
def test_run_that_is_stopped_leaves_a_checkpoint_of_the_steps_done(
    tmp_path: Path, how: str, emulated: tuple[str, ...], file: str
):
    async def scenario():
        # The coordinator listens on every interface, and the rollout node reaches it by one
        # address.
        settings = run_toml(tmp_path, *emulated, "train.steps=100000", "run.bind=tcp://0.0.0.0:*")
        async with daemon(*settings, "--role", "coordinator,trainer", "--name", "head") as head:
            address = (await address_of(tmp_path / "r", head)).replace("0.0.0.0", "127.0.0.1")
            key_file = tmp_path / "r" / "key"
            join = str(key_file.with_name("join"))
            joining = ("--join", address, "--key", join, "--name", "joiner", "--slots", "5")
            async with daemon(*joining) as joiner:
                key = read_key(key_file)
                async with asyncio.timeout(DEADLINE_S):
                    async for snapshot in ask.watch(address, 0.1, key):
                        if snapshot.step >= 2:
                            break
                [row] = [n for n in snapshot.nodes if n.name == "joiner"]
                assert row.slots == 5
                if how == "down":
                    await ask.drain(address, "*", "lightrl down", key)
                else:
                    head.terminate()
                output, _ = await asyncio.wait_for(head.communicate(), DEADLINE_S)
                assert head.returncode == 1, output.decode()
                assert "Traceback" not in output.decode()
                assert await asyncio.wait_for(joiner.wait(), DEADLINE_S) == 0

    asyncio.run(scenario())
    summary = from_json((tmp_path / "r" / "summary.json").read_bytes(), dict)
    assert summary["state"] == "stopped"
    [saved] = (tmp_path / "r" / "checkpoints").glob("step_*")
    assert saved.name == f"step_{summary['steps']}"
    assert (saved / file).exists()
    assert not (saved / "hf").exists()  # that takes time, which who is preempted does not have
