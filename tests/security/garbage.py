"""Frames that nobody should send: random bytes, valid messages with bytes turned over, and messages
whose fields hold what they should not. Everything follows from a seed."""

import random
from copy import deepcopy
from typing import Any

import msgspec

from lightrl.messages.message import Message
from lightrl.wire import MESSAGES
from tests.wire.test_messages import EXAMPLES

ENCODED = [MESSAGES.encode(e) for e in EXAMPLES]
STRANGE: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**53,
    -(2**63),
    2**64 - 1,
    0.5,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    "a",
    "*",
    "../../etc/passwd",
    "\x00",
    "\U0001f600" * 300,
    "x" * 5000,
    b"",
    b"\xff" * 7,
    b"\x00" * 400,
    [],
    [[]],
    {},
    {"": None},
    [["p7@0#3", 1]] * 50,
]


def random_bytes(rng: random.Random, most: int = 600) -> bytes:
    return rng.randbytes(rng.randint(0, most))


def turned_over(rng: random.Random, frame: bytes) -> bytes:
    """With some bytes changed, and sometimes cut."""
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.2 else data)


def strange(rng: random.Random, example: Message) -> bytes:
    """The message with one to three values, at any depth, replaced: most of these decode."""
    tree = msgspec.to_builtins(example, builtin_types=(bytes,))
    for _ in range(rng.randint(1, 3)):
        _replace(rng, tree)
    try:
        return msgspec.msgpack.encode((type(example).__name__, tree))
    except OverflowError:
        return b""


def frame(rng: random.Random) -> bytes:
    """One frame of any of the three kinds."""
    match rng.randrange(8):
        case 0 | 1:
            return random_bytes(rng)
        case 2:
            return strange(rng, rng.choice(EXAMPLES))
        case _:
            return turned_over(rng, rng.choice(ENCODED))


def _replace(rng: random.Random, tree: Any) -> None:
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        child = node[key]
        if isinstance(child, dict | list) and child and rng.random() < 0.8:
            node = child
            continue
        if isinstance(node, tuple):
            return
        similar = [s for s in STRANGE if type(s) is type(child)]
        node[key] = deepcopy(rng.choice(similar if similar and rng.random() < 0.7 else STRANGE))
        return
