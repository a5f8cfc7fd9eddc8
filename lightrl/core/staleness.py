"""Staleness: the one definition, and the bound on it by admission. Pure arithmetic."""

from collections.abc import Sequence
from typing import NamedTuple


class Staleness(NamedTuple):
    """Of one response when it is trained; synchronous training has (1, 0, 0)."""

    # versions that sampled its tokens
    span: int
    # trainer's version minus the newest of them
    newest_gap: int
    # trainer's version minus the oldest: this is what max_staleness bounds
    oldest_gap: int


def staleness(spans: Sequence[tuple[int, int]], version: int) -> Staleness:
    """`spans` are (policy version, tokens) in order; `version` is the one that is being updated.

    A response without tokens is as fresh as can be.
    """
    versions = [v for v, num_tokens in spans if num_tokens]
    if not versions:
        return Staleness(0, 0, 0)
    return Staleness(len(set(versions)), version - max(versions), version - min(versions))


def admissible(max_staleness: int, version: int, batch: int, admitted: int) -> int:
    """How many more prompts may start while `version` is the newest.

    (max_staleness + version + 1) * batch - (accepted + running), as in AReaL (arXiv 2505.24298,
    section 5.1). Steps train what was admitted in the order of its admission, so a prompt that
    starts under version v is trained at version v + max_staleness at the latest: nothing slow is
    ever dropped.
    """
    return (max_staleness + version + 1) * batch - admitted
