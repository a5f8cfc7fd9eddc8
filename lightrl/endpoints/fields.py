"""Fields of requests: their types, what is refused, and the parts that all APIs share."""

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from lightrl.endpoints.api import Answered, ApiError, Message, SamplingLimits, Tool

# of a request or an answer: a JSON object
Body: TypeAlias = dict[str, Any]

NAMES = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
# Fields that would change what is sampled or returned, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "top_logprobs": (0, 1),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": (),
    "modalities": (["text"],),
    "audio": (),
}
TEXT_PARTS = ("text", "input_text", "output_text")


def refused(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param)


def of_type(value: Any, kind: type, param: str) -> Any:
    """Return a value. Raises ApiError (400) unless it has this type; integers are numbers."""
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise refused(param, f"must be {NAMES[kind]}")
    return value


def get(body: Body, name: str, kind: type) -> Any:
    """Return a field, None if it is absent or null. Raises ApiError (400)."""
    value = body.get(name)
    return None if value is None else of_type(value, kind, name)


def refuse_others(body: Body) -> None:
    """Raises ApiError (400) for a field of `NEUTRAL` with another value."""
    for name, allowed in NEUTRAL.items():
        if (value := body.get(name)) is not None and value not in allowed:
            only = " or ".join(map(json.dumps, allowed))
            why = f"only {only} is possible" if only else "is not possible here; leave it out"
            raise refused(name, why)


def max_tokens(body: Body, *names: str) -> int | None:
    """Return the first of these fields that is given. Raises ApiError (400)."""
    for name in names:
        if (value := get(body, name, int)) is not None:
            if value < 1:
                raise refused(name, "must be at least 1")
            return value
    return None


def sampling(body: Body, limits: SamplingLimits, stop_name: str = "stop") -> Body:
    """Return what `Asked` has of sampling, {} unless it is free. Raises ApiError (400)."""
    stop = body.get(stop_name) or []
    stops = [stop] if isinstance(stop, str) else of_type(stop, list, stop_name)
    top_k = get(body, "top_k", int)
    asked = {
        "temperature": get(body, "temperature", float),
        "top_p": get(body, "top_p", float),
        "top_k": 0 if top_k == -1 else top_k,
        "stop": tuple(of_type(each, str, stop_name) for each in stops),
        "seed": get(body, "seed", int),
    }
    if limits.is_free:
        return asked
    if asked["stop"] and set(asked["stop"]) != set(limits.stop):
        raise refused(stop_name, f"is {list(limits.stop)} in this run; leave it out")
    for name in ("temperature", "top_p", "top_k", "seed"):
        own = getattr(limits, name, None)
        if asked[name] is not None and asked[name] != own:
            is_own = f"is {own} in this run" if own is not None else "is drawn by the run"
            raise refused(name, f"{is_own}; leave it out")
    return {}


def text_of(content: Any, param: str) -> str:
    """Return a text, or the texts of a list of parts. Raises ApiError (400)."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in of_type(content, list, param):
        kind = of_type(part, dict, param).get("type")
        if kind not in TEXT_PARTS:
            raise refused(param, f"a part of type {str(kind)[:40]!r} is not possible; only text is")
        texts.append(of_type(part.get("text"), str, f"{param}.text"))
    return "\n".join(texts)


def objects(items: Any, param: str) -> Iterator[tuple[str, Body]]:
    """Iterate over (name, object) of a list. Raises ApiError (400)."""
    for at, item in enumerate(of_type(items, list, param)):
        yield f"{param}[{at}]", of_type(item, dict, f"{param}[{at}]")


# Tools and their calls


def tool(function: Body, param: str, parameters: str = "parameters") -> Tool:
    """Return a tool with the fields that the model sees. Raises ApiError (400)."""
    found = {
        "name": of_type(function.get("name"), str, f"{param}.name"),
        "description": get(function, "description", str) or "",
        "parameters": get(function, parameters, dict) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": found}


def offered(body: Body, tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Return the tools, none if `tool_choice` says so. Raises ApiError (400) if it forces one."""
    choice, found = body.get("tool_choice"), tuple(tools)
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none"):
        return () if kind == "none" else found
    raise refused("tool_choice", 'only "auto" or "none" is possible: nothing forces a call')


def call(id: Any, name: Any, arguments: Any, param: str) -> Body:
    """Return a call of a message; arguments that are no JSON object stay a text. Raises ApiError
    (400)."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, dict):
        raise refused(f"{param}.arguments", "must be a text with JSON")
    function = {"name": of_type(name, str, f"{param}.name"), "arguments": arguments}
    return {"id": of_type(id, str, f"{param}.id"), "type": "function", "function": function}


def calls_of(answered: Answered) -> list[tuple[str, str, Any]]:
    """Return (id, name, arguments) of the calls of a turn; a call without an id gets one."""
    calls: list[Body] = answered.message.get("tool_calls") or []
    functions = [(each.get("id") or new_id("call"), each["function"]) for each in calls]
    return [(id, function["name"], function["arguments"]) for id, function in functions]


def as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def assistant(messages: list[Message], *, joins: bool) -> Message:
    """Return the last message if it is one of the assistant and `joins`, else a new one."""
    if not (joins and messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
