"""Messages to bytes and back: the only file that uses MessagePack, where types are checked.

A frame is the MessagePack array [class name, fields by name]. Unknown fields are skipped; missing,
mistyped or too long ones are a `ProtocolError`. Never pickle.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
import msgspec.inspect as types

from lightrl.core.arrays import decode, encode
from lightrl.errors import ProtocolError
from lightrl.messages.message import Message

T = TypeVar("T")

MAX_FRAME_BYTES = 256 << 20

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[Annotated[str, msgspec.Meta(max_length=64)], msgspec.Raw])


class Codec(Generic[T]):
    """Encodes and decodes the classes of one closed union of dataclasses, or a single one."""

    def __init__(self, union: Any) -> None:
        classes = get_args(union) or (union,)
        self._tags: dict[type, str] = {c: _tag(c) for c in classes}
        self._decoders = {_tag(c): msgspec.msgpack.Decoder(c) for c in classes}

    def encode(self, message: T) -> bytes:
        return _encoder.encode((self._tags[type(message)], message))

    def decode(self, frame: bytes | memoryview) -> T:
        """Raises ProtocolError for anything but one well-typed message of the union."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
        try:
            name, body = _envelope.decode(frame)
            return self._decoders[name].decode(body)
        except KeyError as e:
            raise ProtocolError(f"unknown message {e}") from None
        except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeDecodeError) as e:
            raise ProtocolError(f"undecodable frame: {e}") from None

    def name(self, frame: bytes | memoryview) -> str:
        """Return the class that a frame names. Raises ProtocolError without one."""
        try:
            return _envelope.decode(frame)[0]
        except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeDecodeError) as e:
            raise ProtocolError(f"undecodable frame: {e}") from None


LARGEST_F32 = (2 - 2**-23) * 2.0**127


def _tag(kind: type) -> str:
    """Return the name of a class in a frame, which may be an older one."""
    return getattr(kind, "TAG", kind.__name__)


MESSAGES: Codec[Message] = Codec(Message)


def to_bytes(value: Any) -> bytes:
    """Return dataclasses and plain types as MessagePack, the same bytes for equal values."""
    return _encoder.encode(value)


def from_bytes(data: bytes | memoryview, kind: type[T]) -> T:
    """Raises ProtocolError if `data` is not MessagePack of that type."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeDecodeError) as e:
        raise ProtocolError(f"undecodable: {e}") from None


def to_json(value: Any) -> bytes:
    """Return dataclasses and plain types as one line of JSON. A float that is not finite is null:
    JSON has no number for it."""
    return msgspec.json.encode(value)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """The inverse of `to_json`: null is NaN where `kind` has a float that may not be None.

    Raises ProtocolError if `data` is not JSON of that type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        try:  # slower, for the few files with a null
            tree = _with_nan(msgspec.json.decode(data), types.type_info(kind))
            return msgspec.convert(tree, kind, str_keys=True)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ProtocolError(f"undecodable JSON: {e}") from None


def _with_nan(value: Any, kind: types.Type) -> Any:
    """Return `value` with NaN for each null where `kind` has a float. Of a union, `kind` is the
    first member that is a container of the same sort."""
    if isinstance(kind, types.UnionType):
        kind = next((member for member in kind.types if _holds(member, value)), kind)
    if value is None:
        return math.nan if isinstance(kind, types.FloatType) else None
    if not _holds(kind, value):
        return value
    match kind:
        case types.DictType(value_type=of):
            return {key: _with_nan(each, of) for key, each in value.items()}
        case types.DataclassType(fields=fields):
            known = {field.encode_name: field.type for field in fields}
            return {k: _with_nan(v, known.get(k, types.AnyType())) for k, v in value.items()}
        case types.TupleType(item_types=each_of):
            return [*map(_with_nan, value, each_of), *value[len(each_of) :]]
        case types.VarTupleType(item_type=of) | types.ListType(item_type=of):
            return [_with_nan(each, of) for each in value]
        case _:
            return value


def _holds(kind: types.Type, value: object) -> bool:
    """Return whether JSON's `value` is a container of the sort of `kind`."""
    if isinstance(kind, types.DictType | types.DataclassType):
        return isinstance(value, dict)
    is_sequence = isinstance(kind, types.TupleType | types.VarTupleType | types.ListType)
    return is_sequence and isinstance(value, list)


def pack_i32(values: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32. Raises OverflowError for an id outside int32."""
    return encode(array("i", values))


def unpack_i32(data: bytes) -> list[int]:
    return _unpack("i", data)


def pack_f32(values: Sequence[float]) -> bytes:
    """Return logprobs as little-endian float32."""
    return encode(array("f", values))


def fits_f32(value: float) -> bool:
    """Return whether a number is a finite float32, but for rounding."""
    return abs(value) <= LARGEST_F32


def unpack_f32(data: bytes) -> list[float]:
    return _unpack("f", data)


def _unpack(kind: str, data: bytes) -> list[Any]:
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are not a whole number of 4-byte values")
    return decode(kind, data).tolist()


def num_trained(token_ids: bytes, loss_mask: bytes) -> int:
    """Return the trained tokens of a response. A mask has a bit for each token, the lowest first;
    without one all tokens are trained."""
    return int.from_bytes(loss_mask, "little").bit_count() if loss_mask else len(token_ids) // 4


def fits_mask(token_ids: bytes, loss_mask: bytes) -> bool:
    """Return whether this is a mask of a response of so many tokens."""
    length = len(token_ids) // 4
    is_long = (
        len(loss_mask) == -(-length // 8) and not int.from_bytes(loss_mask, "little") >> length
    )
    return is_long or not loss_mask
