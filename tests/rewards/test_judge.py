"""A judge behind a real HTTP endpoint on loopback."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from lightrl.config.reward import Judge, Reward
from lightrl.errors import RewardError
from lightrl.rewards import worker
from lightrl.rewards.judge import LONGEST_WAIT_S, JudgeReward, _Refused, pause_s, score_of
from lightrl.rewards.protocol import WorkerSetup
from lightrl.rewards.score import score
from lightrl.rewards.signatures import wrap
from tests.rewards.test_code import sample
from tests.support.reward_pool import reward_set

Reply = tuple[int, Any] | None  # status and JSON; None: the connection is cut


class Endpoint:
    """Answers chat completions by `reply`, which sees how many came before."""

    def __init__(self, reply: Callable[[int], Reply]) -> None:
        self._reply = reply
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(
            int(h.split(":")[1]) for h in head.lower().split("\r\n") if "content-length" in h
        )
        self.requests.append(json.loads(await reader.readexactly(size)))
        self.headers.append(head)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)  # others may come in between
        answer = self._reply(len(self.requests) - 1)
        self.at_once -= 1
        if answer is not None:
            body = json.dumps(answer[1]).encode()
            line = f"HTTP/1.1 {answer[0]} x\r\nretry-after: 0\r\nconnection: close\r\n"
            writer.write(f"{line}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(reply: Callable[[int], Reply]) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(reply)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield endpoint


def says(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}}]}


def judge_at(url: str, key: str = "", **settings: Any) -> JudgeReward:
    return JudgeReward(Judge(url=url, model="m", **settings), key)


async def judged(reply: Callable[[int], Reply], retries: int = 1) -> float | None:
    async with serving(reply) as endpoint:
        return await judge_at(endpoint.url, retries=retries)(sample("4", "4"))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 0.5", 0.5),
        ("I would say **Score**: 1", 1.0),
        ("score: 0\nno, Score: 7/10", 0.7),
        ("0.25", 0.25),
        ("Score: .5", 0.5),
        ("-.5", -0.5),
        ("Score: -1", -1.0),
        ("No idea.", None),
        ("There are 3 errors in it.", None),
        ("Score: 3/0", None),
        ("Score: 1.", 1.0),
        ("Score: 1e-3", 0.001),
        ("Score (0-1): 0.8", 0.8),
        ("Score 0-1, say.", None),
        ("Score: 0,5", None),
        ("", None),
    ],
)
def test_a_score_is_read_from_a_reply(reply: str, score: float | None) -> None:
    assert score_of(reply) == score


def test_a_score_that_the_usual_prompt_does_not_ask_for_is_none() -> None:
    assert asyncio.run(judged(lambda _: says("Score: 1000000"))) is None
    assert asyncio.run(judged(lambda _: says("Score: -1"))) is None

    async def other() -> float | None:
        async with serving(lambda _: says("Score: 7")) as endpoint:
            return await judge_at(endpoint.url, prompt="From 0 to 10: {response}")(sample("", ""))

    assert asyncio.run(other()) == 7.0


def test_pauses_double_up_to_a_limit() -> None:
    assert [pause_s(k, 1.0) for k in (0, 1, 2, 20)] == [0.5, 1.0, 2.0, LONGEST_WAIT_S]
    assert pause_s(3, 0.0) == pause_s(3, 1.0) / 2


async def _asks() -> None:
    async with serving(lambda _: says("Score: 1")) as endpoint:
        judge = judge_at(
            endpoint.url,
            "secret",
            prompt="Q {prompt} A {response} R {answer}",
            options={"max_tokens": 5},
        )
        assert await judge(sample("{answer}", "4")) == 1.0
        [request] = endpoint.requests
        assert request["messages"] == [{"role": "user", "content": "Q prompt A {answer} R 4"}]
        assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.0, 5)
        assert "Authorization: Bearer secret" in endpoint.headers[0]


def test_the_prompt_is_filled_and_the_key_is_sent() -> None:
    asyncio.run(_asks())


def test_overload_and_cut_connections_are_tried_again() -> None:
    replies = [(429, {"error": "slow down"}), None, says("Score: 1")]
    assert asyncio.run(judged(lambda k: replies[k], retries=2)) == 1.0


@pytest.mark.parametrize(
    ("asked", "wait_s"), [("7", 7.0), ("999", LONGEST_WAIT_S), ("tomorrow", 0.0), ("", 0.0)]
)
def test_an_endpoint_may_ask_for_a_longer_pause(asked: str, wait_s: float) -> None:
    refused = _Refused(httpx.Response(429, headers={"retry-after": asked} if asked else {}))
    assert (refused.wait_s, refused.passes) == (wait_s, True)


def test_after_the_last_try_there_is_no_score_but_a_reason() -> None:
    with pytest.raises(RewardError, match="status 503"):
        asyncio.run(judged(lambda _: (503, {"error": "overloaded"}), retries=1))


def test_a_refusal_is_not_tried_again() -> None:
    with pytest.raises(RewardError, match="status 401"):
        asyncio.run(judged(lambda k: (401, {"error": "key"}) if k == 0 else says("Score: 1")))


async def _many() -> None:
    async with serving(lambda _: says("Score: 1")) as endpoint:
        judge = judge_at(endpoint.url, concurrency=3)
        samples = [sample("4", "4")] * 20
        scores = await score([wrap(judge, "judge")], [1.0], samples)
        assert [s.reward for s in scores] == [1.0] * 20
        assert 1 <= endpoint.most_at_once <= 3


def test_calls_under_way_are_limited() -> None:
    asyncio.run(_many())


async def _checked(reply: Callable[[int], Reply]) -> None:
    async with serving(reply) as endpoint:
        await judge_at(endpoint.url).check()


async def _of_several_sets() -> None:
    async with serving(lambda _: says("Score: 1")) as endpoint:
        judge = Judge(url=endpoint.url, model="m", concurrency=4)
        reward = Reward(functions=("judge",), judge=judge, workers=2)
        setup = WorkerSetup(reward.model_dump_json(), (reward_set(reward),) * 3, "", 0)
        scorers = await asyncio.to_thread(worker.load_scorers, setup)
        assert len(endpoint.requests) == 1  # the check
        assert len({id(scorer.functions[0].turns) for scorer in scorers}) == 1


def test_sets_share_a_judge_and_its_limit() -> None:
    asyncio.run(_of_several_sets())


def test_a_first_call_that_fails_is_one_line() -> None:
    with pytest.raises(RewardError, match=r"judge: http.*status 404: .*no such model") as raised:
        asyncio.run(_checked(lambda _: (404, {"error": "no such model"})))
    assert "\n" not in str(raised.value)
    asyncio.run(_checked(lambda _: says("1")))


def test_nobody_at_the_address_is_one_line() -> None:
    with pytest.raises(RewardError, match="judge: http://127"):
        asyncio.run(judge_at("http://127.0.0.1:1/v1").check())


def test_a_field_that_nobody_fills_is_refused() -> None:
    with pytest.raises(RewardError, match=r"\{question\}"):
        judge_at("http://127.0.0.1:1/v1", prompt="{question}")


@pytest.mark.parametrize(
    ("url", "no_proxy", "is_direct"),
    [
        ("http://127.0.0.1:8000/v1", "", True),
        ("http://localhost:8000/v1", "", True),
        ("http://[::1]:8000/v1", "", True),
        ("http://0.0.0.0:8000/v1", "", True),
        ("http://LOCALHOST.:8000/v1", "", True),
        (f"http://{socket.gethostname()}:8000/v1", "", True),
        ("http://10.1.2.3:8000/v1", "", False),
        ("http://10.1.2.3:8000/v1", "10.1.2.3", True),
        ("http://10.1.2.3:8000/v1", "example.com, 10.1.2.3", True),
        ("http://judge.example.com/v1", ".example.com", True),
        ("http://judge.example.com:8000/v1", "judge.example.com:8000", True),
        ("http://judge.example.com/v1", "other.com", False),
        ("http://judge.example.com/v1", "*", True),
        ("http://10.1.2.3:8000/v1", "example.com, 10.0.0.0/8", True),
        ("http://11.1.2.3:8000/v1", "10.0.0.0/8", False),
        ("http://[fd00::1]:8000/v1", "10.0.0.0/8,fd00::/8", True),
    ],
)
def test_which_judges_are_asked_without_a_proxy(monkeypatch, url, no_proxy, is_direct):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", no_proxy)
    client = judge_at(url)._new_client()
    transport = client._transport_for_url(httpx.URL(url))
    assert (transport is client._transport) == is_direct


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_a_judge_on_this_machine_is_asked_although_a_proxy_is_set(monkeypatch, proxy):
    """Nobody listens there, and httpx may not know its protocol."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    assert asyncio.run(judged(lambda _: says("Score: 1"))) == 1.0
    asyncio.run(_checked(lambda _: says("1")))


def test_a_proxy_that_httpx_does_not_know_is_named(monkeypatch):
    monkeypatch.setenv("all_proxy", "gopher://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(RewardError, match=r"proxy of the environment: .*gopher"):
        asyncio.run(judge_at("http://judge.example.com/v1").check())


def test_a_network_that_httpx_cannot_read_is_one_line(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org,fd00::/8")
    with pytest.raises(RewardError, match=r"proxy of the environment: .*port"):
        asyncio.run(judge_at("http://judge.example.com/v1").check())
