"""Loss masks: which tokens of a response are trained, a bit for each.

Owns their bytes. Empty: all tokens are. Else bit j % 8 of byte j // 8 is that of token j, and the
bits after the last token are 0. Must not import numpy or torch: the coordinator's side reads them,
too.
"""


def num_trained(token_ids: bytes, loss_mask: bytes) -> int:
    """Tokens of a response, int32 each, that are trained."""
    return int.from_bytes(loss_mask, "little").bit_count() if loss_mask else len(token_ids) // 4


def fits(token_ids: bytes, loss_mask: bytes) -> bool:
    """Whether it is a mask of a response of so many tokens."""
    length = len(token_ids) // 4
    if not loss_mask:
        return True
    return len(loss_mask) == -(-length // 8) and not (int.from_bytes(loss_mask, "little") >> length)
