"""The largest frame of each message that is accepted, and the one just beyond: what decoding them
costs.

Built by construction for as much memory a byte as the types allow: many short things instead of one
long.
"""

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import msgspec
import pytest

from lightrl.errors import ProtocolError
from lightrl.messages import fields
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL
from lightrl.transport.validate import check_bounds
from lightrl.wire import MESSAGES

FRAME_BYTES = 1 << 20  # the most that the coordinator takes at once
MAX_TIMES = 16  # bytes of memory for a byte of such a frame
BIG = (1 << 31) - 1  # five bytes, and an object of its own
TICK = b"\1\0\0\0"

TOKENS = {"response": "r", "attempt": BIG, "offset": BIG, "token_ids": TICK, "logprobs": TICK}
REQUEST = {
    "response": "r",
    "attempt": BIG,
    "seed": BIG,
    "prompt": TICK,
    "prefix": TICK,
    "max_new_tokens": BIG,
}
TRAINED = {
    "response": "r",
    "token_ids": TICK,
    "rollout_logprobs": TICK,
    "reward": 1.5,
    "finish_reason": "stop",
    "loss_mask": b"\x01",
}
PUBLISH = {"policy_version": 1, "digest": "d", "num_bytes": BIG, "manifest_bytes": BIG}
BASE = {"num_bytes": BIG, "manifest_bytes": BIG}
DELTA = {
    **dict.fromkeys(("base", "target", "digest"), "d"),
    **dict.fromkeys(("num_bytes", "manifest_bytes"), BIG),
}
ROW: dict[str, Any] = {
    **dict.fromkeys(("name", "state", "host", "device"), "n"),
    **dict.fromkeys(("pid", "running", "slots"), BIG),
    **dict.fromkeys(("tokens_per_s", "kv_usage", "heard_s_ago"), 1.5),
    "roles": ("rollout",),
    "policy_version": BIG,
}
SHOWN = {
    **dict.fromkeys(("run", "run_dir", "state"), "r"),
    **dict.fromkeys(("step", "num_steps"), BIG),
    "policy_version": None,
    "elapsed_s": 1.5,
}
HELLO = {
    "node": "n",
    "incarnation": 1,
    "roles": ("rollout",),
    "protocol": PROTOCOL,
    "pid": 1,
    "host": "h",
}
NAMED = {f"{k:x}": 1 for k in range(fields.MAX_METRICS + 1)}


@dataclass(frozen=True)
class Largest:
    """A message that grows: `make(n)` are its fields with n of what it can hold, at most `most`."""

    name: str
    field: str
    most: int
    make: Callable[[int], dict[str, Any]]

    def frame(self, count: int) -> bytes:
        return msgspec.msgpack.encode((self.name, self.make(count)))


