"""Fields of requests: their types, what is refused, and the parts that all APIs share."""

import json
import uuid
from typing import Any, TypeAlias

from lightrl.endpoints.api import Answered, ApiError, SamplingLimits, Tool

# of a request or an answer: a JSON object
Body: TypeAlias = dict[str, Any]

NAMES = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
NAMES |= {list: "a list", dict: "an object"}
# Fields that would change what is sampled or returned, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("echo", "ignore_eos", "use_beam_search"), (False,)),
    **dict.fromkeys(("structured_outputs", "grammar", "audio", "prompt_logprobs"), ()),
    **{f"guided_{kind}": () for kind in ("json", "regex", "choice", "grammar")},
    **dict.fromkeys(("allowed_token_ids", "bad_words"), ([],)),
    "logit_bias": ({},),
    "top_logprobs": (0, 1),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
MAX_NUMBER = 3.4e38  # of float32, which rewards become
TEXT_PARTS = ("text", "input_text", "output_text")


class Fields:
    """A JSON object of a request, with its place there. All methods raise ApiError (400), which
    names the field.

    Example: Fields({"role": 5}, "messages[0]").need("role", str)
    """

    def __init__(self, values: Body, at: str = "") -> None:
        self.values, self.at = values, at

    def refused(self, key: str, why: str) -> ApiError:
        return ApiError(400, f"{self._place(key)}: {why}", param=self._place(key))

    def need(self, key: str, kind: type) -> Any:
        """Return a field that has this type; integers are numbers, and become floats."""
        value: Any = self.values.get(key)
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise self.refused(key, f"must be {NAMES[kind]}")
        if kind is float and not -MAX_NUMBER <= value <= MAX_NUMBER:  # JSON's 1e999 is infinite
            raise self.refused(key, "must be a smaller number")
        return float(value) if kind is float else value

    def get(self, key: str, kind: type) -> Any:
        """Return a field, None if it is absent or null."""
        return None if self.values.get(key) is None else self.need(key, kind)

    def inside(self, key: str) -> "Fields":
        """Return an object in a field, an empty one if there is none."""
        return Fields(self.get(key, dict) or {}, self._place(key))

    def items(self, key: str) -> "list[Fields]":
        """Return the objects of a list, none if it is absent."""
        found = self.get(key, list) or []
        for at, each in enumerate(found):
            if not isinstance(each, dict):
                raise self.refused(f"{key}[{at}]", "must be an object")
        return [Fields(each, self._place(f"{key}[{at}]")) for at, each in enumerate(found)]

    def _place(self, key: str) -> str:
        return f"{self.at}.{key}" if self.at else key

    def text(self, key: str) -> str:
        """Return a text, or the texts of a list of parts."""
        if isinstance(self.values.get(key), str):
            return self.values[key]
        self.need(key, list)
        texts: list[str] = []
        for part in self.items(key):
            if (kind := part.values.get("type")) not in TEXT_PARTS:
                why = f"a part of type {str(kind)[:40]!r} is not possible; only text is"
                raise self.refused(key, why)
            texts.append(part.need("text", str))
        return "\n".join(texts)


def refuse_others(body: Fields) -> None:
    """Raises ApiError (400) for a field of `NEUTRAL` with another value."""
    for key, allowed in NEUTRAL.items():
        if (value := body.values.get(key)) is not None and value not in allowed:
            only = " or ".join(map(json.dumps, allowed))
            why = f"only {only} is possible" if only else "is not possible here; leave it out"
            raise body.refused(key, why)


def max_tokens(body: Fields, *keys: str) -> int | None:
    """Return the first of these fields that is given. Raises ApiError (400)."""
    for key in keys:
        if (value := body.get(key, int)) is not None:
            if value < 1:
                raise body.refused(key, "must be at least 1")
            return value
    return None


def sampling(body: Fields, limits: SamplingLimits, stop_key: str = "stop") -> Body:
    """Return what `Asked` has of sampling, {} unless it is free. Raises ApiError (400)."""
    given = body.values.get(stop_key)
    stop = [given] if isinstance(given, str) else body.get(stop_key, list) or []
    if not all(isinstance(each, str) for each in stop):
        raise body.refused(stop_key, "must be a text or a list of texts")
    asked = {key: body.get(key, float) for key in ("temperature", "top_p")}
    asked |= {key: body.get(key, int) for key in ("top_k", "seed")}
    if asked["top_k"] == -1:
        asked["top_k"] = 0
    if limits.is_free:
        return {**asked, "stop": tuple(stop)}
    if stop and set(stop) != set(limits.stop):
        raise body.refused(stop_key, f"is {list(limits.stop)} in this run; leave it out")
    for key, value in asked.items():
        own = getattr(limits, key, None)
        if value is not None and value != own:
            is_own = f"is {own} in this run" if own is not None else "is drawn by the run"
            raise body.refused(key, f"{is_own}; leave it out")
    return {}


# Tools and their calls


def tools_of(
    body: Fields,
    kinds: tuple[str | None, ...] = ("function",),
    inside: str | None = None,
    parameters: str = "parameters",
) -> tuple[Tool, ...]:
    """Return the tools, with what the model sees of them; none if `tool_choice` is "none". Raises
    ApiError (400), too, if that forces a call."""
    choice = body.values.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        why = 'only "auto" or "none" is possible: nothing forces a call'
        raise body.refused("tool_choice", why)
    found: list[Tool] = []
    for each in body.items("tools"):
        if each.values.get("type") not in kinds:
            raise each.refused("type", f"only {kinds[-1]!r} is possible; there are no other tools")
        given = each if inside is None else each.inside(inside)
        schema = given.get(parameters, dict) or {"type": "object", "properties": {}}
        about = {"name": given.need("name", str), "description": given.get("description", str)}
        about["description"] = about["description"] or ""
        found.append({"type": "function", "function": {**about, "parameters": schema}})
    return () if kind == "none" else tuple(found)


def call_of(id: str, function: Fields, key: str = "arguments") -> Body:
    """Return a call of a message; arguments that are no JSON object stay a text. Raises ApiError
    (400)."""
    name, arguments = function.need("name", str), function.values.get(key)
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, dict):
        raise function.refused(key, "must be a text with JSON")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_of(answered: Answered) -> list[tuple[str, str, Any]]:
    """Return (id, name, arguments) of the calls of a turn; a call without an id gets one."""
    calls: list[Body] = answered.message.get("tool_calls") or []
    functions = [(each.get("id") or new_id("call"), each["function"]) for each in calls]
    return [(id, function["name"], function["arguments"]) for id, function in functions]


def as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
