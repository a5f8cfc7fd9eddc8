"""How a function is described to the model, and how the model's arguments become the function's.

Owns the way from type hints and docstrings to a JSON schema, in the form of transformers'
`get_json_schema`, for which chat templates are written.
"""

import contextlib
import enum
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from lightrl.environments.worker.base import ToolSchema, UserError

Hints: TypeAlias = dict[str, Any]  # of parameters, by name

_JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
_KNOWN = "str, int, float, bool, list, dict, Any, Literal, Enum and unions of these"
_SECTION = re.compile(r"^(?:[A-Z]\w+(?: \w+)?:? *\n *-{3,} *$|[A-Z]\w*(?: \w+)?: *$|:\w+)", re.M)
_NUMPY = re.compile(r"^ *-{3,} *$", re.M)
# of one parameter, below the description: Sphinx, Google and numpy with a type, numpy without
_ITEM = r"(?m)^( *)(?::param (?:.+ )?{0}:|\*{{0,2}}{0} *(?:\(.*?\))? *:|{0} *$)(.*(?:\n+\1 +\S.*)*)"


class ArgumentError(Exception):
    """Arguments do not fit the schema; the text is for the model."""


def describe(function: Callable[..., Any], name: str, where: str) -> tuple[ToolSchema, Hints]:
    """Return the schema of a tool called `name`, and the hints that `fit` needs. Raises UserError,
    one line, which begins with `where`."""
    try:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{where}: its type hints cannot be read: {e}") from None
    text = inspect.getdoc(function) or ""
    begin = section.start() if (section := _SECTION.search(text)) else len(text)
    properties: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where}: parameter {key!r} cannot be given by name")
        if key not in hints:
            raise UserError(f"{where}: parameter {key!r} has no type hint")
        try:
            properties[key] = _schema_of(hints[key])
        except (TypeError, KeyError) as e:
            raise UserError(f"{where}: parameter {key!r} is of type {e}, not {_KNOWN}") from None
        if words := _words_on(key, text[begin:]):
            properties[key]["description"] = words
        default = getattr(parameter.default, "value", parameter.default)  # of an enumeration
        if default is None or isinstance(default, str | int | float):
            properties[key]["default"] = default
    required = [key for key, each in parameters.items() if each.default is each.empty]
    taken = {"type": "object", "properties": properties, "required": required}
    described = {"name": name, "description": text[:begin].strip(), "parameters": taken}
    return {"type": "function", "function": described}, {key: hints[key] for key in parameters}


def _words_on(name: str, sections: str) -> str:
    """Return the description of a parameter in the sections of a docstring, in the form of Google,
    numpy or Sphinx."""
    if not (item := re.search(_ITEM.format(re.escape(name)), sections)):
        return ""
    words = item[2].partition("\n")[2] if _NUMPY.search(sections) else item[2]
    return " ".join(words.split())


def fit(arguments: Any, schema: ToolSchema, hints: Hints) -> dict[str, Any]:
    """Return the arguments as the function takes them: enumerations as members, numbers as int or
    float. Raises ArgumentError."""
    taken = schema["function"]["parameters"]
    if not isinstance(arguments, dict):
        raise ArgumentError("the arguments are no JSON object")
    if missing := [name for name in taken["required"] if name not in arguments]:
        raise ArgumentError(f"argument {missing[0]!r} is missing")
    fitted: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in hints:
            raise ArgumentError(f"no argument {name!r}; there are: {', '.join(hints) or 'none'}")
        try:
            fitted[name] = _fitted(value, hints[name])
        except ValueError:
            own = {k: v for k, v in taken["properties"][name].items() if k != "description"}
            text = f"argument {name!r}: {value!r:.80} is not {json.dumps(own)}"
            raise ArgumentError(text) from None
    return fitted


def _schema_of(hint: Any) -> dict[str, Any]:
    """Raises TypeError or KeyError, whose text is the type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:  # first, since it may have no hash
        texts = [each for each in args[1:] if isinstance(each, str)]
        return _schema_of(args[0]) | ({"description": texts[0]} if texts else {})
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if members := _members(hint):
        return _union(_JSON_TYPES[type(value)] for value in members) | {"enum": [*members]}
    if origin is list:
        return {"type": "array", "items": _schema_of(args[0])}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(args[1])}
    if origin in (Union, types.UnionType):
        schemas = [_schema_of(each) for each in args if each is not type(None)]
        schema = {"anyOf": schemas} if len(schemas) > 1 else schemas[0]
        if all([*each] == ["type"] for each in schemas):
            schema = _union(each["type"] for each in schemas)
        return schema | ({"nullable": True} if type(None) in args else {})
    raise TypeError(getattr(hint, "__name__", hint))


def _union(names: Iterable[str]) -> dict[str, Any]:
    kinds = [*dict.fromkeys(names)]
    return {"type": kinds if len(kinds) > 1 else kinds[0]}


def _members(hint: Any) -> dict[Any, Any]:
    """Return the members of an enumeration or a Literal, by value; of other types {}."""
    if isinstance(hint, enum.EnumMeta):
        members: Any = hint
        return {each.value: each for each in members}
    return {each: each for each in get_args(hint)} if get_origin(hint) is Literal else {}


def _fitted(value: Any, hint: Any) -> Any:
    """Raises ValueError."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or type(value) is hint:
        return value
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if origin is Annotated:
        return _fitted(value, args[0])
    if origin is list and isinstance(value, list):
        return [_fitted(each, args[0]) for each in value]
    if origin is dict and isinstance(value, dict):
        return {key: _fitted(each, args[1]) for key, each in value.items()}
    if origin in (Union, types.UnionType):
        for each in args:
            with contextlib.suppress(ValueError):
                return _fitted(value, each)
    for known, member in _members(hint).items():
        if known == value and type(known) is type(value):
            return member
    raise ValueError