@cache
def largest(entry: Largest) -> bytes:
    """As much of it as fits into a frame and is allowed."""
    few = len(entry.frame(0))
    size = max(1, (len(entry.frame(100)) - few) // 100)
    count = min(entry.most, (FRAME_BYTES - few) // size)
    while len(frame := entry.frame(count)) > FRAME_BYTES:
        count -= 1 + (len(frame) - FRAME_BYTES) // size
    return frame


def of(name: str, rest: dict[str, Any], field: str, most: int, item: Any) -> Largest:
    return Largest(name, field, most, lambda n: {**rest, field: (item,) * n})


def text(name: str, rest: dict[str, Any], field: str, most: int) -> Largest:
    return Largest(name, field, most, lambda n: {**rest, field: "\U0001f600" * n})


def named(name: str, rest: dict[str, Any], field: str) -> Largest:
    most = fields.MAX_METRICS
    return Largest(name, field, most, lambda n: {**rest, field: dict(list(NAMED.items())[:n])})


STEP = {"step": 1, "policy_version": 1}
CHUNK = {"policy_version": 1, "digest": "d"}
SHARD = {"step": 1, "index": 1, "policy_version": 1}
PLACE = {"name": "g", "address": "h:1", "rank": 1, "world": 2, "backend": "gloo"}
ORDER = {"world": 2, "backend": "gloo"}
TAKEN = {"policy_version": 1, "wants_delta": True}
GROUP = {"group": "g", "prompt": TICK}
HISTORY = {"group": "g", "responses": (), "rewards": ()}
GENERATE = {"policy_version": 1, "sampling": {}, "requests": ()}
EPISODE = {"response": "r", "incarnation": 1}
BEGIN = {**EPISODE, "seed": BIG, "max_tokens": BIG}
PLAYED = {"observation": TICK, "digest": "d", "sampled": TICK, "finish_reason": "stop"}
OBSERVED = {
    **EPISODE,
    **dict.fromkeys(("turn", "offset", "max_new_tokens"), BIG),
    "token_ids": TICK,
    "digest": "d",
}
R = fields.MAX_RESPONSES
TABLE = [
    of("Hello", HELLO, "running", R, ("r", BIG)),
    of("Hello", HELLO, "running", R, ("response", BIG)),
    text("Hello", HELLO, "host", fields.MAX_WORD),
    text("Welcome", {"run": "r"}, "config_json", fields.MAX_CONFIG),
    text("Welcome", {"run": "r"}, "refused", fields.MAX_REASON),
    Largest(
        "Welcome", "model_files", fields.MAX_FILES, lambda n: {"run": "r", "model_files": files(n)}
    ),
    text("Heartbeat", {}, "device", fields.MAX_WORD),
    of("Generate", GENERATE, "requests", R, REQUEST),
    of("Generate", GENERATE, "histories", R, HISTORY),
    of(
        "Generate",
        {**GENERATE, "sampling": {}},
        "histories",
        R,
        {**HISTORY, "responses": (b"",) * 9},
    ),
    Largest(
        "Generate", "stop_token_ids", fields.MAX_STOPS, lambda n: {**GENERATE, "sampling": stops(n)}
    ),
    of("Abort", {}, "attempts", R, ("r", BIG)),
    of("TokenChunk", CHUNK, "responses", R, TOKENS),
    text("TokenChunk", {"policy_version": 1, "responses": ()}, "digest", fields.MAX_WORD),
    of("TrainShard", SHARD, "groups", fields.MAX_GROUPS, {**GROUP, "responses": (TRAINED,)}),
    of("TrainShard", SHARD, "groups", fields.MAX_GROUPS, {**GROUP, "responses": ()}),
    named("StepDone", STEP, "metrics"),
    of("WeightsEndpoint", {"secret": "s" * 16}, "addresses", fields.MAX_ADDRESSES, "h:1"),
    of("PublishWeights", PUBLISH, "deltas", fields.MAX_DELTAS, DELTA),
    of("PublishWeights", PUBLISH, "portions", R, 300),
    of("PublishWeights", PUBLISH, "replicas", R, 300),
    Largest(
        "PublishWeights",
        "base",
        fields.MAX_WORD,
        lambda n: {**PUBLISH, "base": {**BASE, "digest": "\U0001f600" * n}},
    ),
    text("WeightsReady", {"policy_version": 1}, "digest", fields.MAX_WORD),
    text("WeightsFailed", {"policy_version": 1}, "reason", fields.MAX_TEXT),
    text("BroadcastStatus", {"policy_version": 1, "group": "g"}, "reason", fields.MAX_TEXT),
    Largest(
        "VersionTaken",
        "broadcast",
        fields.MAX_WORD,
        lambda n: {**TAKEN, "broadcast": {**ORDER, "group": "\U0001f600" * n}},
    ),
    Largest(
        "PublishWeights",
        "group",
        fields.MAX_WORD,
        lambda n: {**PUBLISH, "group": {**PLACE, "name": "\U0001f600" * n}},
    ),
    of("BeginEpisode", BEGIN, "turns", R, PLAYED),
    text("BeginEpisode", BEGIN, "row", fields.MAX_LONG_TEXT),
    of("EndEpisode", {}, "episodes", R, ("r", BIG)),
    text("Observed", OBSERVED, "record", fields.MAX_LONG_TEXT),
    named("EpisodeEnded", {**EPISODE, "turn": 1, "stop": "done"}, "metrics"),
    of("TrainerSet", {"leader": "t"}, "followers", fields.MAX_TRAINERS, ("u", BIG)),
    Largest(
        "TrainerRelay",
        "frame",
        fields.MAX_RELAYED_BYTES,
        lambda n: {"node": "t", "frame": bytes(n)},
    ),
    text("Drain", {"node": "n"}, "reason", fields.MAX_REASON),
    text("Bye", {}, "reason", fields.MAX_TEXT),
    of("Snapshot", SHOWN, "nodes", fields.MAX_ROWS, ROW),
    of("Snapshot", SHOWN, "evals", fields.MAX_EVALS, (BIG, {"e": 1.0})),
    of("Snapshot", SHOWN, "events", fields.MAX_ROWS, (1, "e")),
    of("Snapshot", SHOWN, "rewards", fields.MAX_ROWS, 1),
    named("Snapshot", SHOWN, "counters"),
    of(
        "SetDevices",
        {"role": "trainer", "number": BIG, "active": True},
        *("parts", fields.MAX_PARTS, BIG),
    ),
]
# numbers alone
FIXED = {
    *("Checkpointed", "ShardsTaken", "StepEpisode", "Watch"),
    "DevicesReleased",
}


def files(count: int) -> dict[str, bytes]:
    return {f"{k}": bytes(FRAME_BYTES // 100) for k in range(count)}


def stops(count: int) -> dict[str, Any]:
    return {"stop_token_ids": (BIG,) * count}


def label(entry: Largest) -> str:
    return f"{entry.name}.{entry.field}"


def test_every_message_is_measured_here():
    assert {e.name for e in TABLE} | FIXED == {c.__name__ for c in get_args(Message)}


@pytest.mark.parametrize("entry", TABLE, ids=label)
def test_memory_for_the_largest_frame_is_a_small_multiple_of_it(entry: Largest):
    frame = largest(entry)
    with peak() as used:
        check_bounds(MESSAGES.decode(frame))
    assert used() < MAX_TIMES * FRAME_BYTES, f"{used() / len(frame):.0f} for a byte"


@pytest.mark.parametrize("entry", [e for e in TABLE if e.most < FRAME_BYTES], ids=label)
def test_what_is_longer_is_refused_before_memory_is_taken_for_it(entry: Largest):
    frame = entry.frame(entry.most + 1)
    with peak() as used, pytest.raises(ProtocolError, match="length <="):
        MESSAGES.decode(frame)
    # which is counted when it has been read
    is_text = isinstance(entry.make(1).get(entry.field), str)
    assert used() < 10_000 + 6 * len(frame) * is_text


def test_a_length_that_is_only_announced_costs_nothing():
    for start in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):  # of an array, a map, bytes, a text
        for name, field in (
            ("Hello", "running"),
            ("StepDone", "metrics"),
            ("TokenChunk", "responses"),
        ):
            key = msgspec.msgpack.encode(field)
            frame = (
                b"\x92" + msgspec.msgpack.encode(name) + b"\x81" + key + start + b"\x0f\xff\xff\xff"
            )
            with peak() as used, pytest.raises(ProtocolError):
                MESSAGES.decode(frame)
            assert used() < 10_000


@pytest.mark.parametrize("name", ["x" * 60, "x" * 100, "x" * FRAME_BYTES])
def test_a_name_of_a_message_that_is_none_is_not_repeated_at_length(name: str):
    with pytest.raises(ProtocolError) as error:
        MESSAGES.decode(msgspec.msgpack.encode((name, {})))
    assert len(str(error.value)) < 200


def test_time_for_the_largest_frames_is_about_that_of_honest_tokens():
    """Of a frame of the same size; the event loop stands still meanwhile."""
    honest = seconds(largest(of("TokenChunk", CHUNK, "responses", R, TOKENS)))
    for entry in TABLE:
        assert seconds(largest(entry)) < 20 * honest, label(entry)
    hostile = of("Hello", HELLO, "running", R, ("", 1)).frame(FRAME_BYTES // 3)
    assert seconds(hostile) < 4 * honest


@contextlib.contextmanager
def peak() -> Iterator[Callable[[], int]]:
    """Bytes that were held at once beyond what was held before; call it afterwards."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: most - before
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def seconds(frame: bytes) -> float:
    """The best of some, of this thread alone."""
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        with contextlib.suppress(ProtocolError):
            check_bounds(MESSAGES.decode(frame))
        best = min(best, time.thread_time() - start)
    return best
