"""How a function is described to the model, and how the model's arguments become the function's.

Owns the way from type hints and docstrings to a JSON schema, in the form of transformers'
`get_json_schema`, for which chat templates are written. Standard library only: see base.py.
"""

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
    description, texts = parse_docstring(inspect.getdoc(function) or "", parameters)
    properties: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where}: parameter {key!r} cannot be given by name")
        if key not in hints:
            raise UserError(f"{where}: parameter {key!r} has no type hint")
        try:
            properties[key] = _schema_of(hints[key]) | texts.get(key, {})
        except TypeError as e:
            raise UserError(f"{where}: parameter {key!r} is of type {e}, not {_KNOWN}") from None
        default = getattr(parameter.default, "value", parameter.default)  # of an enumeration
        if default is None or isinstance(default, str | int | float):
            properties[key]["default"] = default
    required = [key for key, each in parameters.items() if each.default is each.empty]
    taken = {"type": "object", "properties": properties, "required": required}
    described = {"name": name, "description": description, "parameters": taken}
    return {"type": "function", "function": described}, {key: hints[key] for key in parameters}


def parse_docstring(text: str, names: Iterable[str]) -> tuple[str, dict[str, dict[str, str]]]:
    """Return what precedes the sections of a docstring as Google, numpy or Sphinx have it, and
    {"description": text} of the parameters that it describes."""
    section = _SECTION.search(text)
    description, rest = (
        (text[: section.start()], text[section.start() :]) if section else (text, "")
    )
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if item := re.search(_ITEM.format(re.escape(name)), rest):
            words = item[2].partition("\n")[2] if _NUMPY.search(rest) else item[2]
            found[name] = {"description": " ".join(words.split())}
    return description.strip(), {name: each for name, each in found.items() if each["description"]}


def fit(arguments: Any, schema: ToolSchema, hints: Hints) -> dict[str, Any]:
    """Return the arguments as the function takes them: enumerations as members, numbers as int or
    float. Raises ArgumentError."""
    taken = schema["function"]["parameters"]
    if not isinstance(arguments, dict):
        raise ArgumentError("the arguments are no JSON object")
    if unknown := [name for name in arguments if name not in hints]:
        raise ArgumentError(f"no argument {unknown[0]!r}; there are: {', '.join(hints) or 'none'}")
    if missing := [name for name in taken["required"] if name not in arguments]:
        raise ArgumentError(f"argument {missing[0]!r} is missing")
    fitted: dict[str, Any] = {}
    for name, value in arguments.items():
        try:
            fitted[name] = _fitted(value, hints[name])
        except ValueError:
            expected = json.dumps({**taken["properties"][name], "description": None})
            expected = expected.replace(', "description": null', "")
            raise ArgumentError(f"argument {name!r}: {value!r:.80} is not {expected}") from None
    return fitted


def _schema_of(hint: Any) -> dict[str, Any]:
    """Raises TypeError, whose text is the hint."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:  # first, since it may have no hash
        texts = [each for each in args[1:] if isinstance(each, str)]
        return _schema_of(args[0]) | ({"description": texts[0]} if texts else {})
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal or _is_enum(hint):
        values = [*args] if origin is Literal else [member.value for member in hint]
        if all(type(value) in _JSON_TYPES for value in values):
            return _union(_JSON_TYPES[type(value)] for value in values) | {"enum": values}
    if origin is list:
        return {"type": "array", "items": _schema_of(args[0])}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(args[1])}
    if origin in (Union, types.UnionType):
        members = [_schema_of(each) for each in args if each is not type(None)]
        schema = {"anyOf": members} if len(members) > 1 else members[0]
        if all([*each] == ["type"] for each in members):
            schema = _union(each["type"] for each in members)
        return schema | ({"nullable": True} if type(None) in args else {})
    raise TypeError(getattr(hint, "__name__", hint))


def _union(names: Iterable[str]) -> dict[str, Any]:
    kinds = [*dict.fromkeys(names)]
    return {"type": kinds if len(kinds) > 1 else kinds[0]}


def _fitted(value: Any, hint: Any) -> Any:
    """Raises ValueError."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fitted(value, args[0])
    if origin in (Union, types.UnionType):
        # as it is, where that is possible: 3 for float | int
        for each in sorted(args, key=lambda each: each is not type(value)):
            try:
                return _fitted(value, each)
            except ValueError:
                continue
    elif origin is Literal or _is_enum(hint):
        for each in args or hint:
            known = each if args else each.value
            if known == value and type(known) is type(value):
                return each
    elif origin is list and isinstance(value, list):
        return [_fitted(each, args[0]) for each in value]
    elif origin is dict and isinstance(value, dict):
        return {key: _fitted(each, args[1]) for key, each in value.items()}
    elif hint is Any or type(value) is hint:
        return value
    elif hint is float and type(value) is int:
        return float(value)
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)
