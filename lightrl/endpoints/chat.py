"""OpenAI's chat completions, and vLLM's route from tokens to tokens."""

import time
from collections.abc import Iterator

from lightrl.endpoints import fields
from lightrl.endpoints.api import Answered, ApiError, Asked, Message, SamplingLimits
from lightrl.endpoints.fields import Body, Fields

ROLES = {"developer": "system", **{r: r for r in ("system", "user", "assistant", "tool")}}
TYPES = {401: "authentication_error", 413: "request_too_large", 429: "rate_limit_error"}
# JSON has no infinities; vLLM's least logarithm
LEAST_LOGPROB = -9999.0


def error(e: ApiError) -> Body:
    other = "invalid_request_error" if e.status < 500 else "server_error"
    about = {"type": TYPES.get(e.status, other), "param": e.param, "code": e.code}
    return {"error": {"message": str(e), **about}}


def read(body: Fields, limits: SamplingLimits) -> Asked:
    """Return what a chat completion asks for. Raises ApiError (400)."""
    fields.refuse_others(body)
    for key in ("logprobs", "return_token_ids"):
        body.get(key, bool)
    body.inside("stream_options").get("include_usage", bool)
    messages = [_message(each) for each in body.items("messages")]
    if not messages:
        raise body.refused("messages", "must have at least one message")
    return Asked(
        messages=messages,
        tools=fields.tools_of(body, inside="function"),
        max_tokens=fields.max_tokens(body, "max_completion_tokens", "max_tokens"),
        **fields.sampling(body, limits),
    )


def _message(message: Fields) -> Message:
    role = ROLES.get(message.need("role", str))
    if role is None:
        raise message.refused("role", f"must be one of {', '.join(ROLES)}")
    is_empty = role == "assistant" and message.values.get("content") is None
    found: Message = {"role": role, "content": "" if is_empty else message.text("content")}
    if (name := message.get("name", str)) is not None:
        found["name"] = name
    if role == "tool":
        found["tool_call_id"] = message.need("tool_call_id", str)
    if role == "assistant":
        for key in ("reasoning", "reasoning_content"):
            if (thought := message.get(key, str)) is not None:
                found["reasoning_content"] = thought
        if calls := message.items("tool_calls"):
            each_call = ((each.need("id", str), each.inside("function")) for each in calls)
            found["tool_calls"] = [fields.call_of(*each) for each in each_call]
    return found


def whole(answered: Answered, body: Body) -> Body:
    """Return a turn as a chat completion."""
    calls = [
        {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": fields.as_json(arguments)},
        }
        for id, name, arguments in fields.calls_of(answered)
    ]
    content = answered.message.get("content") or ("" if not calls else None)
    message: Body = {"role": "assistant", "content": content}
    if (thought := answered.message.get("reasoning_content")) is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    finish = "tool_calls" if calls and answered.finish_reason == "stop" else answered.finish_reason
    choice: Body = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if body.get("logprobs"):
        tops = body.get("top_logprobs") or 0
        sampled = [{**each, "top_logprobs": [each] * tops} for each in _logprobs(answered)]
        choice["logprobs"] = {"content": sampled, "refusal": None}
    num_prompt, num_sampled = len(answered.prompt_token_ids), len(answered.token_ids)
    found: Body = {
        "id": fields.new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(body.get("model") or ""),
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
        "weight_version": answered.weight_version,
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = list(answered.token_ids)
        found["prompt_token_ids"] = list(answered.prompt_token_ids)
    return found


def _logprobs(answered: Answered) -> list[Body]:
    """Return the sampled tokens by their ids: the endpoint has no tokenizer."""
    return [
        {"token": f"token_id:{id}", "logprob": max(logprob, LEAST_LOGPROB), "bytes": None}
        for id, logprob in zip(answered.token_ids, answered.logprobs, strict=True)
    ]


def events(answered: Answered, body: Body) -> Iterator[Body]:
    """Iterate over the chunks of a turn."""
    found = whole(answered, body)
    choice, usage = found.pop("choices")[0], found.pop("usage")
    message, finish = choice.pop("message"), choice.pop("finish_reason")
    prompt = {key: found.pop(key) for key in ("prompt_token_ids",) if key in found}
    found["object"] = "chat.completion.chunk"

    def chunk(delta: Body, finish: str | None = None, **more: object) -> Body:
        return {**found, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}

    text, calls = message["content"], message.get("tool_calls", [])
    yield chunk({"role": "assistant", "content": None if text is None else ""}) | prompt
    if (thought := message.get("reasoning_content")) is not None:
        yield chunk({"reasoning_content": thought})
    if text:
        yield chunk({"content": text})
    if calls:
        yield chunk({"tool_calls": [{"index": at, **each} for at, each in enumerate(calls)]})
    yield chunk({}, finish, **choice)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**found, "choices": [], "usage": usage}


# From tokens to tokens


def read_tokens(body: Fields, limits: SamplingLimits) -> Asked:
    """Return what a request of tokens asks for. Raises ApiError (400)."""
    params = Fields(body.get("sampling_params", dict) or {})
    fields.refuse_others(params)
    if params.get("logprobs", int) not in (None, 0, 1):
        raise params.refused("logprobs", "only 0 or 1 is possible")
    for key in ("features", "content_parts", "stream"):
        if body.values.get(key):
            raise body.refused(key, "is not possible here; leave it out")
    ids: list[int] = body.need("token_ids", list)
    # the type itself: true is an int
    if not ids or not all(type(id) is int and 0 <= id < 1 << 31 for id in ids):
        raise body.refused("token_ids", "must be a list of at least one token id")
    most = fields.max_tokens(params, "max_tokens")
    return Asked(token_ids=ids, max_tokens=most, **fields.sampling(params, limits))


def whole_tokens(answered: Answered, body: Body) -> Body:
    content = [
        {**each, "token_id": id}
        for id, each in zip(answered.token_ids, _logprobs(answered), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": list(answered.token_ids),
        "finish_reason": answered.finish_reason,
        "logprobs": {"content": content},
    }
    id = str(body.get("request_id") or fields.new_id("gen"))
    return {"request_id": id, "choices": [choice], "weight_version": answered.weight_version}
