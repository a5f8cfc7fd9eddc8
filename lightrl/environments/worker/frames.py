"""Frames between the pool and a worker, and the form in which an observation travels.

A frame is 4 bytes of length, little-endian, and one JSON object. To a worker: {"setup"} once, then
{"id", "call": "reset" | "step" | "load" | "close", "episode"} with the arguments of the call. From
it: {"ready"} or {"failed"} once, then for each call {"id", "event": "started"} when its turn comes,
and one of "returned", "raised" and "timeout".
"""

import json
import math
import socket
import struct
import traceback
from hashlib import blake2b
from itertools import count
from typing import Any

from lightrl.environments.worker.base import Message, Observation, UserError

MAX_OBSERVATION_BYTES = 1 << 20  # of its messages as JSON, and of its tools
MAX_NAME = 128  # characters of a metric
MAX_LINE = 500  # characters of an error
MAX_TRACEBACKS = 20  # in the log of a worker, for an environment that always fails
LARGEST_F32 = (2 - 2**-23) * 2.0**127

_LENGTH = struct.Struct("<I")
_num_tracebacks = count()


def pack(frame: dict[str, Any]) -> bytes:
    """Return a frame with its length."""
    data = json.dumps(frame).encode()
    return _LENGTH.pack(len(data)) + data


def receive(sock: socket.socket) -> dict[str, Any]:
    """Wait for a frame. Raises EOFError when the pool has closed the socket."""
    if not (head := sock.recv(_LENGTH.size, socket.MSG_WAITALL)):
        raise EOFError
    return json.loads(sock.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL))


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its text; of a UserError the text alone."""
    text = (str(error).strip().splitlines() or [""])[0][:MAX_LINE]
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def log_traceback(error: BaseException) -> None:
    if next(_num_tracebacks) < MAX_TRACEBACKS:
        traceback.print_exception(error)


def kind_of(value: object) -> str:
    """Return the type of a value for an error. Example: "None", "bytes", "numpy.ndarray"."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
    return "None" if value is None else name


def to_fields(observation: Observation, call: str) -> dict[str, Any]:
    """Return the fields of a "returned" frame, with a digest of messages, reward and done: hex, 16
    bytes. Raises UserError, one line, if the observation holds what cannot be used."""
    done, reward = _number(observation.done), _number(observation.reward)
    if done is None:
        raise UserError(f"done of {call} is {kind_of(observation.done)}, not True or False")
    if not observation.messages and (call == "reset" or not done):
        raise UserError(f"{call} returned no messages")
    if observation.reward is not None and (reward is None or not abs(reward) <= LARGEST_F32):
        what = kind_of(observation.reward) if reward is None else reward
        raise UserError(f"reward of {call} is {what}, not a finite number")
    metrics = {str(k)[:MAX_NAME]: _number(v) for k, v in observation.metrics.items()}
    messages = _as_json([_message(m, call) for m in observation.messages], f"messages of {call}")
    judged = {"messages": messages, "reward": reward, "done": bool(done)}
    canonical = json.dumps(judged, sort_keys=True).encode()
    return {
        **judged,
        "metrics": {k: v for k, v in metrics.items() if v is not None and math.isfinite(v)},
        "tools": _as_json(observation.tools, f"tools of {call}"),
        "num_tool_calls": observation.num_tool_calls,
        "digest": blake2b(canonical, digest_size=16).hexdigest(),
    }


def _as_json(value: Any, what: str) -> Any:
    """Return `value` as it is read back from JSON, with arrays as lists. Raises UserError if it is
    no JSON or too large."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as e:
        raise UserError(f"{what}: not JSON: {e}") from None
    data = text.encode("utf-8", "replace")  # half of a surrogate pair is no text
    if len(data) > MAX_OBSERVATION_BYTES:
        raise UserError(f"{what}: {len(data) / (1 << 20):.1f} MiB, more than the limit of 1 MiB")
    return json.loads(data)


def _message(message: Any, call: str) -> Message:
    """Return a message with its content as one text. Raises UserError without role or text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{call} returned a list of {kind_of(message)}, not of messages with role")
    content = message.get("content")
    if isinstance(content, list):  # parts, as in OpenAI's API
        texts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{call} returned a message with {kind_of(content)} as content, not text")
    return {**message, "content": content}


def _number(value: Any) -> float | None:
    """Return a number, also one of numpy or torch, as a float; None if it is none."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        return float(plain) if isinstance(plain, (int, float)) else None
    except (ValueError, OverflowError, RuntimeError):  # more than one element, or too large
        return None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and torch
        return value.tolist()
    raise TypeError(f"{kind_of(value)} cannot be written")
