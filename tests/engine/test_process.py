"""The engine's process: how tokens are batched, and that it never outlives its daemon."""

import importlib.util
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.engine.start import resolve_engine
from lightrl.messages.responses import Sampling

PARENT = """
import asyncio, sys
from lightrl.engine.base import EngineSpec
from lightrl.engine.start import start_engine

async def main():
    child = await start_engine(EngineSpec("emulated", sys.argv[1], "auto", 64, 2), threads=1)
    await child.receive()
    print(child.pid, flush=True)
    await child.receive()

asyncio.run(main())
"""


def test_tokens_travel_in_chunks_with_all_responses_together(start, ask):
    engine = start("emulated", chunk_tokens=16, chunk_ms=60_000)
    engine.load(1)
    outcomes = engine.run(1, Sampling(1.0), *(ask(f"r{i}", [4, 5], 64, seed=i) for i in range(8)))
    assert [len(o.tokens) for o in outcomes] == [64] * 8
    assert engine.num_chunks == 4


def test_a_finished_response_does_not_wait_for_a_full_chunk(start, ask):
    engine = start("emulated", chunk_tokens=1000, chunk_ms=500, engine_args={"t0_ms": 1.0})
    engine.load(1)
    engine.generate(1, Sampling(1.0), ask("long", [4], 500), ask("short", [4], 3))
    engine.finished("short")
    assert "long" not in engine.outcomes
    engine.finished("long")


def test_a_finished_response_is_sent_although_the_others_are_aborted_before_the_next_step(
    start, ask
):
    engine = start("emulated", chunk_tokens=1000, chunk_ms=3_600_000, engine_args={"t0_ms": 10.0})
    engine.load(1)
    engine.generate(1, Sampling(1.0), ask("long", [4], 500), ask("short", [4], 3))
    engine.until(lambda: bool(engine.loads) and engine.loads[-1].running == 1)
    engine.abort(("long", 1))
    assert engine.finished("short")[0].finish == "length"


def test_load_is_reported_when_work_begins_and_when_it_ends(start, ask):
    engine = start("emulated", slots=4, engine_args={"t0_ms": 1.0})
    engine.load(1)
    engine.run(1, Sampling(1.0), *(ask(f"l{i}", [4, 5], 20, seed=i) for i in range(6)))
    engine.until(lambda: len(engine.loads) > 1 and engine.loads[-1].running == 0)
    assert (engine.loads[0].running, engine.loads[0].waiting) == (4, 2)
    assert engine.loads[-1].waiting == 0


def test_a_later_attempt_replaces_a_running_one(start, ask):
    engine = start("emulated", engine_args={"t0_ms": 20.0})
    engine.load(1)
    engine.generate(1, Sampling(1.0), ask("r", [4, 5], 400))
    engine.until(lambda: "r" in engine.outcomes)
    engine.generate(1, Sampling(1.0), ask("r", [4, 5], 10, attempt=2))
    (first,) = engine.finished("r")
    assert first.finish == "abort"
    engine.outcomes.clear()
    (second,) = engine.finished("r")
    assert (second.finish, len(second.tokens)) == ("length", 10)


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux")
def test_killing_the_daemon_leaves_no_orphan(tiny):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny.dir)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        engine = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        readable, _, _ = select.select([engine], [], [], 20.0)
        os.close(engine)
        assert readable, "the engine is still there 20 s after its daemon was killed"


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_vllm_on_cpu_starts_no_further_process(vllm_engine):
    tasks = Path(f"/proc/{vllm_engine.child.pid}/task")
    assert [t.name for t in tasks.iterdir() if (t / "children").read_text().strip()] == []


def test_a_preempted_jobs_sigterm_does_not_end_the_engine(start, ask):
    engine = start("emulated")
    os.kill(engine.child.pid, signal.SIGTERM)
    engine.load(1)
    assert len(engine.run(1, Sampling(1.0), ask("r", [4], 5))[0].tokens) == 5


def test_auto_prefers_vllm_where_it_is_installed():
    assert resolve_engine("auto") == ("vllm" if importlib.util.find_spec("vllm") else "torch")
    assert resolve_engine("emulated") == "emulated"
    code = (
        "import sys; from lightrl.engine.start import resolve_engine; resolve_engine('auto'); "
        "print('vllm' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
