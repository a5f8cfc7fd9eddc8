"""A session: what continues its conversation, which requests are the same, what is told instead."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lightrl.endpoints.api import Answered, ApiError, Asked, EpisodeReport
from lightrl.environments.calls import TurnTokens
from lightrl.environments.sessions import MAX_NEW, Session
from tests.support.daemons import DEADLINE_S

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *calls: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    named = [{"function": {"name": name, "arguments": {"a": 1}}, "id": "x"} for name in calls]
    return {**message, "tool_calls": named} if calls else message


def tokens(*ids: int, after: tuple[int, ...] = (), finish: Any = "stop") -> TurnTokens:
    return TurnTokens(array("i", after), array("i", ids), array("f", [-0.5] * len(ids)), finish, 3)


def play(story: Callable[[Session], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story(Session("key", "agent: row 1", {}, 7))

    asyncio.run(limited())


async def asks(
    session: Session, *messages: dict[str, Any], **more: Any
) -> "asyncio.Task[Answered]":
    """Send a request, and wait until it is open."""
    task = asyncio.create_task(session.ask(Asked(messages or None, **more)))
    await session.changed.wait()
    session.changed.clear()
    return task


async def refused(session: Session, *messages: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ApiError) as e:
        await session.ask(Asked(messages or None, **more))
    assert "\n" not in str(e.value)
    return str(e.value)


def test_each_request_is_an_observation_and_each_turn_its_answer():
    async def story(session: Session) -> None:
        first = await asks(session, {"role": "developer", "content": "Play."}, user("?"))
        seen = session.take()
        assert [m["role"] for m in seen.messages] == ["system", "user"]
        session.answer(said("12"), tokens(5, after=(1, 2)))
        answered = await first
        assert answered.message == said("12")
        assert (list(answered.prompt_token_ids), list(answered.token_ids)) == ([1, 2], [5])
        assert (list(answered.logprobs), answered.weight_version) == ([-0.5], 3)
        head = [{"role": "system", "content": "Play."}, user("?"), said(" 12\n")]
        await asks(session, *head, user(">"), user("again"), max_tokens=4)
        seen = session.take()
        assert [m["content"] for m in seen.messages] == [">", "again"]
        assert seen.max_tokens == 4

    play(story)


def test_calls_have_ids_of_their_own_and_results_come_with_them():
    async def story(session: Session) -> None:
        first = await asks(session, user("1+1?"), tools=[TOOL])
        assert session.take().tools == [TOOL]
        session.answer(said("", "add", "add"), tokens(5))
        calls = (await first).message["tool_calls"]
        assert [call["id"] for call in calls] == ["t0000c000", "t0000c001"]
        result = {"role": "tool", "tool_call_id": "t0000c000", "content": "2"}
        kept = {**said("", "add", "add"), "refusal": None}  # the client has other ids
        await asks(session, user("1+1?"), kept, result, tools=[TOOL])
        seen = session.take()
        assert (seen.messages, seen.num_tool_calls) == ([result], 1)

    play(story)


def test_turn_without_text_and_calls_may_be_left_out():
    async def story(session: Session) -> None:
        first = await asks(session, user("?"))
        session.take()
        session.answer({**said("\n"), "reasoning_content": "cut"}, tokens(5))
        await first
        assert "no new message" in await refused(session, user("?"))  # a second sample
        second = await asks(session, user("?"), user(">"))
        assert session.take().messages == [user(">")]
        session.answer(said("12"), tokens(6))
        await second
        assert "message 2 (assistant)" in await refused(session, user("?"), user(">"), user("."))
        await asks(session, user("?"), said(""), user(">"), said("12"), user("."))
        assert session.take().messages == [user(".")]

    play(story)


def test_request_that_is_sent_again_gets_the_same_answer():
    async def story(session: Session) -> None:
        first = await asks(session, user("?"))
        again = asyncio.create_task(session.ask(Asked([user("?")])))
        session.take()
        await asyncio.sleep(0)
        first.cancel()
        session.answer(said("12"), tokens(5))
        assert (await again).message == said("12")
        retried = await session.ask(Asked([user("?")], is_retry=True))
        assert list(retried.token_ids) == [5]
        assert "message 1 (assistant)" in await refused(session, user("?"))  # a second sample

    play(story)


def test_answer_that_nobody_received_is_given_to_the_next_who_asks():
    async def story(session: Session) -> None:
        first = await asks(session, user("?"))
        first.cancel()
        await asyncio.wait([first])
        session.take()
        session.answer(said("12"), tokens(5))
        assert (await session.ask(Asked([user("?")]))).message == said("12")

    play(story)


def test_conversation_that_is_not_continued_is_refused():
    async def story(session: Session) -> None:
        first = await asks(session, user("?"), tools=[TOOL])
        session.take()
        other = await refused(session, user("!"))
        assert other == "another request of this episode is open: send one at a time"
        session.answer(said("12"), tokens(5))
        await first
        why = await refused(session, user("?"), said("13"), user(">"), tools=[TOOL])
        assert why.startswith("message 1 (assistant) is not the one that was sent or answered")
        assert "message 0 (user)" in await refused(session, user("new"), tools=[TOOL])
        missing = await refused(session, user("?"), tools=[TOOL])
        assert missing.startswith("message 1 (assistant) of this episode is missing")
        assert "no new message" in await refused(session, user("?"), said("12"), tools=[TOOL])
        assert "tools differ" in await refused(session, user("?"), said("12"), user(">"))
        assert "either a chat or token ids" in await refused(session, token_ids=[1])

    play(story)


def test_tokens_continue_those_that_are_held():
    async def story(session: Session) -> None:
        first = await asks(session, token_ids=[1, 2])
        seen = session.take()
        assert (seen.token_ids, seen.messages) == ([1, 2], [])
        session.answer(said("12"), tokens(5, after=(1, 2)))
        await first
        for ids in ([1, 2, 5], [1, 2, 6, 7], [1]):
            assert "3 of prompt and turns" in await refused(session, token_ids=ids)
        second = await asks(session, token_ids=[1, 2, 5, 8])
        again = session.take()
        assert again.token_ids == [1, 2, 5, 8]
        assert again.digest != seen.digest
        second.cancel()

    play(story)


def test_limits_answer_the_open_request_and_all_later_ones():
    async def story(session: Session) -> None:
        first = await asks(session, user("?"))
        session.take()
        session.end("the limits are used up")
        with pytest.raises(ApiError, match="the limits are used up") as e:
            await first
        assert (e.value.status, e.value.code) == (400, "context_length_exceeded")
        assert await refused(session, user("?"), said(""), user("!")) == "the limits are used up"
        session.report(EpisodeReport(0.5))
        assert session.reported.reward == 0.5

    play(story)


def test_agent_that_outlived_its_node_goes_on_where_it_was():
    """Its request has turns that the session, which begins anew, is given again as recorded."""

    async def story(session: Session) -> None:
        digests: list[str] = []
        held: list[dict[str, Any]] = []
        for text, turn in (("?", "12"), (">", "19")):
            held.append(user(text))
            task = await asks(session, *held)
            digests.append(session.take().digest)
            session.answer(said(turn), tokens(5))
            held.append((await task).message)
        held.append(user("<"))
        begun_again = Session("key", "agent: row 1", {}, 7)
        task = await asks(begun_again, *held)
        assert begun_again.take(digests[0]).digest == digests[0]
        begun_again.answer(said("12"), tokens(5))
        assert begun_again.has_request
        assert begun_again.take(digests[1]).digest == digests[1]
        begun_again.answer(said("19"), tokens(5))
        assert begun_again.take().messages == [user("<")]
        begun_again.answer(said("16", "add"), tokens(6))
        [call] = (await task).message["tool_calls"]
        assert call["id"] == "t0002c000"  # as if it had played the turns before

    play(story)


def test_observation_that_no_record_can_hold_is_refused():
    async def story(session: Session) -> None:
        assert "at most 1,048,576" in await refused(session, user("x" * MAX_NEW))
        assert "at most 1,048,576" in await refused(session, token_ids=[1] * (MAX_NEW + 1))

    play(story)
