"""OpenAI's chat completions, and vLLM's route from tokens to tokens."""

import time
from collections.abc import Iterator

from lightrl.endpoints import fields
from lightrl.endpoints.api import Answered, ApiError, Asked, Message, SamplingLimits
from lightrl.endpoints.fields import Body

ROLES = {"developer": "system", **{r: r for r in ("system", "user", "assistant", "tool")}}
TYPES = {401: "authentication_error", 413: "request_too_large", 429: "rate_limit_error"}
# JSON has no infinities; vLLM's least logarithm
LEAST_LOGPROB = -9999.0


def error(e: ApiError) -> Body:
    other = "invalid_request_error" if e.status < 500 else "server_error"
    about = {"type": TYPES.get(e.status, other), "param": e.param, "code": e.code}
    return {"error": {"message": str(e), **about}}


def read(body: Body, limits: SamplingLimits) -> Asked:
    """Return what a chat completion asks for. Raises ApiError (400)."""
    fields.refuse_others(body)
    fields.get(body, "logprobs", bool)
    fields.get(body, "return_token_ids", bool)
    fields.get(fields.get(body, "stream_options", dict) or {}, "include_usage", bool)
    messages = [
        _message(each, name) for name, each in fields.objects(body.get("messages"), "messages")
    ]
    if not messages:
        raise fields.refused("messages", "must have at least one message")
    tools = []
    for name, each in fields.objects(fields.get(body, "tools", list) or [], "tools"):
        if each.get("type") != "function":
            raise fields.refused(f"{name}.type", 'only "function" is possible')
        tools.append(
            fields.tool(
                fields.of_type(each.get("function"), dict, f"{name}.function"), f"{name}.function"
            )
        )
    return Asked(
        messages=messages,
        tools=fields.offered(body, tools),
        max_tokens=fields.max_tokens(body, "max_completion_tokens", "max_tokens"),
        **fields.sampling(body, limits),
    )


def _message(message: Body, param: str) -> Message:
    role = ROLES.get(fields.of_type(message.get("role"), str, f"{param}.role"))
    if role is None:
        raise fields.refused(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    content = message.get("content")
    is_empty = content is None and role == "assistant"
    found: Message = {"role": role, "content": ""}
    if not is_empty:
        found["content"] = fields.text_of(content, f"{param}.content")
    found |= {key: fields.of_type(message[key], str, key) for key in ("name",) if message.get(key)}
    if role == "tool":
        found["tool_call_id"] = fields.of_type(
            message.get("tool_call_id"), str, f"{param}.tool_call_id"
        )
    if role == "assistant":
        for key in ("reasoning", "reasoning_content"):
            if (thought := fields.get(message, key, str)) is not None:
                found["reasoning_content"] = thought
        calls = list(
            fields.objects(fields.get(message, "tool_calls", list) or [], f"{param}.tool_calls")
        )
        if calls:
            found["tool_calls"] = [_call(each, name) for name, each in calls]
    return found


def _call(each: Body, param: str) -> Body:
    function = fields.of_type(each.get("function"), dict, f"{param}.function")
    return fields.call(each.get("id"), function.get("name"), function.get("arguments"), param)


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


def read_tokens(body: Body, limits: SamplingLimits) -> Asked:
    """Return what a request of tokens asks for. Raises ApiError (400)."""
    params = fields.get(body, "sampling_params", dict) or {}
    fields.refuse_others(params)
    if (fields.get(params, "logprobs", int) or 0) not in (0, 1):
        raise fields.refused("logprobs", "only 0 or 1 is possible")
    for name in ("features", "content_parts", "stream"):
        if body.get(name):
            raise fields.refused(name, "is not possible here; leave it out")
    ids: list[int] = fields.of_type(body.get("token_ids"), list, "token_ids")
    # the type itself: a list may be long, and true is an int
    if not ids or not all(type(id) is int and 0 <= id < 1 << 31 for id in ids):
        raise fields.refused("token_ids", "must be a list of at least one token id")
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
