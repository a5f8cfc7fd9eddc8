"""The agent of an environment node: what it answers, and what becomes of episodes whose worker
dies."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.environments.agent import EnvironmentAgent
from lightrl.environments.calls import EnvironmentRaised, StepTimedOut, WorkerLost
from lightrl.errors import ConfigError, LightRLError
from lightrl.messages.episodes import (
    BeginEpisode,
    EndEpisode,
    EpisodeEnded,
    Observed,
    RecordedTurn,
    StepEpisode,
)
from lightrl.messages.message import Message
from lightrl.transport.validate import check_bounds
from lightrl.wire import MESSAGES, pack_i32, unpack_i32
from tests.support.daemons import DEADLINE_S, make_config
from tests.support.fake_environment import BEGINS, CLOSES, FakePool, FakeRenderer

NAME = "p7@0#3"
BEGIN = BeginEpisode(NAME, 1, seed=9, max_tokens=40, row='{"index": 7}')


class Node:
    """An agent, and what it sends."""

    def __init__(self, agent: EnvironmentAgent, pool: FakePool) -> None:
        self.agent = agent
        self.pool = pool
        self.sent: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, message: Message) -> None:
        check_bounds(MESSAGES.decode(MESSAGES.encode(message)))
        self.sent.put_nowait(message)

    async def answer(self) -> Observed | EpisodeEnded:
        async with asyncio.timeout(DEADLINE_S):
            message = await self.sent.get()
        assert isinstance(message, Observed | EpisodeEnded)
        return message

    async def begin(self, message: BeginEpisode = BEGIN) -> Observed | EpisodeEnded:
        self.agent.handle(message)
        return await self.answer()

    async def step(self, turn: int, text: str, incarnation: int = 1) -> Observed | EpisodeEnded:
        self.agent.handle(stepped(turn, text, incarnation))
        return await self.answer()

    async def observed(self, turn: int, text: str) -> Observed:
        answer = await self.step(turn, text)
        assert isinstance(answer, Observed), answer
        return answer

    async def ended(self, turn: int, text: str) -> EpisodeEnded:
        answer = await self.step(turn, text)
        assert isinstance(answer, EpisodeEnded), answer
        return answer


def ids_of(text: str) -> bytes:
    return pack_i32([ord(c) for c in text])


def stepped(turn: int, text: str, incarnation: int = 1, finish: Any = "stop") -> StepEpisode:
    return StepEpisode(NAME, incarnation, turn, ids_of(text), finish)


def inserted(text: str, turn: int) -> list[int]:
    return [*[CLOSES] * (turn > 0), *map(ord, text), BEGINS]


@contextlib.asynccontextmanager
async def node(tmp_path: Path, pool: FakePool, **settings: Any) -> AsyncIterator[Node]:
    given = {"source": "guess.py:Guess", "max_length": 200, **settings}
    few = {"max_response_length": 5}  # in the config only: BEGIN has its own limit
    config = make_config(tmp_path, environment=given, data={"path": ""}, rollout=few)
    made: list[Node] = []
    agent = EnvironmentAgent(config, lambda: pool, FakeRenderer, lambda m: made[0].send(m))  # type: ignore[arg-type]
    made.append(Node(agent, pool))
    running = asyncio.create_task(agent.run())
    try:
        yield made[0]
        assert not running.done() or running.result()
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert pool.calls[-1] == "stop"


def played(tmp_path: Path, story: Any, pool: FakePool | None = None, **settings: Any) -> None:
    async def scenario() -> None:
        async with node(tmp_path, pool or FakePool(), **settings) as at:
            await story(at)

    asyncio.run(scenario())


def recorded(observations: list[Observed], *texts: str) -> tuple[RecordedTurn, ...]:
    return tuple(
        RecordedTurn(o.token_ids, o.digest, ids_of(t), "stop", o.reward, o.state)
        for o, t in zip(observations, texts, strict=True)
    )


def test_episode_goes_from_observation_to_observation_to_its_end(tmp_path: Path):
    async def story(at: Node) -> None:
        first = await at.begin()
        assert isinstance(first, Observed)
        assert (first.turn, first.offset, first.max_new_tokens) == (0, 0, 40)
        assert unpack_i32(first.token_ids) == inserted("seed 9", 0)
        assert json.loads(first.record) == [{"role": "user", "content": "seed 9"}]
        assert (first.reward, first.seconds, first.state) == (None, 0.5, b"0")
        second = await at.observed(0, "up")
        assert (second.turn, second.offset, second.max_new_tokens) == (1, 9, 38)
        assert unpack_i32(second.token_ids) == inserted("up 1", 1)
        assert second.reward == 0.25
        assert [m["role"] for m in json.loads(second.record)] == ["assistant", "user"]
        assert at.agent.held == ((NAME, 1),)
        end = await at.ended(1, "quit")
        assert (end.turn, end.stop, end.reward, end.turn_reward) == (2, "done", 0.5, 0.25)
        assert json.loads(end.record)[0] == {"role": "assistant", "content": "quit"}
        assert end.metrics == {"guesses": 2.0}  # not the one that a terminal would obey
        at.agent.handle(EndEpisode(((NAME, 1),)))
        assert (at.agent.held, at.pool.num_open) == ((), 0)

    pool = FakePool()
    pool.metrics = {"guesses": 2.0, "\x1b[2J": 1.0, "x" * 300: 1.0}
    played(tmp_path, story, pool)


@pytest.mark.parametrize(
    ("settings", "stop", "rewards"),
    [
        ({"max_turns": 1}, "turns", (0.25, 0.25)),
        ({"max_length": 12}, "context", (0.25, 0.25)),
        ({"max_turns": 1, "reward": None}, "turns", (0.0, None)),
        ({"max_turns": 1, "final": 2.0}, "turns", (2.25, 2.25)),
        ({"max_length": 12, "reward": None, "final": 2.0}, "context", (2.0, 2.0)),
    ],
)
def test_limits_end_an_episode_with_the_reward_so_far(
    tmp_path: Path, settings: dict[str, Any], stop: str, rewards: tuple[float, float | None]
):
    pool = FakePool()
    pool.reward, pool.final = settings.pop("reward", 0.25), settings.pop("final", None)

    async def story(at: Node) -> None:
        await at.begin()
        end = await at.ended(0, "up")
        assert (end.stop, end.reward, end.turn_reward, end.turn) == (stop, *rewards, 1)

    played(tmp_path, story, pool, **settings)


def test_environment_that_ends_without_a_reward_gives_none(tmp_path: Path):
    async def story(at: Node) -> None:
        await at.begin()
        end = await at.ended(0, "quit")
        assert (end.stop, end.reward) == ("done", None)

    pool = FakePool()
    pool.reward = None
    played(tmp_path, story, pool)


def test_next_turn_has_the_tokens_that_every_limit_leaves(tmp_path: Path):
    async def story(at: Node) -> None:
        first = await at.begin(BeginEpisode(NAME, 1, seed=9, max_tokens=6))
        assert isinstance(first, Observed)
        assert first.max_new_tokens == 5  # environment.max_turn_length
        assert (await at.observed(0, "abcd")).max_new_tokens == 2  # max_tokens
        end = await at.ended(1, "no")
        assert (end.stop, end.reward) == ("length", 0.5)

    played(tmp_path, story, max_turn_length=5)


@pytest.mark.parametrize("reward", [None, 0.75])
def test_turn_that_was_cut_ends_the_episode_and_is_not_stepped(
    tmp_path: Path, reward: float | None
):
    async def story(at: Node) -> None:
        await at.begin(BeginEpisode(NAME, 1, seed=9, max_tokens=9))
        at.agent.handle(stepped(0, "half a wo", finish="length"))
        end = await at.answer()
        assert isinstance(end, EpisodeEnded)
        assert (end.stop, end.reward) == ("length", reward or 0.0)
        assert json.loads(end.record) == [{"role": "assistant", "content": "half a wo"}]
        assert at.pool.calls == ["reset", "end half a wo"]

    pool = FakePool()
    pool.final = reward
    played(tmp_path, story, pool)


def test_agent_may_ask_with_token_ids_and_for_fewer_tokens(tmp_path: Path):
    async def story(at: Node) -> None:
        first = await at.begin()
        assert isinstance(first, Observed)
        assert (unpack_i32(first.token_ids), first.max_new_tokens) == ([104, 105], 3)
        assert json.loads(first.record) == [{"role": "user", "content": "hi"}]
        at.agent.handle(stepped(0, "abc", finish="length"))
        second = await at.answer()
        assert isinstance(second, Observed)
        assert (unpack_i32(second.token_ids), second.max_new_tokens) == ([33], 37)
        assert at.pool.calls == ["reset", "step abc"]

    pool = FakePool()
    held = [*b"hi", *b"abc"]
    pool.tokens = [{"token_ids": held[:2], "max_tokens": 3}, {"token_ids": [*held, 33]}]
    played(tmp_path, story, pool)


def test_environment_that_is_lost_before_it_gives_its_last_reward_gives_no_score(tmp_path: Path):
    async def story(at: Node) -> None:
        await at.begin()
        at.pool.final, at.pool.faults = 1.0, [None, WorkerLost("its worker was lost", True)]
        end = await at.ended(0, "up")
        assert (end.stop, end.reward) == ("failed", None)

    played(tmp_path, story, max_turns=1)


@pytest.mark.parametrize(
    ("fault", "stop", "failure"),
    [
        (EnvironmentRaised("step raised ValueError: x"), "failed", "step raised ValueError: x"),
        (StepTimedOut("took longer"), "timeout", ""),
    ],
    ids=["raised", "timeout"],
)
def test_step_that_fails_ends_the_episode(
    tmp_path: Path, fault: LightRLError, stop: str, failure: str
):
    async def story(at: Node) -> None:
        await at.begin()
        at.pool.faults = [fault]
        end = await at.ended(0, "up")
        named = f"guess.py:Guess: row 7: {failure}" if failure else ""
        assert (end.stop, end.failure) == (stop, named)
        assert end.reward == (None if failure else 0.0)

    played(tmp_path, story)


@pytest.mark.parametrize("fault", [EnvironmentRaised("no"), StepTimedOut("no")], ids=str)
def test_reset_that_fails_gives_no_score(tmp_path: Path, fault: LightRLError):
    async def story(at: Node) -> None:
        at.pool.faults = [fault]
        end = await at.begin()
        assert isinstance(end, EpisodeEnded)
        assert (end.stop, end.reward, end.turn) == ("failed", None, 0)
        assert end.failure.startswith("guess.py:Guess: row 7: no")

    played(tmp_path, story)


def test_first_observation_that_does_not_fit_gives_no_score(tmp_path: Path):
    async def story(at: Node) -> None:
        end = await at.begin()
        assert isinstance(end, EpisodeEnded)
        assert end.stop == "failed"
        assert "of 7 tokens, does not fit into 7 tokens (environment.max_length)" in end.failure

    played(tmp_path, story, max_length=7)


def test_reward_that_is_no_number_gives_no_score(tmp_path: Path):
    async def story(at: Node) -> None:
        await at.begin()
        assert (await at.ended(0, "up")).failure.endswith("it returned the reward nan")

    pool = FakePool()
    pool.reward = float("nan")
    played(tmp_path, story, pool)


# Messages that come twice, late or never


def test_answers_are_sent_again_after_a_reconnect_until_the_next_order(tmp_path: Path):
    async def story(at: Node) -> None:
        first = await at.begin()
        at.agent.handle(BEGIN)  # says nothing new
        at.agent.resend()
        assert await at.answer() == first
        second = await at.step(0, "up")
        at.agent.resend()
        assert await at.answer() == second
        at.agent.handle(stepped(0, "up"))  # again
        assert await at.answer() == second
        end = await at.step(1, "quit")
        at.agent.resend()
        assert await at.answer() == end
        at.agent.handle(EndEpisode(((NAME, 1),)))
        at.agent.resend()
        assert at.sent.empty()
        assert at.pool.calls == ["reset", "step up", "step quit"]

    played(tmp_path, story)


def test_orders_about_another_incarnation_are_ignored(tmp_path: Path):
    async def story(at: Node) -> None:
        await at.begin(BeginEpisode(NAME, 2, seed=9, max_tokens=40))
        at.agent.handle(BEGIN)
        at.agent.handle(stepped(0, "old"))
        at.agent.handle(EndEpisode(((NAME, 1), ("p9@0#0", 1))))
        assert at.agent.held == ((NAME, 2),)
        assert isinstance(await at.step(0, "up", incarnation=2), Observed)
        again = await at.begin(BeginEpisode(NAME, 3, seed=8, max_tokens=40))
        assert isinstance(again, Observed)
        assert again.incarnation == 3
        assert at.pool.num_open == 1
        assert at.pool.calls == ["reset", "step up", "reset"]

    played(tmp_path, story)


def test_coordinator_that_has_lost_the_newest_turns_gets_an_environment_of_then(tmp_path: Path):
    async def story(at: Node) -> None:
        await at.begin()
        one = await at.observed(0, "up")
        await at.observed(1, "up")
        at.pool.calls.clear()
        other = await at.observed(1, "down")
        assert other.offset == one.offset + len(one.token_ids) // 4 + len("down")
        assert unpack_i32(other.token_ids) == inserted("down 2", 1)
        assert at.pool.calls == ["reset", "step up", "step down"]
        assert at.pool.num_open == 1
        hole = await at.ended(5, "up")
        assert hole.failure.endswith("turn 5 of 3 cannot be stepped")

    played(tmp_path, story)


def test_slow_reset_does_not_hold_up_others_and_is_given_up_when_it_is_not_wanted(tmp_path: Path):
    async def story(at: Node) -> None:
        first = await at.begin()
        at.pool.may_reset.clear()
        at.agent.handle(BeginEpisode("p8@0#0", 1, seed=1, max_tokens=40))
        assert isinstance(first, Observed)
        await at.observed(0, "up")
        assert at.agent.held == ((NAME, 1), ("p8@0#0", 1))
        at.agent.handle(EndEpisode((("p8@0#0", 1),)))
        at.pool.may_reset.set()
        await at.observed(1, "up")
        assert at.sent.empty()
        assert at.pool.num_open == 1

    played(tmp_path, story)


# Environments that are lost


@pytest.mark.parametrize(
    ("resume", "calls"),
    [
        ("replay", ["reset", "step up", "step up"]),
        ("snapshot", ["load 1", "step up"]),
    ],
)
def test_episode_whose_worker_died_goes_on_as_if_nothing_had_been(
    tmp_path: Path, resume: str, calls: list[str]
):
    async def story(at: Node) -> None:
        await at.begin()
        await at.observed(0, "up")
        at.pool.calls.clear()
        at.pool.kill()
        observed = await at.observed(1, "up")
        assert unpack_i32(observed.token_ids) == inserted("up 2", 1)
        assert at.pool.calls == calls
        assert at.pool.num_open == 1

    played(tmp_path, story, resume=resume)


@pytest.mark.parametrize("num_deaths", [2, 3])
def test_call_in_which_the_worker_dies_is_repeated_twice(tmp_path: Path, num_deaths: int):
    async def story(at: Node) -> None:
        await at.begin()
        died = WorkerLost("its worker was lost", in_call=True, is_suspect=True)
        at.pool.faults = [died, *[None, died] * (num_deaths - 1)]
        answer = await at.step(0, "up")
        if num_deaths == 2:
            assert isinstance(answer, Observed)
            assert unpack_i32(answer.token_ids) == inserted("up 1", 1)
        else:
            assert isinstance(answer, EpisodeEnded)
            assert (answer.stop, answer.reward) == ("failed", None)
            assert "its worker was lost; 3 times in this episode" in answer.failure

    played(tmp_path, story)


def test_environment_that_cannot_be_resumed_gives_no_score(tmp_path: Path):
    async def story(at: Node) -> None:
        await at.begin()
        at.pool.kill()
        assert "environment was lost; environment.resume = once" in (await at.ended(0, "a")).failure

    played(tmp_path, story, resume="once")


@pytest.mark.parametrize("resume", ["replay", "snapshot"])
def test_episode_of_another_node_is_resumed_from_what_is_recorded(tmp_path: Path, resume: str):
    async def story(at: Node) -> None:
        first = await at.begin()
        second = await at.observed(0, "up")
        turns = recorded([first, second], "up", "quit")  # type: ignore[list-item]
        at.pool.calls.clear()
        end = await at.begin(BeginEpisode(NAME, 2, seed=9, max_tokens=40, turns=turns))
        assert isinstance(end, EpisodeEnded)
        assert (end.turn, end.stop, end.reward) == (2, "done", 0.5)
        restored = ["reset", "step up"] if resume == "replay" else ["load 1"]
        assert at.pool.calls == [*restored, "step quit"]

    played(tmp_path, story, resume=resume)


@pytest.mark.parametrize("at_reset", [True, False])
def test_replay_that_gives_another_observation_ends_as_diverged(tmp_path: Path, at_reset: bool):
    async def story(at: Node) -> None:
        first = await at.begin()
        second = await at.observed(0, "up")
        turns = recorded([first, second], "up", "quit")  # type: ignore[list-item]
        if not at_reset:
            text = "down"  # what is stepped in the replay differs from what was said
            turns = (recorded([first], text)[0], turns[1])  # type: ignore[list-item]
        else:
            at.pool.drift = "!"
        end = await at.begin(BeginEpisode(NAME, 2, seed=9, max_tokens=40, turns=turns))
        assert isinstance(end, EpisodeEnded)
        assert (end.stop, end.reward) == ("diverged", None)
        what = "the first observation" if at_reset else "the observation of turn 1"
        assert f"{what} was another one when it was replayed" in end.failure

    played(tmp_path, story)


@pytest.mark.parametrize(
    ("resume", "repeats", "is_over"),
    [("replay", True, False), ("once", False, False), ("once", True, True)],
)
def test_tools_are_not_called_again_for_what_is_recorded(
    tmp_path: Path, resume: str, repeats: bool, is_over: bool
):
    async def story(at: Node) -> None:
        first = await at.begin()
        second = await at.observed(0, "add")
        turns = recorded([first, second], "add", "mul")  # type: ignore[list-item]
        at.pool.calls.clear()
        order = BeginEpisode(NAME, 2, seed=9, max_tokens=40, turns=turns, repeats=repeats)
        answer = await at.begin(order)
        assert isinstance(answer, EpisodeEnded if is_over else Observed)
        assert at.pool.calls == ([] if is_over else ["reset", "step mul"])

    played(tmp_path, story, FakePool(is_stateless=True), resume=resume, tools=["t.py:add"])


# The start


def test_orders_wait_until_the_workers_have_started_and_a_refusal_ends_the_role(tmp_path: Path):
    async def scenario() -> None:
        pool = FakePool()
        pool.unusable = ConfigError("guess.py:Guess: no such class")
        config = make_config(tmp_path, environment={"source": "guess.py:Guess"}, data={"path": ""})
        sent: list[Message] = []
        agent = EnvironmentAgent(config, lambda: pool, FakeRenderer, sent.append)  # type: ignore[arg-type]
        agent.handle(BEGIN)
        assert agent.held == ((NAME, 1),)
        with pytest.raises(ConfigError, match="no such class"):
            await agent.run()
        assert not sent

    asyncio.run(scenario())


def test_defect_of_the_agent_ends_the_role(tmp_path: Path):
    async def scenario() -> None:
        pool = FakePool()
        pool.faults = [ZeroDivisionError("a defect")]
        config = make_config(tmp_path, environment={"source": "guess.py:Guess"}, data={"path": ""})
        agent = EnvironmentAgent(config, lambda: pool, FakeRenderer, lambda _: None)  # type: ignore[arg-type]
        agent.handle(BEGIN)
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(DEADLINE_S):
                await agent.run()

    asyncio.run(scenario())
