"""Anthropic's messages, read as a chat; a turn as the blocks and events of a message."""

import json
from collections.abc import Iterator

from lightrl.endpoints import fields
from lightrl.endpoints.api import Answered, ApiError, Asked, Message, SamplingLimits
from lightrl.endpoints.fields import Body, Fields

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error(e: ApiError) -> Body:
    other = "invalid_request_error" if e.status < 500 else "api_error"
    about = {"type": TYPES.get(e.status, other), "message": str(e)}
    return {"type": "error", "error": {**about, "param": e.param, "code": e.code}}


def read(body: Fields, limits: SamplingLimits) -> Asked:
    """Return what a message asks for, as a chat. Raises ApiError (400)."""
    fields.refuse_others(body)
    for key in ("output_format", "mcp_servers", "container"):
        if body.values.get(key):
            raise body.refused(key, "is not possible; leave it out")
    if (config := body.inside("output_config")).values.get("format"):
        raise config.refused("format", "only text is possible")
    messages: list[Message] = []
    if body.values.get("system") is not None:
        messages.append({"role": "system", "content": body.text("system")})
    given = body.items("messages")
    if not given:
        raise body.refused("messages", "must have at least one message")
    for each in given:
        _add(messages, each)
    return Asked(
        messages=messages,
        tools=fields.tools_of(body, (None, "custom"), parameters="input_schema"),
        max_tokens=fields.max_tokens(body, "max_tokens"),
        **fields.sampling(body, limits, "stop_sequences"),
    )


def _add(messages: list[Message], message: Fields) -> None:
    role = message.values.get("role")
    if role not in ("user", "assistant", "system"):
        raise message.refused("role", "must be user, assistant or system")
    if not isinstance(message.values.get("content"), list):
        messages.append({"role": role, "content": message.text("content")})
        return
    texts: list[Body] = []
    found: Message = {"role": role, "content": ""}
    for block in message.items("content"):
        kind = block.values.get("type")
        if kind == "tool_use" and role == "assistant":
            made = fields.call_of(block.need("id", str), block, "input")
            found["tool_calls"] = [*found.get("tool_calls", []), made]
        elif kind == "tool_result" and role == "user":
            id = block.need("tool_use_id", str)
            text = block.text("content") if block.values.get("content") else ""
            messages.append({"role": "tool", "content": text, "tool_call_id": id})
        elif kind == "thinking" and role == "assistant":
            found["reasoning_content"] = block.need("thinking", str)
        else:
            texts.append(block.values)
    found["content"] = Fields({**message.values, "content": texts}, message.at).text("content")
    if role == "assistant" or texts:
        messages.append(found)


def whole(answered: Answered, body: Body) -> Body:
    """Return a turn as a message."""
    calls, text = fields.calls_of(answered), answered.message.get("content") or ""
    blocks: list[Body] = []
    if thought := answered.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text or not calls:
        blocks.append({"type": "text", "text": text, "citations": None})
    for id, name, arguments in calls:
        given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": given})
    stop = "tool_use" if calls else "end_turn"
    return {
        "id": fields.new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model") or ""),
        "content": blocks,
        "stop_reason": "max_tokens" if answered.finish_reason == "length" else stop,
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(answered.prompt_token_ids),
            "output_tokens": len(answered.token_ids),
        },
        "weight_version": answered.weight_version,
    }


def events(answered: Answered, body: Body) -> Iterator[Body]:
    """Iterate over the events of a turn."""
    found = whole(answered, body)
    usage = {**found["usage"], "output_tokens": 0}
    begun = {**found, "content": [], "stop_reason": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for at, block in enumerate(found["content"]):
        empty, deltas = _parts(block)
        yield {"type": "content_block_start", "index": at, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}
    delta = {key: found[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": delta, "usage": found["usage"]}
    yield {"type": "message_stop"}


def _parts(block: Body) -> tuple[Body, list[Body]]:
    """Return a block as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
    given = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": given}]
