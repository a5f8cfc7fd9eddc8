"""A node that has said goodbye has left: it is never lost, however busy the coordinator is sending
to it."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrl.core.commands import Send
from lightrl.errors import PeerUnreachable
from lightrl.messages.nodes import PROTOCOL, Bye, Heartbeat, Hello
from lightrl.transport.link import Link
from tests.support.daemons import Running, a_run
from tests.support.routers import until
from tests.support.scripted_rollout import ScriptedRollout

pytestmark = pytest.mark.usefixtures("warm_daemons")


def said(run: Running, text: str) -> int:
    """In how many lines."""
    return sum(text in line for _, line in run.head._records._events)


def test_nodes_that_said_goodbye_have_left_although_they_cannot_be_reached(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            links = {
                f"n{k}": await Link.connect(run.head.address, f"n{k}", run.key) for k in range(10)
            }
            for name, link in links.items():
                link.send(Hello(name, 1, ("rollout",), PROTOCOL, pid=0, host="h", slots=1))
            await until(lambda: links.keys() <= run.head._core.fleet.nodes.keys())
            for name, link in links.items():
                link.send(Bye("done"))
                link.close()
                with contextlib.suppress(PeerUnreachable):
                    while True:
                        run.head._router.send(run.head._peers._bound[name], Heartbeat())
                        # Its thread has to encrypt what is sent.
                        time.sleep(0.0005)  # noqa: ASYNC251
                run.head._carry_out([Send(name, Heartbeat())])
            await until(lambda: not links.keys() & run.head._core.fleet.nodes.keys())
            assert said(run, "connection lost") == 0
            assert said(run, "left (done)") == len(links)

    asyncio.run(scenario())


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(
    ("times", "loops"),
    [(2, 0), pytest.param(50, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_at_the_end_of_a_run_its_nodes_leave(tmp_path: Path, times: int, loops: int):
    async def scenario(folder: Path) -> None:
        node = {"heartbeat_s": 0.02, "lease_s": 10.0}  # busy with them
        async with a_run(folder, train={"steps": 1, "prompts_per_step": 2}, node=node) as run:
            rollouts = [ScriptedRollout(f"n{k}") for k in range(4)]
            living = [asyncio.create_task(r.run(run.head.address, run.key)) for r in rollouts]
            await run.until_finished()
            await asyncio.gather(*living)
            assert run.head.succeeded
            assert said(run, "lost (") == 0
            assert said(run, "trainer left (drained)") == 1

    with busy_loops(loops):
        for k in range(times):
            (tmp_path / str(k)).mkdir()
            asyncio.run(scenario(tmp_path / str(k)))
