"""An environment node as its coordinator sees it: with workers, the command line, a connection that
breaks."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightrl.keys import ENVIRONMENT_FILE
from lightrl.messages.episodes import (
    BeginEpisode,
    EndEpisode,
    EpisodeEnded,
    Observed,
    StepEpisode,
)
from lightrl.messages.nodes import Bye, Drain, Heartbeat, Hello
from lightrl.messages.weights import WeightsEndpoint
from lightrl.model_files import load_tokenizer
from lightrl.wire import pack_i32, unpack_i32
from tests.support.daemons import DEADLINE_S, QUICKSTART, Proxy, make_config
from tests.support.scripted_coordinator import ScriptedHead, rollout_daemon

pytestmark = pytest.mark.usefixtures("warm_daemons")

GUESS = """
class Guess:
    def reset(self, row, seed):
        self.n = row["n"]
        return "1+1="

    def step(self, text):
        guess = int(text)
        return ("11" if guess < self.n else "22", float(guess == self.n), guess == self.n)
"""
BEGIN = BeginEpisode("p0@0#0", 1, seed=3, max_tokens=9, row='{"index": 0, "n": 5}')


def scripted(tmp_path: Path) -> ScriptedHead:
    (tmp_path / "guess.py").write_text(GUESS)
    environment = {"source": f"{tmp_path / 'guess.py'}:Guess", "workers": 1}
    return ScriptedHead(make_config(tmp_path, environment=environment), tmp_path)


@contextlib.asynccontextmanager
async def environment_daemon(
    head: ScriptedHead, address: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Its role follows from the key."""
    key_file = head.folder / ENVIRONMENT_FILE
    options = ("--slots", "7", "--workers", "1")
    async with rollout_daemon(address or head.address, key_file, *options) as process:
        yield process


def tokens(text: str) -> bytes:
    tokenizer = load_tokenizer(str(QUICKSTART / "model"))
    return pack_i32(tokenizer(text, add_special_tokens=False)["input_ids"])


async def admitted(head: ScriptedHead) -> Hello:
    hello = await head.hello()
    head.send(head.welcome)
    return hello


def test_an_environment_node_plays_an_episode_and_leaves_when_it_is_asked_to(tmp_path: Path):
    async def scenario():
        async with scripted(tmp_path) as head, environment_daemon(head) as process:
            hello = await admitted(head)
            assert (hello.roles, hello.slots, hello.running) == (("environment",), 7, ())
            head.send(BEGIN)
            first = await head.expect(Observed)
            assert (first.turn, first.offset, first.max_new_tokens) == (0, 0, 9)
            assert unpack_i32(first.token_ids)
            head.send(StepEpisode(BEGIN.response, 1, 0, tokens("3"), "stop"))
            second = await head.expect(Observed)
            assert second.offset == len(first.token_ids + tokens("3")) // 4
            said = [m["content"] for m in json.loads(second.record)]
            assert (second.reward, said) == (0.0, ["3", "11"])
            head.send(StepEpisode(BEGIN.response, 1, 1, tokens("5"), "stop"))
            end = await head.expect(EpisodeEnded)
            assert (end.stop, end.reward, end.turn_reward) == ("done", 1.0, 1.0)
            head.send(EndEpisode(((BEGIN.response, 1),)))
            await head.expect(Heartbeat, lambda beat: beat.load.running == 0)
            process.send_signal(signal.SIGTERM)
            assert (await head.expect(Drain)).node == "a"
            assert (await head.expect(Bye)).ok
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
            assert not any(isinstance(m, WeightsEndpoint) for m in head.heard)

    asyncio.run(scenario())


def test_after_a_broken_connection_it_still_holds_its_episodes_and_answers_again(tmp_path: Path):
    async def scenario():
        async with (
            scripted(tmp_path) as head,
            Proxy(head.address) as proxy,
            environment_daemon(head, proxy.address),
        ):
            incarnation = (await admitted(head)).incarnation
            head.send(BEGIN)
            first = await head.expect(Observed)
            proxy.cut()
            hello = await head.hello()
            assert (hello.incarnation, hello.running) == (incarnation, ((BEGIN.response, 1),))
            head.send(StepEpisode(BEGIN.response, 1, 0, tokens("3"), "stop"))  # too early
            head.send(head.welcome)
            assert await head.expect(Observed) == first
            head.send(StepEpisode(BEGIN.response, 1, 0, tokens("3"), "stop"))
            assert (await head.expect(Observed)).turn == 1

    asyncio.run(scenario())


def test_environment_that_cannot_be_loaded_is_one_line(tmp_path: Path):
    async def scenario():
        async with scripted(tmp_path) as head:
            (tmp_path / "guess.py").write_text("class Other: pass\n")
            async with environment_daemon(head) as process:
                await admitted(head)
                assert "guess.py" in (await head.expect(Bye, lambda bye: not bye.ok)).reason
                _, said = await asyncio.wait_for(process.communicate(), DEADLINE_S)
                assert process.returncode == 1
                assert "guess.py" in said.decode().splitlines()[-1]
                assert "Traceback" not in said.decode()

    asyncio.run(scenario())


def test_run_without_episodes_has_no_use_for_an_environment_node(tmp_path: Path):
    async def scenario():
        async with (
            ScriptedHead(make_config(tmp_path), tmp_path) as head,
            environment_daemon(head),
        ):
            await admitted(head)
            bye = await head.expect(Bye)
            assert "this run has none, see the section environment" in bye.reason

    asyncio.run(scenario())
