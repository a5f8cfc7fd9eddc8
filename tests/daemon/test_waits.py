"""What a run waits for is said where one looks, and a node that joined says what it serves and why
it leaves: real daemons."""

import asyncio
import fcntl
import signal
from pathlib import Path

import pytest

from lightrl.client import ask, find_run
from lightrl.launch.report import status_lines
from lightrl.messages.message import Message
from lightrl.messages.snapshot import Snapshot
from lightrl.messages.weights import PublishWeights
from lightrl.metrics import waits
from tests.support.daemons import DEADLINE_S, QUICKSTART, Running, a_run
from tests.support.scripted_rollout import ScriptedRollout

pytestmark = pytest.mark.usefixtures("warm_daemons")

SHORT = {"steps": 1, "prompts_per_step": 2}
BLOCKED = """
import fcntl

def reward(prompt, completion, answer, **_):
    with open({gate!r}) as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)  # for as long as the test holds it
    return 1.0
"""


def kind(snapshot: Snapshot) -> str:
    return snapshot.wait.kind if snapshot.wait is not None else ""


async def asked(run: Running) -> Snapshot:
    """As `lightrl status` does."""
    return await find_run.ask(run.head.address, run.key)


async def said(run: Running, text: str) -> None:
    """Returns once an event, and so the log, says it."""
    await run.until(lambda s: any(text in line for _, line in s.events))


def test_no_rollout_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waits, "REPORT_AFTER_S", 0.3)

    async def scenario() -> None:
        async with a_run(tmp_path, train=SHORT) as run:
            await run.until(lambda s: kind(s) == "rollout")
            snapshot = await asked(run)
            [line] = [line for line in status_lines(snapshot) if line.startswith("waiting")]
            assert line.startswith("waiting   for a rollout node: none takes part (0:00); add one ")
            assert f"lightrl up --join {run.head.address} --key {run.join_file} (other" in line
            await said(run, "waiting for a rollout node: none takes part (0:00); add one here with")
            rollout = asyncio.create_task(ScriptedRollout("a").run(run.head.address, run.key))
            await said(run, "for a rollout node: none takes part")
            await run.until_finished()
            await rollout
            events = [text for _, text in run.head._records._events]
            assert any(text.startswith("waited 0:") for text in events)

    asyncio.run(scenario())


def test_responses_wait_for_one_reward_worker(tmp_path: Path):
    gate = tmp_path / "gate"
    gate.touch()
    (tmp_path / "blocked.py").write_text(BLOCKED.format(gate=str(gate)))
    reward = {"functions": f"{tmp_path}/blocked.py:reward", "workers": 1, "timeout_s": 3600.0}

    async def scenario() -> None:
        with gate.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            async with a_run(tmp_path, train=SHORT, reward=reward) as run:
                rollout = asyncio.create_task(ScriptedRollout("a").run(run.head.address, run.key))
                await run.until(
                    lambda s: s.wait is not None and (s.wait.kind, s.wait.num) == ("scores", 8)
                )
                snapshot = await asked(run)
                assert snapshot.wait is not None
                assert snapshot.wait.of == 1
                assert [
                    line
                    for line in status_lines(snapshot)
                    if "waiting   for one reward worker to score 8 responses of step 1" in line
                ]
                fcntl.flock(held, fcntl.LOCK_UN)
                await run.until_finished()
                await rollout
                assert run.head.succeeded
                assert run.head.snapshot().wait is None

    asyncio.run(scenario())


class SlowToStart(ScriptedRollout):
    """Its engine loads until `start_engine`."""

    offer: PublishWeights | None = None
    has_engine = False

    def _take(self, message: Message) -> bool:
        if isinstance(message, PublishWeights) and not self.has_engine:
            self.offer = message
            return True
        return super()._take(message)

    def start_engine(self) -> None:
        assert self.offer is not None
        self.has_engine = True
        self._take(self.offer)


def test_engines_load(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path, train=SHORT) as run:
            await run.until(lambda s: s.policy_version == 0)
            rollout = SlowToStart("slow")
            living = asyncio.create_task(rollout.run(run.head.address, run.key))
            await run.until(lambda s: kind(s) == "engines" and rollout.offer is not None)
            snapshot = await asked(run)
            text = "waiting   for the engine of slow to load (0:0"
            assert [line for line in status_lines(snapshot) if line.startswith(text)]
            rollout.start_engine()
            await run.until_finished()
            await living

    asyncio.run(scenario())


def lines_of(output: bytes) -> list[str]:
    """What was logged, without when and by whom."""
    return [line.partition(": ")[2] for line in output.decode().splitlines()]


@pytest.mark.e2e
def test_a_real_node_is_waited_for_until_its_engine_has_started(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path, train=SHORT) as run:
            await run.until(lambda s: s.policy_version == 0 and kind(s) == "rollout")
            real = await run.add_rollout("real")
            seen = await run.until(lambda s: kind(s) not in {"", "rollout"})
            assert seen.wait is not None
            assert (seen.wait.kind, seen.wait.nodes) == ("engines", ("real",))
            await run.until(lambda s: kind(s) != "engines" and s.responses_running > 0)
            await run.until_finished()
            output, _ = await asyncio.wait_for(run.processes.pop("real").communicate(), DEADLINE_S)
            assert real.returncode == 0
            assert lines_of(output)[-1] == "left: run finished: 1 steps done"

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_node_says_which_run_it_serves_and_why_it_leaves(tmp_path: Path):
    async def ended(run: Running, name: str) -> tuple[int | None, list[str]]:
        process = run.processes.pop(name)
        output, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        assert errors == b""
        return process.returncode, lines_of(output)

    async def scenario() -> None:
        async with a_run(tmp_path, train={"steps": 100_000}) as run:
            whys = {
                "a": "the run lets this node go (lightrl drain)",
                "b": "this process was asked to end (SIGTERM)",
                "c": "notice that this machine will be taken away (SIGUSR1)",
                "d": "run stopped: lightrl down",
            }
            for name in whys:
                await run.add_rollout(name, None, "--slots", "2", "--preemptible")
            ready = {"ready", "updating"}
            await run.until(lambda s: {n.name for n in s.nodes if n.state in ready} >= set(whys))
            await ask.drain(run.head.address, "a", "lightrl drain", run.key)
            run.processes["b"].send_signal(signal.SIGTERM)
            run.processes["c"].send_signal(signal.SIGUSR1)
            told = {name: await ended(run, name) for name in "abc"}
            await ask.drain(run.head.address, "*", "lightrl down", run.key)
            told["d"] = await ended(run, "d")
            model = QUICKSTART / "model"
            serves = f"serves run test at {run.head.address}: rollout of {model}, 2 slots, "
            for name, why in whys.items():
                status, lines = told[name]
                assert status == 0, lines
                told_of = [line for line in lines if line.startswith(("serves", "lea", "left"))]
                assert told_of == [f"{serves}preemptible", f"leaving: {why}", f"left: {why}"]

    asyncio.run(scenario())
