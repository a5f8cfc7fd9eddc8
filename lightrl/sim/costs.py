"""What a simulated run pays: training, getting new weights to the nodes, devices by the hour.

Owns these parts of a scenario and which values they may have. Computes nothing that depends on what
happens.
"""

from dataclasses import dataclass
from typing import Literal

from lightrl.errors import SimError


@dataclass(frozen=True, slots=True)
class Training:
    """The trainer: seconds for each token of prompt and response, each response, and each optimizer
    step.

    A response costs by itself where samples are padded, or launched one by one.
    """

    token_s: float = 2e-5
    step_s: float = 2.0
    response_s: float = 0.0
    # of a rollout node that turns to training within a round, or comes back
    switch_s: float = 0.0
    # of ranks that give their devices back, before each version and if nodes come back
    park_s: float = 0.0
    # from when a group is decided until the trainer has it
    shard_s: float = 0.0
    # tokens below which groups wait for others while a round runs: a micro-batch on each rank
    wait_tokens: int = 0
    # colocated = on the GPUs of the rollout nodes, those that are not spot nodes
    placement: Literal["dedicated", "colocated"] = "dedicated"

    def __post_init__(self) -> None:
        times = (self.token_s, self.step_s, self.response_s, self.switch_s, self.park_s)
        times += (self.shard_s, self.wait_tokens)
        if not min(times) >= 0:
            raise SimError(f"training: {self}: times must not be negative")
        if self.placement not in {"dedicated", "colocated"}:
            raise SimError(f"training.placement = {self.placement!r}: dedicated or colocated")

    def seconds(self, responses: int, tokens: int) -> float:
        """Of `responses` that have so many tokens together, prompts included."""
        return self.response_s * responses + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class Transfer:
    """New weights at a node: pulled while it still works, then loaded; or broadcast in place.

    From whom a node pulls, and who gets a version by broadcast, the core says. Each line is shared
    fairly, in each direction by itself.

    Measured is that a group of two to five gloo members forms in 0.02 to 0.2 s, on one machine of
    two cores, and that one core makes sums of 0.8 GB/s, or hashes 2.26 GB/s (a node uses four).
    Assumed, since no machine with two GPUs has run it: that NCCL takes 2 s, and a GPU makes sums of
    20 GB/s.
    """

    # of a version, in the dtype that engines serve
    num_bytes: float = 0.0
    # of a rollout node's line, towards it
    receiver_bytes_per_s: float = 6.25e9
    # and away from it; 0 = as much
    relay_bytes_per_s: float = 0.0
    # of the trainer's line, away from it
    sender_bytes_per_s: float = 25e9
    # else all pull from the trainer alone; for comparison
    relays: bool = True
    # of a broadcast group, until all members are in it
    form_s: float = 2.0
    # what a member of it, or the trainer, makes sums of, beside the transfer
    prove_bytes_per_s: float = 20e9
    # bytes of the difference between two versions, of those of a version; 1 = there is none
    delta_ratio: float = 1.0
    # the trainer's, from the end of a step until its version can be had
    publish_s: float = 0.0
    # and what it copies to the host and hashes of it; 0 = nothing
    publish_bytes_per_s: float = 0.0
    # what a node on the trainer's machine proves of the trainer's file, which it need not pull
    file_bytes_per_s: float = 9e9
    # an engine stands still so long for weights that are on its machine
    load_s: float = 1.0
    # and at this rate; 0 = no longer than that
    load_bytes_per_s: float = 0.0
    # of an engine on a node that comes
    start_s: float = 0.0
    # until the coordinator misses a node that dies
    lost_after_s: float = 0.5
    # measured, in the place of load_s: of the node that is first, of the second ...
    ready_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        times = (self.load_s, self.start_s, self.lost_after_s, self.publish_s, self.form_s)
        if not all(value >= 0 for value in (self.num_bytes, *times)):
            raise SimError(f"transfer: {self}: sizes and times must not be negative")
        lines = (self.receiver_bytes_per_s, self.sender_bytes_per_s)
        if not all(rate > 0 for rate in (*lines, self.prove_bytes_per_s, self.file_bytes_per_s)):
            raise SimError(f"transfer: {self}: rates must be positive")
        for key in ("relay_bytes_per_s", "publish_bytes_per_s", "load_bytes_per_s"):
            if not getattr(self, key) >= 0:
                raise SimError(f"transfer.{key} = {getattr(self, key)}: is negative")
        if not 0 < self.delta_ratio <= 1:
            raise SimError(f"transfer.delta_ratio = {self.delta_ratio}: above 0, at most 1")

    @property
    def publishing_s(self) -> float:
        return self.publish_s + _seconds(self.num_bytes, self.publish_bytes_per_s)

    @property
    def loading_s(self) -> float:
        return self.load_s + _seconds(self.num_bytes, self.load_bytes_per_s)

    @property
    def delta_bytes(self) -> float:
        """0 = there are no differences."""
        return self.delta_ratio * self.num_bytes if self.delta_ratio < 1 else 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per hour; 0 = not counted."""

    node: float = 0.0
    trainer: float = 0.0
    spot: float = 0.0

    def __post_init__(self) -> None:
        if not min(self.node, self.trainer, self.spot) >= 0:
            raise SimError(f"prices: {self}: must not be negative")

    def of(self, kind: str) -> float:
        return {"trainer": self.trainer, "spot": self.spot}.get(kind, self.node)


def _seconds(num_bytes: float, rate: float) -> float:
    return num_bytes / rate if rate else 0.0
