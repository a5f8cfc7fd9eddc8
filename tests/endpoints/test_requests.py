"""Requests that are refused, and clients that do not behave. The server goes on after each."""

import asyncio
import contextlib
import http.client
import json
import socket
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightrl.endpoints import app
from lightrl.endpoints.api import ApiError, EpisodeReport, SamplingLimits
from tests.endpoints.scripted import (
    DEADLINE_S,
    ENVIRONMENT_KEY,
    KEY,
    ScriptedBackend,
    served,
    turn,
)

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES, TOKENS = "/v1/messages", "/inference/v1/generate"
USER = {"role": "user", "content": "?"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    RESPONSES: {"model": "m", "input": "?"},
    MESSAGES: {"model": "m", "max_tokens": 8, "messages": [USER]},
    TOKENS: {"model": "m", "token_ids": [1, 2]},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
HUGE = float("inf")  # written as 1e999
FORCED = {"type": "function", "function": {"name": "f"}}


def chat(**more):
    return CHAT, more


def message(**more):
    return CHAT, {"messages": [{"role": "user", "content": "?", **more}]}


def params(**more):
    return TOKENS, {"sampling_params": more}


# name of the parameter, and a field that is refused
REFUSED: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("n", chat(n=2)),
    ("best_of", chat(best_of=2)),
    ("echo", chat(echo=True)),
    ("presence_penalty", chat(presence_penalty=0.5)),
    ("frequency_penalty", chat(frequency_penalty=0.5)),
    ("repetition_penalty", chat(repetition_penalty=1.1)),
    ("logit_bias", chat(logit_bias={"5": 1})),
    ("min_p", chat(min_p=0.1)),
    ("temperature", chat(temperature=0.5)),
    ("top_p", chat(top_p=0.5)),
    ("top_k", chat(top_k=5)),
    ("stop", chat(stop=["."])),
    ("seed", chat(seed=1)),
    ("response_format", chat(response_format=SCHEMA)),
    ("tool_choice", chat(tool_choice="required")),
    ("tool_choice", chat(tool_choice=FORCED)),
    ("guided_json", chat(guided_json={})),
    ("guided_regex", chat(guided_regex="a")),
    ("structured_outputs", chat(structured_outputs={"regex": "a"})),
    ("grammar", chat(grammar="a")),
    ("top_logprobs", chat(logprobs=True, top_logprobs=2)),
    ("audio", chat(audio={})),
    ("messages[0].content", message(content=[IMAGE])),
    ("messages[0].content", message(content=[{"type": "input_audio"}])),
    ("previous_response_id", (RESPONSES, {"previous_response_id": "resp_1"})),
    ("conversation", (RESPONSES, {"conversation": "c"})),
    ("background", (RESPONSES, {"background": True})),
    ("text.format", (RESPONSES, {"text": {"format": {"type": "json_schema"}}})),
    ("tools[0].type", (RESPONSES, {"tools": [{"type": "web_search"}]})),
    ("input[0].type", (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]})),
    ("input[0].content", (RESPONSES, {"input": [{"role": "user", "content": [IMAGE]}]})),
    ("tools[0].type", (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]})),
    ("tool_choice", (MESSAGES, {"tool_choice": {"type": "any"}})),
    ("tool_choice", (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}})),
    ("stop_sequences", (MESSAGES, {"stop_sequences": ["."]})),
    ("messages[0].content", (MESSAGES, {"messages": [{"role": "user", "content": [IMAGE]}]})),
    ("logprobs", params(logprobs=2)),
    ("temperature", params(temperature=0.1)),
    ("structured_outputs", params(structured_outputs={})),
    ("stream", (TOKENS, {"stream": True})),
    ("features", (TOKENS, {"features": {"mm_hashes": {}}})),
]
# name of the parameter, and a field of a wrong type
WRONG: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("messages", chat(messages=None)),
    ("messages", chat(messages=[])),
    ("messages", chat(messages="?")),
    ("messages[0]", chat(messages=["?"])),
    ("messages[0].role", message(role="judge")),
    ("messages[0].role", message(role=["user"])),
    ("messages[0].content", message(content=5)),
    ("messages[0].content", message(content=None)),
    ("messages[0].content[0].text", message(content=[{"type": "text", "text": 5}])),
    ("messages[0].tool_call_id", message(role="tool")),
    (
        "messages[0].tool_calls[0].function.name",
        message(role="assistant", tool_calls=[{"id": "x"}]),
    ),
    ("tools", chat(tools={})),
    ("tools[0].function.name", chat(tools=[{"type": "function"}])),
    ("tools[0].type", chat(tools=[{"type": "custom"}])),
    ("tools[0].function.name", chat(tools=[{"type": "function", "function": {}}])),
    ("max_tokens", chat(max_tokens="8")),
    ("max_tokens", chat(max_tokens=0)),
    ("max_completion_tokens", chat(max_completion_tokens=1.5)),
    ("temperature", chat(temperature="hot")),
    ("temperature", chat(temperature=True)),
    ("stop", chat(stop=5)),
    ("stop", chat(stop=[5])),
    ("stream", chat(stream="yes")),
    ("stream_options", chat(stream_options=[])),
    ("logprobs", chat(logprobs=1)),
    ("n", chat(n=[])),
    ("input", (RESPONSES, {"input": None})),
    ("input", (RESPONSES, {"input": []})),
    ("input[0]", (RESPONSES, {"input": [5]})),
    ("input[0].role", (RESPONSES, {"input": [{}]})),
    ("input[0].call_id", (RESPONSES, {"input": [{"type": "function_call_output"}]})),
    ("input[0].name", (RESPONSES, {"input": [{"type": "function_call", "call_id": "x"}]})),
    ("instructions", (RESPONSES, {"instructions": 5})),
    ("messages[0].role", (MESSAGES, {"messages": [{"role": "tool"}]})),
    ("messages[0].content", (MESSAGES, {"messages": [{"role": "user"}]})),
    ("system", (MESSAGES, {"system": 5})),
    ("token_ids", (TOKENS, {"token_ids": []})),
    ("token_ids", (TOKENS, {"token_ids": "1"})),
    ("token_ids", (TOKENS, {"token_ids": [1, -1]})),
    ("token_ids", (TOKENS, {"token_ids": [True]})),
    ("sampling_params", (TOKENS, {"sampling_params": 5})),
    ("reward", ("/v1/episode", {"reward": "good"})),
    ("reward", ("/v1/episode", {"reward": 10**400})),
    ("reward", ("/v1/episode", {"reward": -1e39})),
    ("metrics.a", ("/v1/episode", {"metrics": {"a": HUGE}})),
    ("metrics.a", ("/v1/episode", {"metrics": {"a": "b"}})),
    ("done", ("/v1/episode", {"done": 1})),
]
BODIES = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"\xff",
    b'{"a": NaN}',
    b'{"a": "\\ud800"}',
    b"[" * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}",
]


