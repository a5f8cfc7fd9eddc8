"""The hardware of a simulated run, as formulas: what an engine step, training, a transfer of
weights and an hour of a device cost.

The bounds of the fields are checked where a workload file is read (`files.py`).
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    with_config,
)

from lightrl.messages.load import StepCosts

MIN_STEP_S = 1e-6
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one engine step at some sizes of batches, which rise: linear between them,
    constant below, and above with the mean slope, at least 0."""

    batches: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, batch: float) -> float:
        batches, seconds = self.batches, self.seconds
        k = bisect_right(batches, batch)
        if k == 0 or len(batches) == 1:
            return seconds[0]
        low, high = (0, -1) if k == len(batches) else (k - 1, k)
        slope = (seconds[high] - seconds[low]) / (batches[high] - batches[low])
        return seconds[k - 1] + (slope if high > 0 else max(0.0, slope)) * (batch - batches[k - 1])

    def scaled(self, factor: float) -> "Curve":
        """Return the curve with all times multiplied by `factor`."""
        return Curve(self.batches, tuple(factor * s for s in self.seconds))


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SimSpeculation:
    """Speculative decoding with drafts from earlier epochs."""

    # probability that a drafted token is accepted if those before it were
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.75
    # in the first epoch, where only siblings can be drafted from
    first_acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.35
    max_window: PositiveInt = 16
    # cost of a drafted token in a forward pass, relative to a decoded one
    verify_cost: NonNegativeFloat = 0.35

    def tokens_per_forward(self, window: int) -> float:
        """Return 1 + a + a^2 + ... + a^w (Leviathan et al., arXiv 2211.17192, equation 1)."""
        return (1 - self.acceptance ** (window + 1)) / (1 - self.acceptance)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Speed and memory of one engine. Times in seconds, sizes in tokens."""

    # one step with one response and no context
    step_s: PositiveFloat = 0.0095
    # batch at which a step takes twice as long
    half_batch: PositiveFloat = 107.0
    # added for each token of context
    context_s: NonNegativeFloat = 1.7e-8
    # of each prefilled token
    prefill_s: NonNegativeFloat = 1.2e-5
    # capacity of the KV cache; 0 = unlimited
    kv_tokens: NonNegativeInt = 0
    speculation: SimSpeculation | None = None
    # before the first step of an engine that was idle
    start_s: NonNegativeFloat = 0.0
    # measured step seconds by batch, drafts and contexts included; replaces the first three fields
    curve: Curve | None = None

    def forward(self, batch: int) -> tuple[float, float]:
        """Return (seconds without context, tokens per response) of a forward pass with the best
        draft window."""
        if self.curve is not None:
            return max(MIN_STEP_S, self.curve.at(batch)), 1.0
        plain, spec = self.step_s * (1 + batch / self.half_batch), self.speculation
        if spec is None:
            return plain, 1.0
        best = (plain, 1.0)
        for window in range(1, spec.max_window + 1):
            seconds = self.step_s * (1 + batch * (1 + window * spec.verify_cost) / self.half_batch)
            tokens = spec.tokens_per_forward(window)
            if tokens / seconds > best[1] / best[0]:
                best = (seconds, tokens)
        return best

    def token_cost_s(self, batch: int) -> float:
        """Return the least node seconds of one token with at most `batch` responses, without
        context."""
        return min(
            seconds / tokens / b
            for b in range(1, batch + 1)
            for seconds, tokens in [self.forward(b)]
        )

    def alone_s(self, prompt_tokens: int, num_tokens: int) -> float:
        """Return the seconds of a response that runs alone on a node."""
        seconds, tokens = self.forward(1)
        context = num_tokens * prompt_tokens + num_tokens * (num_tokens - 1) / 2
        return (num_tokens * seconds + self.context_s * context) / tokens

    def costs(self) -> StepCosts:
        """Return what a real engine would measure."""
        response_s = self.step_s / self.half_batch
        return StepCosts(self.step_s, response_s, self.context_s, self.prefill_s)

    def slower(self, factor: float) -> "EngineProfile":
        """Return the same engine on a machine that takes `factor` times as long."""
        return replace(
            self,
            step_s=self.step_s * factor,
            context_s=self.context_s * factor,
            prefill_s=self.prefill_s * factor,
            start_s=self.start_s * factor,
            curve=self.curve and self.curve.scaled(factor),
        )


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SimTraining:
    """Seconds of the trainer. A response has a cost of its own where samples are padded, or
    launched one by one."""

    # of a token, prompts included
    token_s: NonNegativeFloat = 2e-5
    # of an optimizer step
    step_s: NonNegativeFloat = 2.0
    response_s: NonNegativeFloat = 0.0
    # of a rollout node that changes between sampling and training within a round
    switch_s: NonNegativeFloat = 0.0
    # of ranks that release shared devices: before each version, and when nodes join again
    park_s: NonNegativeFloat = 0.0
    # from the decision on a group until the trainer has received it
    shard_s: NonNegativeFloat = 0.0
    # groups wait for others until they have this many tokens: a micro-batch on each rank
    wait_tokens: NonNegativeInt = 0
    # colocated = on the GPUs of the rollout nodes, except spot nodes
    placement: Literal["dedicated", "colocated"] = "dedicated"

    def seconds(self, responses: int, tokens: int) -> float:
        """Return the work of `responses` that have `tokens` tokens together, prompts included."""
        return self.response_s * responses + self.token_s * tokens


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SimTransfer:
    """How a version of the weights reaches a node: pulled while the node still samples, then
    loaded; or broadcast in place. The core decides on sources and on broadcast groups.

    Measured: a group of two to five gloo members forms in 0.02 to 0.2 s on one machine of two
    cores; one core checksums 0.8 GB/s, or hashes 2.26 GB/s (a node uses four). Assumed, because it
    has not run on a machine with two GPUs: NCCL takes 2 s, and a GPU checksums 20 GB/s.
    """

    # of a version, in the dtype that engines serve
    num_bytes: NonNegativeFloat = 0.0
    # bandwidth of a rollout node, inbound
    receiver_bytes_per_s: PositiveFloat = 6.25e9
    # outbound; 0 = the same
    relay_bytes_per_s: NonNegativeFloat = 0.0
    # bandwidth of the trainer, outbound
    sender_bytes_per_s: PositiveFloat = 25e9
    # False: all nodes pull from the trainer alone, for comparison
    relays: bool = True
    # until all members of a broadcast group have joined
    form_s: NonNegativeFloat = 2.0
    # a member, or the trainer, checksums at this rate during the transfer
    prove_bytes_per_s: PositiveFloat = 20e9
    # size of a delta between two versions, as a share of a version; 1 = there are no deltas
    delta_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    # from the end of a step until the trainer has published the version
    publish_s: NonNegativeFloat = 0.0
    # and at this rate; 0 = no size-dependent part
    publish_bytes_per_s: NonNegativeFloat = 0.0
    # a node on the trainer's machine verifies the trainer's file at this rate and pulls nothing
    file_bytes_per_s: PositiveFloat = 9e9
    # an engine pauses to load a version that is on its machine
    load_s: NonNegativeFloat = 1.0
    # and at this rate; 0 = no size-dependent part
    load_bytes_per_s: NonNegativeFloat = 0.0
    # of an engine on a node that joins
    start_s: NonNegativeFloat = 0.0
    # until the coordinator detects a dead node
    lost_after_s: NonNegativeFloat = 0.5
    # measured, replaces load_s: of the first node to be ready, of the second ...
    ready_s: tuple[float, ...] = ()

    @property
    def publishing_s(self) -> float:
        return self.publish_s + _seconds(self.num_bytes, self.publish_bytes_per_s)

    @property
    def loading_s(self) -> float:
        return self.load_s + _seconds(self.num_bytes, self.load_bytes_per_s)

    @property
    def verify_file_s(self) -> float:
        return self.num_bytes / self.file_bytes_per_s

    @property
    def delta_bytes(self) -> float:
        """0 = there are no deltas."""
        return self.delta_ratio * self.num_bytes if self.delta_ratio < 1 else 0.0


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SimPrices:
    """Dollars per hour; 0 = not counted."""

    node: NonNegativeFloat = 0.0
    trainer: NonNegativeFloat = 0.0
    spot: NonNegativeFloat = 0.0

    def of(self, kind: str) -> float:
        return {"trainer": self.trainer, "spot": self.spot}.get(kind, self.node)


def _seconds(num_bytes: float, rate: float) -> float:
    return num_bytes / rate if rate else 0.0
