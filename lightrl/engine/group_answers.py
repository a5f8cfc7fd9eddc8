"""What the workers of one engine say of a broadcast, in one, and what they can ask meanwhile: vLLM
has one for each of its GPUs.

Pure.
"""

from collections.abc import Sequence
from typing import Any

from lightrl.errors import WeightsError
from lightrl.weights.broadcast.rendezvous import IsUnwanted, OutOfReach


def require_joined(answers: Sequence[tuple[str, bool]]) -> None:
    """(why it is no member or "", whether the ranks cannot be reached), of each. Raises
    WeightsError, OutOfReach if that is why for any."""
    for is_unreachable in (True, False):
        for why, is_why in answers:
            if why and is_why == is_unreachable:
                raise OutOfReach(why) if is_unreachable else WeightsError(why)


def askable(parallel: Any, is_unwanted: IsUnwanted) -> IsUnwanted | None:
    """None where, by vLLM's `parallel_config`, a worker runs in another process than its engine: it
    cannot ask, and goes on until all has come or nothing moves any more."""
    return is_unwanted if parallel.distributed_executor_backend == "uni" else None


def common_sums(answers: Sequence[tuple[tuple[int, ...], str]]) -> tuple[int, ...]:
    """(sums over what it has received, why it must not be served or ""), of each. Raises
    WeightsError."""
    for _, why in answers:
        if why:
            raise WeightsError(why)
    first = answers[0][0]
    if any(sums != first for sums, _ in answers):
        raise WeightsError("broadcast: the workers of one engine have received different weights")
    return first
