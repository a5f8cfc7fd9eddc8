"""Whole runs over real sockets: nodes join late, are killed, drain; every token is the one it had
to be."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from lightrl.core.rounds.rounds import sample_seed
from lightrl.keys import coordinator_public_key
from lightrl.messages.snapshot import Snapshot
from lightrl.metrics.sinks import read
from lightrl.transport.zeromq import key_pair
from lightrl.wire import from_json, unpack_f32, unpack_i32
from tests.support.daemons import DEADLINE_S, Proxy, Running, a_run, expected_tokens

pytestmark = pytest.mark.usefixtures("warm_daemons")

# One step of two waves of 1.2 s on one node: long enough to be disturbed. Whoever needs it longer
# stops an engine.
SLOW = {
    "rollout": {"engine_args": {"t0_ms": 5.0, "mean_length": 0.0}, "max_response_length": 240},
    "train": {"steps": 1},
}


def require_exact(run: Running, tmp_path: Path) -> int:
    """Every trained token is the one an undisturbed engine samples; returns how many responses
    there were."""
    count = 0
    for shard in run.trainer.shards:
        weights = run.trainer.files[shard.step]
        for group in shard.groups:
            for r in group.responses:
                seed = sample_seed(run.config.run.seed, r.response)
                expected = expected_tokens(run.config, weights, seed, group.prompt)
                assert unpack_i32(r.token_ids) == expected, r.response
                assert len(unpack_f32(r.rollout_logprobs)) == len(expected)
                count += 1
    return count


def busy(snapshot: Snapshot, *names: str) -> bool:
    rows = {n.name: n for n in snapshot.nodes}
    return all(name in rows and rows[name].running > 0 for name in names)


def test_run_finishes_and_leaves_its_files(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path) as run:
            await run.add_rollout("a")
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 2 * 4 * 4
            assert await asyncio.wait_for(run.processes["a"].wait(), DEADLINE_S) == 0

    asyncio.run(scenario())
    run_dir = tmp_path / "test"
    assert [r["step"] for r in read(run_dir)] == [1, 2]
    assert_speeds_are_told(run_dir)
    final = from_json((run_dir / "snapshot.json").read_bytes(), Snapshot)
    assert (final.state, final.step, [n.name for n in final.nodes]) == ("finished", 2, ["head"])
    assert not (run_dir / "address").exists()


def assert_speeds_are_told(run_dir: Path):
    """Of both steps: what was drawn, who came when, how many were scored."""
    told = [json.loads(line) for line in (run_dir / "speeds.jsonl").read_text().splitlines()]
    assert [s["step"] for s in told] == [0, 1]
    assert [(name, what) for s in told for _, name, what in s["changes"]] == [("a", "ready")]
    for speeds in told:
        assert len(speeds["drawn"]) == 4
        assert speeds["rewards"]["num"] == 16
        assert speeds["rewards"]["longest_s"] > 0
        assert all(0 < seconds < 10 for seconds in speeds["shard_s"])
        [node] = speeds["nodes"].values()
        assert len(node["starts"]) == 1


def test_killed_node_costs_no_token_and_a_late_one_joins_within_the_step(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            doomed = await run.add_rollout("doomed")
            await run.until(lambda s: busy(s, "doomed") and s.rollout_tokens > 50)
            freeze(doomed.pid)  # its half of the step stays open until the other node is there
            await run.add_rollout("late")
            snapshot = await run.until(lambda s: busy(s, "doomed", "late"))
            assert snapshot.step == 0
            doomed.kill()
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 16
        summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
        assert summary["counters"]["nodes_lost"] == 1
        assert summary["counters"]["responses_moved"] == 8

    asyncio.run(scenario())


@pytest.mark.e2e
def test_sigterm_drains_a_node_and_its_responses_finish_elsewhere(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            leaver = await run.add_rollout("leaver")
            await run.until(lambda s: busy(s, "leaver") and s.rollout_tokens > 50)
            engine = freeze(leaver.pid)
            await run.add_rollout("stayer")
            await run.until(lambda s: busy(s, "leaver", "stayer"))
            leaver.terminate()
            os.kill(engine, signal.SIGCONT)
            assert await asyncio.wait_for(leaver.wait(), DEADLINE_S) == 0
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 16
        summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
        assert summary["counters"]["nodes_lost"] == 0
        assert summary["counters"]["responses_moved"] == 8

    asyncio.run(scenario())


def test_engine_that_dies_is_started_again_and_nothing_is_lost(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            daemon = await run.add_rollout("a")
            await run.until(lambda s: busy(s, "a") and s.rollout_tokens > 50)
            [engine] = children_of(daemon.pid)
            os.kill(engine, signal.SIGKILL)
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 16

    asyncio.run(scenario())


@pytest.mark.e2e
def test_engine_that_hangs_is_killed_and_started_again(tmp_path: Path):
    async def scenario():
        node = {"heartbeat_s": 0.1, "patience_s": 3.0}
        async with a_run(tmp_path, **SLOW, node=node) as run:
            daemon = await run.add_rollout("a")
            await run.until(lambda s: busy(s, "a") and s.rollout_tokens > 50)
            watched = os.pidfd_open(freeze(daemon.pid))
            await asyncio.wait_for(asyncio.to_thread(wait_readable, watched), DEADLINE_S)
            os.close(watched)
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 16
            output, _ = await asyncio.wait_for(daemon.communicate(), DEADLINE_S)
            assert b"hangs: no answer for 3 s" in output
        summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
        assert summary["counters"]["nodes_lost"] == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_no_engine_outlives_a_daemon_that_was_killed(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            daemon = await run.add_rollout("a")
            await run.until(lambda s: busy(s, "a"))
            [engine] = children_of(daemon.pid)
            watched = os.pidfd_open(engine)
            daemon.kill()
            await asyncio.wait_for(asyncio.to_thread(wait_readable, watched), DEADLINE_S)
            os.close(watched)
            await run.add_rollout("b")
            await run.until_finished()

    asyncio.run(scenario())


@pytest.mark.e2e
def test_rollout_node_leaves_when_its_coordinator_falls_silent(tmp_path: Path):
    async def scenario():
        node = {"heartbeat_s": 0.1, "patience_s": 3.0}
        async with a_run(tmp_path, **SLOW, node=node) as run:
            daemon = await run.add_rollout("a")
            await run.until(lambda s: busy(s, "a"))
            await run.silence()
            output, errors = await asyncio.wait_for(daemon.communicate(), DEADLINE_S)
            assert daemon.returncode == 1
            last = errors.decode().strip().splitlines()[-1]
            assert last.startswith("lightrl: ")
            assert "nothing received from the coordinator" in last
            assert b"Traceback" not in output + errors

    asyncio.run(scenario())


def test_broken_connection_costs_no_token(tmp_path: Path):
    """What was in flight is lost without a trace, but the node has kept it and goes on."""

    async def scenario():
        async with a_run(tmp_path, **SLOW) as run, Proxy(run.head.address) as proxy:
            daemon = await run.add_rollout("a", through=proxy.address)
            for num_tokens in (50, 1000, 2000):
                await run.until(lambda s, n=num_tokens: busy(s, "a") and s.rollout_tokens > n)
                proxy.cut()
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 16
            output, _ = await asyncio.wait_for(daemon.communicate(), DEADLINE_S)
            assert output.count(b"reconnected to the coordinator") >= 3
        summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
        assert summary["counters"]["holes"] == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_node_that_hung_beyond_its_lease_is_taken_in_again(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            hung = await run.add_rollout("hung")
            await run.until(lambda s: busy(s, "hung") and s.rollout_tokens > 50)
            os.kill(hung.pid, signal.SIGSTOP)
            await run.until(lambda s: all(n.name != "hung" for n in s.nodes))
            os.kill(hung.pid, signal.SIGCONT)
            await run.until(lambda s: busy(s, "hung"))
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 16
            assert await asyncio.wait_for(hung.wait(), DEADLINE_S) == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_engine_that_was_stopped_for_a_while_costs_nothing(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **SLOW) as run:
            daemon = await run.add_rollout("a")
            await run.until(lambda s: busy(s, "a") and s.rollout_tokens > 50)
            engine = freeze(daemon.pid)
            seen = await run.until(lambda _: True)
            await run.until(lambda s: s.elapsed_s > seen.elapsed_s + run.config.node.lease_s)
            os.kill(engine, signal.SIGCONT)
            await run.until_finished()
            assert run.head.succeeded
            assert require_exact(run, tmp_path) == 16
        summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
        assert summary["counters"]["nodes_lost"] == 0
        assert summary["counters"]["responses_moved"] == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_garbage_on_the_coordinators_socket_is_counted_and_the_run_goes_on(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path) as run:
            stranger = zmq.Context.instance().socket(zmq.DEALER)  # that has the key
            stranger.set(zmq.LINGER, 0)
            public, secret = key_pair(run.key)
            stranger.set(zmq.CURVE_PUBLICKEY, public)
            stranger.set(zmq.CURVE_SECRETKEY, secret)
            stranger.set(zmq.CURVE_SERVERKEY, z85.encode(coordinator_public_key(run.key)))
            stranger.connect(run.head.address)
            for frames in ([b"\xc1"], [b"", b"x"], [b"\x92\xa5Hello\x80"], [b"a", b"b", b"c"]):
                stranger.send_multipart(frames)
            await run.until(lambda s: s.counters["bad_frames"] == 4)
            stranger.close()
            await run.add_rollout("a")
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())


def freeze(daemon: int) -> int:
    """Stops the engine of a rollout daemon, which itself lives on; returns the engine's pid."""
    [engine] = children_of(daemon)
    os.kill(engine, signal.SIGSTOP)
    return engine


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_readable(descriptor: int) -> None:
    """Blocks until the process behind a pidfd has ended."""
    import select

    select.select([descriptor], [], [], DEADLINE_S)
