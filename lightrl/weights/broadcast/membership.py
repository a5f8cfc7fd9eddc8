"""The parameters of a broadcast that daemons, ranks and engines share.

Must not import torch: daemons import this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from lightrl.messages.broadcasts import BroadcastGroup

MIN_RATE = 10e6  # bytes a second; a slower broadcast is given up
UNWANTED = "it is not wanted any more"  # why a member leaves that pulls instead
IN_FLIGHT = 4  # buckets that are passed on while the next ones arrive
# Without these NCCL's threads end the process when an operation fails or takes too long.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}

# Whether a transfer that is in progress is of no use any more.
IsUnwanted: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Membership:
    """A process's place in a broadcast group.

    Example: Membership(BroadcastGroup("7c1f...", "10.0.0.1:41873", 1, 3, "gloo"), 30.0)
    """

    group: BroadcastGroup
    # without progress, until the member gives up
    timeout_s: float


def transfer_limit_s(num_bytes: int, timeout_s: float) -> float:
    """Return the limit of a whole broadcast: members form a group, then transfer buckets one by
    one. Members notice most failures earlier, after `timeout_s` without progress."""
    return 2 * timeout_s + num_bytes / MIN_RATE
