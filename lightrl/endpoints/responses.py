"""OpenAI's responses, read as a chat; a turn as the items and events of a response."""

import time
from collections.abc import Iterator

from lightrl.endpoints import fields
from lightrl.endpoints.api import Answered, Asked, Message, SamplingLimits
from lightrl.endpoints.chat import ROLES
from lightrl.endpoints.fields import Body, Fields

ELSEWHERE = ("previous_response_id", "conversation", "prompt")


def read(body: Fields, limits: SamplingLimits) -> Asked:
    """Return what a response asks for, as a chat. Raises ApiError (400)."""
    fields.refuse_others(body)
    for key in ELSEWHERE:
        if body.values.get(key) is not None:
            raise body.refused(key, "nothing is stored here; send the whole input")
    if body.get("background", bool):
        raise body.refused("background", "is not possible; leave it out")
    if body.inside("text").inside("format").values.get("type", "text") != "text":
        raise body.refused("text.format", "only text is possible")
    messages: list[Message] = []
    if (instructions := body.get("instructions", str)) is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(text := body.values.get("input"), str):
        messages.append({"role": "user", "content": text})
    elif items := body.items("input"):
        for item in items:
            _add(messages, item)
    else:
        raise body.refused("input", "must have at least one item")
    return Asked(
        messages=messages,
        tools=fields.tools_of(body),
        max_tokens=fields.max_tokens(body, "max_output_tokens"),
        **fields.sampling(body, limits),
    )


def _add(messages: list[Message], item: Fields) -> None:
    """Add an item; thought, text and calls of one turn become one message."""
    kind = item.values.get("type", "message")
    if kind == "message":
        role = ROLES.get(item.need("role", str))
        if role not in ("system", "user", "assistant"):
            raise item.refused("role", "must be system, developer, user or assistant")
        text = item.text("content")
        if role != "assistant":
            messages.append({"role": role, "content": text})
            return
        last = messages[-1] if messages else {}
        joins = not last.get("content") and "tool_calls" not in last
        _assistant(messages, joins=joins)["content"] = text
    elif kind == "function_call":
        made = fields.call_of(item.need("call_id", str), item)
        _assistant(messages, joins=True).setdefault("tool_calls", []).append(made)
    elif kind == "function_call_output":
        id = item.need("call_id", str)
        messages.append({"role": "tool", "content": item.text("output"), "tool_call_id": id})
    elif kind == "reasoning":
        texts = [part.need("text", str) for part in item.items("content")]
        _assistant(messages, joins=False)["reasoning_content"] = "\n".join(texts)
    else:
        raise item.refused("type", f"{str(kind)[:40]!r} is not possible; send texts and calls")


def _assistant(messages: list[Message], *, joins: bool) -> Message:
    """Return the last message if it is one of the assistant and `joins`, else a new one."""
    if not (joins and messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def whole(answered: Answered, body: Body) -> Body:
    """Return a turn as a response."""
    is_cut = answered.finish_reason == "length"
    state = "incomplete" if is_cut else "completed"
    calls, text = fields.calls_of(answered), answered.message.get("content") or ""
    items: list[Body] = []
    if thought := answered.message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append(
            {"type": "reasoning", "id": fields.new_id("rs"), "summary": [], "content": content}
        )
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        message: Body = {"type": "message", "id": fields.new_id("msg"), "role": "assistant"}
        items.append({**message, "status": state, "content": [part]})
    for id, name, arguments in calls:
        made = {"name": name, "arguments": fields.as_json(arguments), "status": "completed"}
        items.append({"type": "function_call", "id": fields.new_id("fc"), "call_id": id, **made})
    prompt, sampled = len(answered.prompt_token_ids), len(answered.token_ids)
    echoed = {key: body.get(key) for key in ("instructions", "metadata", "temperature", "top_p")}
    return {
        "id": fields.new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": state,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": str(body.get("model") or ""),
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "store": False,
        **echoed,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
        "weight_version": answered.weight_version,
    }


def events(answered: Answered, body: Body) -> Iterator[Body]:
    """Iterate over the events of a turn, numbered."""
    for number, event in enumerate(_events(whole(answered, body))):
        yield {**event, "sequence_number": number}


def _events(found: Body) -> Iterator[Body]:
    items, state = found["output"], found["status"]
    begun = {**found, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for at, item in enumerate(items):
        place = {"output_index": at, "item_id": item["id"]}
        empty = {key: "" if key == "arguments" else value for key, value in item.items()}
        empty |= {"content": []} if "content" in item else {}
        added = {**empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": at, "item": added}
        for index, part in enumerate(item.get("content", [])):
            kind, text = part["type"], part["text"]
            inside = {**place, "content_index": index}
            probs: Body = {"logprobs": []} if kind == "output_text" else {}
            start = {**part, "text": ""}
            yield {"type": "response.content_part.added", **inside, "part": start}
            yield {"type": f"response.{kind}.delta", **inside, **probs, "delta": text}
            yield {"type": f"response.{kind}.done", **inside, **probs, "text": text}
            yield {"type": "response.content_part.done", **inside, "part": part}
        if item["type"] == "function_call":
            made, name = item["arguments"], "response.function_call_arguments"
            yield {"type": f"{name}.delta", **place, "delta": made}
            yield {"type": f"{name}.done", **place, "name": item["name"], "arguments": made}
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    yield {"type": f"response.{state}", "response": found}
