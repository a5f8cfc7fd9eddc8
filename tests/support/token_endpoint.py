"""A stand-in for the token endpoint of an episode, with the checks that LightRL's makes."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "session-key"
MODEL = "policy"


class TokenEndpoint:
    """Answers with the turns in their order, and chats with the replies; counts as wrong a request
    that does not extend what is held."""

    def __init__(
        self,
        turns: Sequence[Sequence[int]],
        row: dict[str, Any],
        max_length: int = 4096,
        replies: Sequence[str] = (),
        max_turns: int | None = None,
    ) -> None:
        self.max_turns = max_turns
        self.turns = list(turns)
        self.replies = list(replies)
        self.chats: list[list[dict[str, Any]]] = []
        self.row = row
        self.max_length = max_length
        self.held: list[int] = []
        self.sampled: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.reports: list[dict[str, Any]] = []
        self.sessions: set[str] = set()
        self.wrong: list[str] = []
        self.url = ""

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            card = {"id": MODEL, "object": "model", "max_model_len": self.max_length}
            return 200, {"object": "list", "data": [card]}
        if path == "/v1/episode":
            return 200, {"row": self.row, "seed": 7, "max_length": self.max_length}
        return 404, _error(f"no {path}")

    def post(self, path: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        if path == "/v1/episode":
            self.reports.append(body)
            return 200, {}
        if path == "/v1/chat/completions":
            return self.chat(body)
        if path != "/inference/v1/generate":
            return 404, _error(f"no {path}")
        self.sessions.add(headers["X-Session-ID"])
        if unknown := body.keys() - {"model", "token_ids", "sampling_params"}:
            self.wrong.append(f"fields {unknown}")
        asked = body["sampling_params"]
        if asked.pop("logprobs") != 1 or asked.pop("skip_special_tokens") is not False:
            self.wrong.append("logprobs")
        if not asked.pop("stop_token_ids") or asked.keys() - {"routed_experts_prompt_start"}:
            self.wrong.append(f"sampling_params {asked}")
        prompt = body["token_ids"]
        if body["model"] != MODEL or prompt[: len(self.held)] != self.held:
            self.wrong.append(f"request {len(self.prompts)} does not extend the ids held")
            return 400, _error("the ids do not extend those that are held")
        if len(self.prompts) == self.max_turns:
            return 400, _error("the episode is at its end", "context_length_exceeded")
        if not self.turns:
            return 500, _error("no engine")
        self.prompts.append(prompt)
        turn = list(self.turns.pop(0))[: self.max_length - len(prompt)]
        self.sampled.append(turn)
        self.held = [*prompt, *turn]
        logprobs = [{"token": f"token_id:{t}", "logprob": -0.5} for t in turn]
        choice = {"index": 0, "token_ids": turn, "logprobs": {"content": logprobs}}
        choice["finish_reason"] = "length" if len(self.held) >= self.max_length else "stop"
        return 200, {"request_id": "r", "choices": [choice]}

    def chat(self, body: dict[str, Any]) -> tuple[int, str | dict[str, Any]]:
        """The whole turn in one event, as a streamed answer."""
        if not body["stream"] or not self.replies:
            return 500, _error("no engine")
        self.chats.append(body["messages"])
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        delta = {"role": "assistant", "content": self.replies.pop(0)}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        turn = {"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}
        events = [{**chunk, **turn}, {**chunk, "choices": [], "usage": usage}]
        return 200, "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"


def _error(text: str, code: str = "invalid_request") -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error", "code": code}}


@contextmanager
def serving(endpoint: TokenEndpoint) -> Iterator[TokenEndpoint]:
    """Serve at `endpoint.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, body: dict[str, Any] | str) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            kind = "text/event-stream" if isinstance(body, str) else "application/json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.handle_request(None)

        def do_POST(self) -> None:
            self.handle_request(self.rfile.read(int(self.headers["Content-Length"])))

        def handle_request(self, body: bytes | None) -> None:
            if self.headers["Authorization"] != f"Bearer {KEY}":
                self.answer(401, _error("no session has this key"))
            elif body is None:
                self.answer(*endpoint.get(self.path))
            else:
                self.answer(*endpoint.post(self.path, json.loads(body), self.headers))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
