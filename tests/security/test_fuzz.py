"""Garbage at every socket, ten thousands of frames, while a run goes on: it does not notice."""

import asyncio
import contextlib
import gc
import random
import sys
from pathlib import Path

import pytest
import zmq

from lightrl.errors import ProtocolError
from lightrl.keys import write_key
from lightrl.messages.nodes import Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import Abort, Generate
from lightrl.messages.training import TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.model_files import model_files
from lightrl.transport.router import Router
from lightrl.wire import MESSAGES
from tests.daemon.test_runs import require_exact
from tests.security import garbage
from tests.support.daemons import DEADLINE_S, Running, a_run, make_config
from tests.wire.test_messages import EXAMPLES

pytestmark = pytest.mark.usefixtures("warm_daemons")

ROOT = Path(__file__).parents[2]
MAX_GROWTH_BYTES = 64 << 20
BUSY = {
    "rollout": {"engine_args": {"t0_ms": 5.0, "mean_length": 0.0}, "max_response_length": 100},
    "train": {"steps": 4},
}


@pytest.mark.parametrize("thousands", [50, pytest.param(200, marks=pytest.mark.e2e)])
def test_garbage_at_every_socket_changes_nothing(tmp_path: Path, thousands: int):
    async def scenario() -> None:
        async with a_run(tmp_path, **BUSY) as run:
            await run.add_rollout("a")
            await run.until(lambda s: s.rollout_tokens > 50)
            # Cyclic garbage is collected when it is a quarter of all that lives: here that would be
            # all that earlier tests left in this process; a daemon begins with far less.
            gc.collect()
            gc.freeze()
            gc.collect()
            before = resident_bytes()
            run.trainer.may_publish.clear()  # the run shall not be over before the attack is
            address, key = run.head.address, str(run.key_file)
            sent = await asyncio.gather(
                attack("stranger", address, 1, 60 * thousands),
                attack("wrong_key", address, 2, 30 * thousands),
                attack("insider", address, 3, 410 * thousands, key),
                attack("insider", address, 4, 410 * thousands, key),
                attack("puller", run.trainer.address, 5, 25 * thousands),
                attack("coordinator", "-", 6, 100 * thousands, key),
                steps_go_on(run),
            )
            grown = resident_bytes() - before
            gc.unfreeze()
            run.trainer.may_publish.set()
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 4 * 4 * 4
            assert sum(sent) >= 1000 * thousands
            assert grown < MAX_GROWTH_BYTES, f"{grown >> 20} MiB"
            assert run.processes["a"].returncode in {None, 0}

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["welcome", "orders"])
def test_node_of_a_mad_coordinator_ends_in_one_line_or_lives_on(tmp_path: Path, what: str):
    """With the key, but sending nonsense: no traceback, no file out of place."""

    async def scenario() -> None:
        key = write_key(tmp_path / "key")
        router = Router("tcp://127.0.0.1:*", key)
        nodes = [await a_node(tmp_path, router.address, f"n{k}") for k in range(2)]
        rng, config = random.Random(8), make_config(tmp_path)
        welcome = Welcome("r", config.model_dump_json(), model_files(config.model.path))
        answering = asyncio.create_task(answer_madly(router, rng, what, welcome))
        async with asyncio.timeout(DEADLINE_S):
            for node in nodes:
                out = (await node.communicate())[0].decode()
                assert node.returncode in {0, 1}, out
                assert "Traceback" not in out
                assert node.returncode == 0 or out.strip().splitlines()[-1].startswith(
                    "lightrl: "
                ), out
        answering.cancel()
        router.close()

    asyncio.run(scenario())


async def a_node(folder: Path, address: str, name: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "lightrl.cli", "up", "--join", address, "--name", name)
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    return await asyncio.create_subprocess_exec(
        *command, "--key", str(folder / "key"), stdout=pipe, stderr=both
    )


async def answer_madly(router: Router, rng: random.Random, what: str, welcome: Welcome) -> None:
    """To every hello a welcome, either one that is strange or a good one and strange orders; then:
    leave."""
    orders = [
        e
        for e in EXAMPLES
        if isinstance(e, Generate | Abort | PublishWeights | TrainShard | Heartbeat)
    ]
    while True:
        for peer, message in await router.receive():
            if not isinstance(message, Hello):
                continue
            sent: list[bytes] = []
            if what == "orders":
                sent = [MESSAGES.encode(welcome)]
                strange = [garbage.strange(rng, rng.choice(orders)) for _ in range(600)]
                sent += [f for f in strange if decodes(f)][: rng.choice([100, 400])]
            else:
                sent = [garbage.strange(rng, welcome)]
            sent.append(MESSAGES.encode(Drain(message.node)))
            for frame in sent:
                with contextlib.suppress(zmq.ZMQError):
                    router._send_frames([peer.identity.encode(), frame])


def decodes(frame: bytes) -> bool:
    """Else the node ends at once."""
    try:
        MESSAGES.decode(frame)
    except ProtocolError:
        return False
    return True


async def attack(kind: str, target: str, seed: int, count: int, *key: str) -> int:
    """The frames that it has sent. Raises AssertionError if it could not."""
    command = (
        sys.executable,
        "-m",
        "tests.security.attacker",
        kind,
        target,
        str(seed),
        str(count),
        *key,
    )
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
    for step in range(3):
        await run.until(lambda s, step=step: s.step >= step)
        run.trainer.may_publish.set()
        await run.until(lambda s, step=step: s.step > step)
        run.trainer.may_publish.clear()
    return 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
