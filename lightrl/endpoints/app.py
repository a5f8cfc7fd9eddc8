"""The ASGI app: routes, keys, bodies, and requests that stay open while there is no answer.

A key is looked at before anything of the body is read. A request is cancelled at the backend as
soon as its client is gone.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightrl.endpoints import anthropic, chat, completions, responses
from lightrl.endpoints.api import Answered, ApiError, Asked, Backend, EpisodeReport, SamplingLimits
from lightrl.endpoints.fields import Body, Fields

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

# Proxies cut off a connection on which nothing was sent for a minute.
EARLY_S = 30.0
BODY_S = 60.0
MAX_BODY_BYTES = 32 << 20
# A body up to this size is received after an error, so that the connection can be used again.
MAX_IGNORED_BYTES = 1 << 20
MAX_REQUESTS = 8192


@dataclass(frozen=True, slots=True)
class WireForm:
    """How an API writes requests, turns and errors."""

    read: Callable[[Fields, SamplingLimits], Asked]
    whole: Callable[[Answered, Body], Body]
    events: Callable[[Answered, Body], Iterator[Body]]
    error: Callable[[ApiError], Body] = chat.error
    # after the last event
    end: bytes = b""


CHAT = WireForm(chat.read, chat.whole, chat.events, end=b"data: [DONE]\n\n")
TOKENS = WireForm(chat.read_tokens, chat.whole_tokens, lambda answered, body: iter(()))
RESPONSES = WireForm(responses.read, responses.whole, responses.events)
MESSAGES = WireForm(anthropic.read, anthropic.whole, anthropic.events, anthropic.error)


class EndpointApp:
    """Answers HTTP requests from a backend.

    Example: async with serving(EndpointApp(backend), "127.0.0.1", 0) as url: ...
    """

    def __init__(
        self, backend: Backend, early_s: float = EARLY_S, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._backend, self._early_s, self._max_body_bytes = backend, early_s, max_body_bytes
        self._calls: set[asyncio.Future[Any]] = set()
        self._num_requests = 0
        self._is_closed = False
        self._routes: dict[tuple[str, str], tuple[_Handle, WireForm]] = {
            ("POST", "/v1/chat/completions"): (self._turn, CHAT),
            ("POST", "/v1/responses"): (self._turn, RESPONSES),
            ("POST", "/v1/messages"): (self._turn, MESSAGES),
            ("POST", "/inference/v1/generate"): (self._turn, TOKENS),
            ("POST", "/v1/sessions"): (self._open, CHAT),
            ("POST", "/v1/episode"): (self._report, CHAT),
            ("GET", "/v1/episode"): (self._episode, CHAT),
            ("GET", "/v1/models"): (self._models, CHAT),
        }
        if isinstance(backend, completions.TextBackend):
            self._routes["POST", "/v1/completions"] = self._complete(backend), CHAT

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.requests import Request

        place = scope["method"], scope["path"]
        handle, form = self._routes.get(place, (None, CHAT))
        exchange = _Exchange(Request(scope, receive), send, form, self._early_s)
        self._num_requests += 1
        try:
            if place == ("GET", "/health"):
                await exchange.finish(200, _dumps({"status": "ok"}))
                return
            if handle is None:
                raise ApiError(404, f"there is no {place[0]} {place[1][:80]!r} here", "not_found")
            key = _key(exchange.request, is_optional=self._backend.limits.is_free)
            self._backend.require(key)
            if self._is_closed or self._num_requests > MAX_REQUESTS:
                raise ApiError(503, "too many requests are open; try again", "unavailable")
            await handle(exchange, key)
        except Exception as e:
            await exchange.fail(e)
        finally:
            self._num_requests -= 1

    def close(self) -> None:
        """Cancel all open requests: their clients get 503, or a broken connection."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()

    async def _turn(self, exchange: "_Exchange", key: str) -> None:
        form, request = exchange.form, exchange.request
        body = await self._body(request)
        given = Fields(body)
        asked = form.read(given, self._backend.limits)
        exchange.is_stream = given.get("stream", bool) or False
        if request.headers.get("x-stainless-retry-count", "0") not in ("", "0"):
            asked = replace(asked, is_retry=True)

        def content(answered: Answered) -> bytes:
            if not exchange.is_stream:
                return _dumps(form.whole(answered, body))
            return b"".join(map(_event, form.events(answered, body))) + form.end

        await self._answer(exchange, self._backend.ask(key, asked), content)

    def _complete(self, backend: completions.TextBackend) -> "_Handle":
        async def complete(exchange: "_Exchange", key: str) -> None:
            body = await self._body(exchange.request)
            exchange.is_stream = Fields(body).get("stream", bool) or False

            def content(found: Body) -> bytes:
                if not exchange.is_stream:
                    return _dumps(found)
                return b"".join(map(_event, completions.events(found))) + CHAT.end

            await self._answer(exchange, completions.complete(backend, key, body), content)

        return complete

    async def _open(self, exchange: "_Exchange", key: str) -> None:
        url = f"{exchange.request.base_url}v1"
        call = self._backend.open(key)
        await self._answer(exchange, call, lambda opened: _dumps({"base_url": url, **opened}))

    async def _answer(
        self, exchange: "_Exchange", call: Coroutine[Any, Any, Any], content: Callable[[Any], bytes]
    ) -> None:
        future = asyncio.ensure_future(call)
        self._calls.add(future)
        try:
            await exchange.answer(future, content)
        finally:
            self._calls.discard(future)

    async def _report(self, exchange: "_Exchange", key: str) -> None:
        body = Fields(await self._body(exchange.request))
        given = body.inside("metrics")
        metrics = {name: given.need(name, float) for name in given.values}
        is_over, failure = body.get("done", bool) or False, body.get("failure", str) or ""
        report = EpisodeReport(body.get("reward", float), metrics, is_over, failure)
        call = self._backend.report(key, report)
        await self._answer(exchange, call, lambda _: _dumps({"received": True}))

    async def _episode(self, exchange: "_Exchange", key: str) -> None:
        await self._answer(exchange, self._backend.episode(key), _dumps)

    async def _models(self, exchange: "_Exchange", key: str) -> None:
        limits = self._backend.limits
        card = {"id": limits.model, "object": "model", "created": 0, "owned_by": "lightrl"}
        card["max_model_len"] = limits.max_length
        await exchange.finish(200, _dumps({"object": "list", "data": [card]}))

    async def _body(self, request: "Request") -> Body:
        """Receive the body. Raises ApiError unless it is a JSON object of a possible size."""
        most = self._max_body_bytes
        too_long = ApiError(413, f"a request has at most {most:,} bytes; send less", "too_large")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_long
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise too_long
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time; try again", "timeout") from None
        return _parsed(data)


