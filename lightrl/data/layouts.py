"""Prompt, answer and id of a row in the layouts of verl, TRL, SkyRL and GSM8K. Pure.

Must not use files, templates or tokens.
"""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

from lightrl.config.data import ANSWER_KEY
from lightrl.errors import DataError, first_line
from lightrl.wire import to_json

MESSAGES = re.compile(  # that are text, also those of ShareGPT
    r"""\s*\[\s*\{\s*['"]((role|content)['"]\s*:|from['"]\s*:\s*['"](human|user|system)\b)"""
)
MAX_ID = 128  # characters
ANSWER_COLUMNS = ("reward_model", "reward_spec", "ground_truth", "solution")
TOOLS = "tools"  # descriptions of functions, for the chat template
ID_COLUMNS = ("id", "extra_info")  # see `explicit_id`


def prompt_column(row: Mapping[str, Any], prompt_key: str) -> str:
    """`prompt_key`, or the column of a layout without it."""
    if prompt_key == "prompt" and prompt_key not in row and "question" in row:  # GSM8K
        return "question"
    return prompt_key


def prompt_of(where: str, row: Mapping[str, Any], prompt_key: str) -> Any:
    """Text or chat messages. Raises DataError if it is neither."""
    key = prompt_column(row, prompt_key)
    if key not in row:
        raise DataError(
            f"{where}: no {key!r} (data.prompt_key); its keys are {', '.join(row) or 'none'}"
        )
    prompt = row[key]
    if not isinstance(prompt, str | list):
        kind = "missing (null or NaN)" if prompt is None else type(prompt).__name__
        raise DataError(f"{where}: {key!r} is {kind}, expected text or a list of chat messages")
    return prompt


def messages_of(where: str, prompt: Any) -> Any:
    """The messages that a prompt holds as JSON; any other prompt unchanged. Raises DataError for
    text that begins like messages and is not JSON, as pandas writes lists into CSV."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith(("[", "{")):
        return prompt
    found = _parsed(prompt)
    messages = [found] if isinstance(found, dict) else found
    if isinstance(messages, list) and messages and all(map(is_message, messages)):
        return messages
    if MESSAGES.match(prompt):
        raise DataError(f"{where}: the prompt is the text of chat messages, but not such JSON")
    return prompt


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """The descriptions of functions in a column, also as JSON; None if there are none."""
    found = _parsed(value)
    tools = list(map(_parsed, found)) if isinstance(found, list) else []
    return _without_none(tools) if tools and all(isinstance(t, dict) for t in tools) else None


def _parsed(value: Any) -> Any:
    """The value of text that is JSON; anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def is_message(value: Any) -> bool:
    """Return whether it has the keys of a chat message."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def answer_of(row: Mapping[str, Any], answer_key: str) -> Any:
    """The reference answer of a row in any layout; None if there is none.

    The first of: the column that the config names, verl's, SkyRL's, a column "answer".
    """
    if answer_key in row and answer_key != ANSWER_KEY:
        return row[answer_key]
    for column in ANSWER_COLUMNS[:2]:  # verl, SkyRL
        nested = row.get(column)
        if isinstance(nested, Mapping) and nested.get("ground_truth") is not None:
            return nested["ground_truth"]
    return next((row[k] for k in (answer_key, *ANSWER_COLUMNS[2:]) if k in row), None)


def explicit_id(row: Mapping[str, Any]) -> str | None:
    extra = row.get("extra_info")
    for value in (row.get("id"), extra.get("index") if isinstance(extra, Mapping) else None):
        if isinstance(value, str | int) and str(value):
            return str(value)
    return None


def require_usable(where: str, name: str) -> None:
    """An id becomes part of the names of responses, in logs and messages. Raises DataError."""
    if len(name) > MAX_ID or not name.isprintable():
        raise DataError(
            f"{where}: id {name[:40]!r}: at most {MAX_ID} characters, none of them control "
            "characters"
        )


def id_key(own: str) -> int:
    """64 bits of an id, the same for 7 and "7"."""
    if own.isdecimal() and own.isascii() and len(own) < 19 and (own == "0" or own[0] != "0"):
        return int(own)
    digest = hashlib.blake2b(own.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def content_id(prompt: Any) -> str:
    """16 hexadecimal digits, by the prompt alone, or by the whole row where it has none."""
    text = json.dumps(prompt, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def content_key(prompt: Any) -> int:
    """64 bits of a prompt, equal where `content_id` is; quick. A collision only adds a number to
    an id."""
    if isinstance(prompt, str):
        return text_key(prompt.encode("utf-8", "surrogatepass"))
    return text_key(json.dumps(prompt, sort_keys=True, default=str).encode())


def text_key(text: bytes | memoryview) -> int:
    return zlib.crc32(text) << 32 | (len(text) & 0xFFFFFFFF)


def without_nan(value: Any) -> Any:
    """Return `value` with None in place of each NaN, pandas' missing value."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _without_none(value: Any) -> Any:
    """Omit keys whose value is None: parquet gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def portable(where: str, row: dict[str, Any], needed: frozenset[str]) -> dict[str, Any]:
    """The row for reward workers: without values that JSON cannot carry, as binary data.

    Raises DataError if a `needed` column loses any, or the row its id.
    """
    if not _obstacle(row):
        return row
    kept = _carried(row)
    if (own := explicit_id(row)) != explicit_id(kept):
        raise DataError(f"{where}: the id holds what JSON cannot carry: {_obstacle(own)}")
    for name in needed & row.keys():
        if name not in kept or kept[name] != row[name]:
            raise DataError(
                f"{where}: column {name!r} holds what JSON cannot carry: {_obstacle(row[name])}"
            )
    return kept


def _carried(value: Any, depth: int = 8) -> Any:
    """Return `value` without the parts that JSON cannot represent; an object that contains nothing
    else is omitted as a whole."""
    if not isinstance(value, dict) or not depth or not _obstacle(value):
        return value
    rests = {k: _carried(v, depth - 1) for k, v in value.items()}
    return {k: v for k, v in rests.items() if (v or not value[k]) and not _obstacle({k: v})}


def _obstacle(value: Any) -> str:
    """Why JSON cannot carry it; "" if it can."""
    try:
        if _is_binary(value):
            return "binary data"
        to_json(value)
    except (TypeError, ValueError, RecursionError) as e:
        return first_line(e)
    return ""


def _is_binary(value: Any) -> bool:
    """Return whether it holds binary data."""
    if isinstance(value, dict):
        return any(map(_is_binary, value.values()))
    if isinstance(value, list):
        return any(map(_is_binary, value))
    return isinstance(value, bytes | bytearray | memoryview)
