"""Types of message fields, with their bounds: the length of each, and the range of numbers.

Owns the bounds only; message.py has the messages. Must not import anything of LightRL.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

# Limits of one message: beyond any need, and small enough that memory holds several.
MAX_WORD = 256  # characters of a name, an address, a digest
MAX_TEXT = 4096  # characters of a reason
MAX_REASON = 2 * MAX_TEXT  # and of one that is passed on, with its source
MAX_LONG_TEXT = 1 << 24  # characters of a prompt or a response that is shown
MAX_CONFIG = 1 << 20  # characters
MAX_FILES = 64  # of a model
MAX_FILE_BYTES = 192 << 20
MAX_RESPONSES = 1 << 16  # of a node, of a prompt, of a chunk
MAX_GROUPS = 1 << 21  # of a shard
MAX_TOKEN_BYTES = 1 << 28  # of one response: 64 million tokens
MAX_TENSORS = 1 << 20
MAX_BUCKETS = 1 << 20
MAX_DIMENSIONS = 16
MAX_NAME = 1024  # characters of a tensor's name
MAX_STOPS = 1024  # token ids
MAX_SOURCES = 1024  # of one version
MAX_ADDRESSES = 16  # of one node
MAX_DELTAS = 256  # in a chain
MAX_TRAINERS = 4096  # nodes that train together
MAX_PARTS = 1 << 16  # of their devices
MAX_RELAYED_BYTES = 192 << 20  # of a frame from one of them to another
MAX_METRICS = 4096
MAX_ROWS = 1 << 16  # of a list that is shown
MAX_EVALS = 1 << 14  # of a run
MAX_WATCH_S = 3600.0
MAX_ENGINE_S = 1e12  # 30,000 years

RESPONSES = Meta(max_length=MAX_RESPONSES)
ROWS = Meta(max_length=MAX_ROWS)
EVALS = Meta(max_length=MAX_EVALS)
Word: TypeAlias = Annotated[str, Meta(max_length=MAX_WORD)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_WORD)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Reason: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON)]
LongText: TypeAlias = Annotated[str, Meta(max_length=MAX_LONG_TEXT)]
Tokens: TypeAlias = Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]
# of the tokens of one response
Bits: TypeAlias = Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES // 32)]
Relayed: TypeAlias = Annotated[bytes, Meta(max_length=MAX_RELAYED_BYTES)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# not negative, and written down as int32
Int32: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Version: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]  # of the policy; a step, too
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
EngineSeconds: TypeAlias = Annotated[float, Meta(ge=0, lt=MAX_ENGINE_S)]
Metrics: TypeAlias = Annotated[dict[Word, float], Meta(max_length=MAX_METRICS)]
ModelFiles: TypeAlias = Annotated[
    dict[Word, Annotated[bytes, Meta(max_length=MAX_FILE_BYTES)]], Meta(max_length=MAX_FILES)
]
DeviceParts: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_PARTS)]
Slots: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RESPONSES)]
Attempt: TypeAlias = tuple[Name, Int32]  # at a response
Role: TypeAlias = Literal["coordinator", "trainer", "rollout", "environment"]
