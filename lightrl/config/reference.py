"""The config reference: every key with its default, its allowed values and its meaning.

Reads the JSON schema of the sections. Must stay importable without torch.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from lightrl.config.schema import Config, keys

TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true | false",
    "object": "table",
    "array": "list",
}
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
Schema = dict[str, Any]


def table() -> Iterator[str]:
    """Yield the lines of `lightrl config`."""
    section = ""
    for key, default, description in keys():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            yield f"\n[{section}]"
        value = "unset" if default == "null" else default
        yield f"{key:32} {value:22} {allowed(key):26} {description}".rstrip()


def allowed(key: str) -> str:
    """Return the values that a key may have. Examples: "integer > 0", "number > 0 and <= 1"."""
    schema = _schema()
    for part in key.split("."):
        name = part.removesuffix("[]")  # a list of tables, whose keys follow
        schema = cast("Schema", _resolved(schema)["properties"][name])
        schema = cast("Schema", schema["items"]) if name != part else schema
    return _words(schema)


@cache
def _schema() -> Schema:
    return Config.model_json_schema()


def _resolved(schema: Schema) -> Schema:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return cast("Schema", _schema()["$defs"][name]) if name else schema


def _words(schema: Schema) -> str:
    schema = _resolved(schema)
    if "anyOf" in schema:  # null: the key may be left out
        some = cast("list[Schema]", schema["anyOf"])
        return " | ".join(_words(s) for s in some if s.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum") or [schema["const"]]))
    kind = TYPES.get(str(schema.get("type")), "anything")
    if each := cast("list[Schema]", schema.get("prefixItems") or []):
        return f"[{', '.join(map(_words, each))}]"
    if kind == "list":
        one = _words(cast("Schema", schema.get("items") or {}))
        return f"list of ({one})" if "|" in one else f"list of {one}"
    if "pattern" in schema:
        return f"{kind} that matches {schema['pattern']}"
    bounds = " and ".join(
        f"{sign} {schema[name]}" for name, sign in BOUNDS.items() if name in schema
    )
    return f"{kind} {bounds}".rstrip()