class _Exchange:
    """One request and its response."""

    def __init__(self, request: "Request", send: "Send", form: WireForm, early_s: float) -> None:
        self.request, self.form = request, form
        self.is_stream = False
        self._send, self._early_s = send, early_s
        self._is_begun = False

    async def answer(self, call: asyncio.Future[Any], content: Callable[[Any], bytes]) -> None:
        """Respond with the result of a call of the backend, which is cancelled if the client
        disconnects first."""
        gone = asyncio.ensure_future(self._gone())
        try:
            while True:
                either = asyncio.FIRST_COMPLETED
                await asyncio.wait((call, gone), timeout=self._early_s, return_when=either)
                if call.done():
                    break
                if gone.done():
                    return
                await self._begin(200)
                await self._write(b": open\n\n" if self.is_stream else b" ", more=True)
        finally:
            gone.cancel()
            call.cancel()
            call.add_done_callback(_retrieve)
        if call.cancelled():
            raise ApiError(503, "the server stops; try again", "unavailable")
        await self.finish(200, content(call.result()))

    async def finish(self, status: int, content: bytes, *headers: tuple[bytes, bytes]) -> None:
        if not self._is_begun:
            length = (b"content-length", str(len(content)).encode())
            await self._begin(status, length, *headers)
        await self._write(content, more=False)

    async def fail(self, cause: Exception) -> None:
        """Respond with an error. If 200 was sent, a stream gets an event; of other responses the
        end is missing, so that their clients send the request again."""
        from starlette.requests import ClientDisconnect

        if isinstance(cause, ClientDisconnect):
            return
        if not isinstance(cause, ApiError):
            logger.error("%s failed", self.request.url.path, exc_info=cause)
            cause = ApiError(
                500, "internal error; the log of the server has the traceback", "server_error"
            )
        error = self.form.error(cause)
        if not self._is_begun:
            self.is_stream = False
            length = self.request.headers.get("content-length", "")
            is_chunked = "transfer-encoding" in self.request.headers
            closes = is_chunked or int(length or 0) > MAX_IGNORED_BYTES
            headers = [(b"connection", b"close")] if closes else []
            await self.finish(cause.status, _dumps(error), *headers)
        elif self.is_stream:
            await self._write(_event({"type": "error", **error}), more=False)

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def _begin(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        if not self._is_begun:
            self._is_begun = True
            kind = b"text/event-stream" if self.is_stream else b"application/json"
            all_headers = [(b"content-type", kind), (b"cache-control", b"no-store"), *headers]
            start = {"type": "http.response.start", "status": status, "headers": all_headers}
            await self._send(start)

    async def _write(self, content: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more})


_Handle = Callable[[_Exchange, str], Awaitable[None]]


def _key(request: "Request", *, is_optional: bool) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    if (not key and not is_optional) or not key.isascii():
        raise ApiError(401, "send the key of the session as the API key", "invalid_api_key")
    return key


def _parsed(data: bytearray) -> Body:
    """Return a JSON object. Raises ApiError (400)."""
    try:
        text = data.decode()
        body = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text.lower():  # half of a pair is no text for a tokenizer
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is no JSON: {str(e)[:100]}; send a JSON object") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object; send one")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _dumps(body: Body) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def _event(event: Body) -> bytes:
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + _dumps(event) + b"\n\n"


def _retrieve(call: asyncio.Future[Any]) -> None:
    """Look at the error of a call whose client is gone: asyncio would print it."""
    if not call.cancelled():
        call.exception()
