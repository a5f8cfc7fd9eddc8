"""Loss masks as a coordinator packs them."""

from collections.abc import Sequence


def pack_mask(flags: Sequence[bool]) -> bytes:
    """Example: pack_mask([False, True, True]) == b"\\x06"; pack_mask([True, True]) == b"" """
    if all(flags):
        return b""
    bits = sum(1 << j for j, is_trained in enumerate(flags) if is_trained)
    return bits.to_bytes(-(-len(flags) // 8), "little")