# connections of a test
OPENED: list[Any] = []


@pytest.fixture(autouse=True)
def _close_connections():
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture(scope="module")
def server():
    with served(ScriptedBackend()) as server:
        yield server


class Client:
    """Sends requests on one connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        OPENED.append(self._connection)

    def __call__(self, method: str, path: str, body: Any = None, key: str | None = KEY, **headers):
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = (
            body
            if body is None or isinstance(body, bytes)
            else json.dumps(body).replace("Infinity", "1e999")
        )
        self._connection.request(method, path, data, headers)
        response = self._connection.getresponse()
        content = response.read()
        return response.status, json.loads(content)


def connect(url: str, head: str) -> socket.socket:
    """Begin a request with this head."""
    place = urlsplit(url)
    sock = socket.create_connection((place.hostname, place.port), timeout=DEADLINE_S)
    OPENED.append(sock)
    sock.sendall(head.replace("\n", "\r\n").encode())
    return sock


def head_of(path: str, *headers: str, key: str = KEY) -> str:
    lines = [f"POST {path} HTTP/1.1", "Host: here", f"Authorization: Bearer {key}", *headers]
    return "\n".join(lines) + "\n\n"


def request_of(path: str, **more: Any) -> str:
    body = json.dumps(GOOD[path] | more)
    return head_of(path, f"Content-Length: {len(body)}") + body


def received(sock: socket.socket) -> bytes:
    """All that arrives until the other side closes, or resets since it has not read all."""
    found = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            found += data
    return bytes(found)


def check_error(path: str, status: int, answer: Any, wanted: int, param: str | None) -> None:
    assert status == wanted, answer
    error = answer["error"]
    assert error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert (answer.get("type") == "error") == (path == MESSAGES)


@pytest.mark.parametrize(("param", "asked"), REFUSED + WRONG)
def test_what_is_refused_is_named(server, param, asked):
    client = Client(server.url)
    path, more = asked
    body = GOOD.get(path, {}) | more
    status, answer = client("POST", path, body)
    check_error(path, status, answer, 400, param)
    assert answer["error"]["message"].startswith(f"{param}: ")
    if path in GOOD:
        assert client("POST", path, GOOD[path])[0] == 200


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:12].decode(errors="replace"))
@pytest.mark.parametrize("path", GOOD)
def test_a_body_that_is_no_json_object(server, path, body):
    client = Client(server.url)
    status, answer = client("POST", path, body)
    check_error(path, status, answer, 400, None)
    assert client("POST", path, GOOD[path])[0] == 200


def test_what_changes_nothing_is_accepted():
    limits = SamplingLimits("tiny", 64, temperature=0.7, top_p=0.9, top_k=20, stop=("a", "b"))
    backend = ScriptedBackend(limits=limits)
    neutral: dict[str, Any] = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    neutral |= {"logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "none"}
    neutral |= {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "stop": ["b", "a"], "seed": None}
    neutral |= {"model": "of another maker", "user": "me", "unknown": [1], "max_tokens": 5}
    neutral["tools"] = [{"type": "function", "function": {"name": "f"}}]
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "no json"}}]
    before = {"role": "assistant", "content": None, "tool_calls": calls}
    with served(backend) as server:
        asked = GOOD[CHAT] | neutral | {"messages": [USER, before]}
        assert Client(server.url)("POST", CHAT, asked)[0] == 200
    asked = backend.asked[0]
    assert (asked.max_tokens, asked.tools, asked.temperature) == (5, (), None)
    assert asked.messages is not None
    assert asked.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}


def test_tokens_to_tokens():
    backend = ScriptedBackend()
    sampling = {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": [2], "logprobs": 1}
    sampling |= {"skip_special_tokens": False, "top_k": -1}
    asked = GOOD[TOKENS] | {"sampling_params": sampling, "cache_salt": "4", "priority": 0}
    headers = {"X-Session-ID": "s", "x-stainless-retry-count": "1"}
    with served(backend) as server:
        client = Client(server.url)
        status, answer = client("POST", TOKENS, asked, **headers)
        assert status == 200
        assert answer.pop("request_id")
        content = [
            {"token": "token_id:7", "token_id": 7, "logprob": -0.25, "bytes": None},
            {"token": "token_id:8", "token_id": 8, "logprob": -9999.0, "bytes": None},
        ]
        choice = {"index": 0, "token_ids": [7, 8], "finish_reason": "stop"}
        choice["logprobs"] = {"content": content}
        assert answer == {"choices": [choice], "weight_version": 4}
        status, models = client("GET", "/v1/models")
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 64)
    asked = backend.asked[0]
    assert (asked.token_ids, asked.messages, asked.max_tokens) == ([1, 2], None, 8)
    assert asked.is_retry


def test_an_episode_is_opened_read_and_reported():
    backend = ScriptedBackend()
    with served(backend) as server:
        client = Client(server.url)
        assert client("GET", "/health", key=None)[0] == 200
        status, opened = client("POST", "/v1/sessions", {}, ENVIRONMENT_KEY)
        assert (status, opened["api_key"]) == (200, KEY)
        assert opened["base_url"] == f"{server.url}/v1"
        assert client("POST", "/v1/sessions", {})[0] == 403
        assert client("GET", "/v1/episode")[1]["row"] == {"question": "1+1?"}
        report = {"reward": 1, "metrics": {"guesses": 3}, "done": True}
        assert client("POST", "/v1/episode", report)[0] == 200
        assert client("POST", "/v1/episode", {})[0] == 200
    assert backend.reports == [EpisodeReport(1.0, {"guesses": 3.0}, True), EpisodeReport()]
    assert type(backend.reports[0].reward) is float  # a message has integers of 64 bits


def test_other_routes_and_methods(server):
    client = Client(server.url)
    for method, path in (("GET", "/"), ("GET", CHAT), ("POST", "/v1/models"), ("PUT", CHAT)):
        check_error(path, *client(method, path), 404, None)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("headers", [{"Authorization": "Basic x"}, {"x-api-key": "wrong"}, {}])
def test_a_wrong_key(server, path, headers):
    status, answer = Client(server.url)("POST", path, GOOD[path], None, **headers)
    check_error(path, status, answer, 401, None)
    assert answer["error"]["type"] == "authentication_error"
    good = {"x-api-key": KEY}
    assert Client(server.url)("POST", path, GOOD[path], None, **good)[0] == 200


@pytest.mark.parametrize("path", GOOD)
def test_an_unknown_key_is_refused_before_the_body(server, path):
    sock = connect(server.url, head_of(path, "Content-Length: 104857600", key="unknown"))
    assert received(sock).startswith(b"HTTP/1.1 401 ")


def test_a_long_body_is_refused_by_its_length(server):
    sock = connect(server.url, head_of(CHAT, "Content-Length: 104857600"))
    answer = received(sock)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"type":"request_too_large"' in answer


def test_a_long_body_without_a_length_is_refused_while_it_is_read():
    with served(ScriptedBackend(), max_body_bytes=1 << 20) as server:
        sock = connect(server.url, head_of(CHAT, "Transfer-Encoding: chunked"))
        part = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        # one byte more than is possible
        sock.sendall(part * 16 + b"1\r\nx\r\n")
        assert received(sock).startswith(b"HTTP/1.1 413 ")
        assert Client(server.url)("POST", CHAT, GOOD[CHAT])[0] == 200


@pytest.mark.parametrize("head", ["", "POST /v1/chat/completions HTTP/1.1\nHost: he"])
def test_half_a_request_is_cut_off(head):
    with served(ScriptedBackend(), head_s=0.05) as server:
        assert received(connect(server.url, head)) == b""
        # once more on a connection that was used
        found = received(connect(server.url, request_of(CHAT) + head_of(CHAT)[:30]))
        assert found.count(b"HTTP/1.1 ") == found.count(b"HTTP/1.1 200 ") == 1
        assert Client(server.url)("POST", CHAT, GOOD[CHAT])[0] == 200


def test_half_a_body_is_cut_off(monkeypatch):
    monkeypatch.setattr(app, "BODY_S", 0.05)
    with served(ScriptedBackend()) as server:
        sock = connect(server.url, head_of(CHAT, "Content-Length: 2097152") + "{")
        assert received(sock).startswith(b"HTTP/1.1 408 ")
        monkeypatch.undo()
        assert Client(server.url)("POST", CHAT, GOOD[CHAT])[0] == 200


def test_too_many_requests(server, monkeypatch):
    monkeypatch.setattr(app, "MAX_REQUESTS", 0)
    check_error(CHAT, *Client(server.url)("POST", CHAT, GOOD[CHAT]), 503, None)
    monkeypatch.undo()
    assert Client(server.url)("POST", CHAT, GOOD[CHAT])[0] == 200


def test_a_head_without_end_is_refused(server):
    with connect(server.url, "GET / HTTP/1.1\nX: " + "x" * (1 << 17)) as sock:
        assert received(sock).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("early_s", [1e-3, 60.0])
def test_a_client_that_disconnects_is_not_answered(early_s, is_streamed):
    backend = ScriptedBackend([None, turn("Hi.")])
    with served(backend, early_s=early_s) as server:
        sock = connect(server.url, request_of(CHAT, stream=is_streamed))
        backend.wait_for("asked")
        if early_s < 1:
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        sock.close()
        backend.wait_for("cancelled")
        assert Client(server.url)("POST", CHAT, GOOD[CHAT])[0] == 200


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_is_open_for_long(path, is_streamed):
    gate = asyncio.Event()
    backend = ScriptedBackend(gate=gate)
    with served(backend, early_s=1e-3) as server:
        with connect(server.url, request_of(path, stream=is_streamed)) as sock:
            found = bytearray()
            sign = b": open\n\n" if is_streamed else b"1\r\n \r\n"
            while found.count(sign) < 3:
                found += sock.recv(1 << 16)
            server.call(gate.set)
            end = b"0\r\n\r\n"
            while not found.endswith(end):
                found += sock.recv(1 << 16)
        assert b"Hi." in found
        assert found.startswith(b"HTTP/1.1 200 ")
        kind = b"text/event-stream" if is_streamed else b"application/json"
        assert b"content-type: " + kind in found


def test_clients_read_what_was_open_for_long():
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    backend = ScriptedBackend([turn("Hi.")], gate=asyncio.Event())
    with served(backend, early_s=1e-3) as server:
        chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        messages = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
        with chat, messages:
            later = partial(server.loop.call_later, 0.05, backend.gate.set)
            for is_streamed in (False, True):
                server.call(backend.gate.clear)
                server.call(later)
                got = chat.chat.completions.create(**GOOD[CHAT], stream=is_streamed)
                if is_streamed:
                    texts = [each.choices[0].delta.content or "" for each in got]
                    assert "".join(texts) == "Hi."
                else:
                    assert got.choices[0].message.content == "Hi."
                server.call(backend.gate.clear)
                server.call(later)
                if is_streamed:
                    with messages.messages.stream(**GOOD[MESSAGES]) as stream:
                        assert stream.get_final_text() == "Hi."
                else:
                    assert messages.messages.create(**GOOD[MESSAGES]).content[0].text == "Hi."


def test_a_client_sends_again_what_broke_off():
    openai = pytest.importorskip("openai")
    backend = ScriptedBackend([ApiError(503, "gone; try again"), turn("Hi.")], gate=asyncio.Event())
    assert backend.gate is not None
    with served(backend, early_s=1e-3) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=1)
        with client:
            server.loop.call_soon_threadsafe(server.loop.call_later, 0.05, backend.gate.set)
            got = client.chat.completions.create(**GOOD[CHAT])
    assert got.choices[0].message.content == "Hi."
    assert [asked.is_retry for asked in backend.asked] == [False, True]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("error", [ApiError(503, "gone; try again"), RuntimeError("secret")])
def test_an_error_after_the_first_bytes(path, error):
    gate = asyncio.Event()
    backend = ScriptedBackend([error], gate=gate)
    with served(backend, early_s=1e-3) as server:
        for is_streamed in (False, True):
            server.call(gate.clear)
            with connect(server.url, request_of(path, stream=is_streamed)) as sock:
                found = sock.recv(1 << 16)
                server.call(gate.set)
                while b"0\r\n\r\n" not in found and (data := sock.recv(1 << 16)):
                    found += data
            assert b"secret" not in found
            # without its end the body is incomplete: the client sends the request again
            assert (b"event: error\n" in found) == is_streamed
            assert (b"0\r\n\r\n" in found) == is_streamed


@pytest.mark.parametrize("path", GOOD)
def test_an_error_of_the_backend(path, caplog):
    backend = ScriptedBackend([RuntimeError("secret\nlines"), ApiError(429, "wait", "full")])
    with served(backend) as server:
        client = Client(server.url)
        status, answer = client("POST", path, GOOD[path])
        check_error(path, status, answer, 500, None)
        assert "secret" not in json.dumps(answer)
        check_error(path, *client("POST", path, GOOD[path]), 429, None)
    assert "secret" in caplog.text


@pytest.mark.parametrize("early_s", [1e-3, 60.0])
def test_a_server_that_stops_gives_up_open_requests(early_s):
    backend = ScriptedBackend([None])
    with served(backend, early_s=early_s) as server:
        sock = connect(server.url, request_of(CHAT))
        backend.wait_for("asked")
        if early_s < 1:
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    backend.wait_for("cancelled")
    assert received(sock).startswith(b"HTTP/1.1 503 ") == (early_s > 1)
