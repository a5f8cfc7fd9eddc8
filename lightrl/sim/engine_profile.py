"""How fast a rollout engine is, and how much fits into it: a forward pass as a formula.

Owns the price of a step, of context, of prefill and of drafts. What an engine does with its time is
in engine.py.
"""

import math
from dataclasses import dataclass, replace

from lightrl.core.curve import Curve
from lightrl.errors import SimError
from lightrl.messages.load import StepCosts

LEAST_S = 1e-6  # no step takes no time


@dataclass(frozen=True, slots=True)
class SimSpeculation:
    """Drafts from earlier epochs; `acceptance` is the chance that a drafted token is the sampled
    one."""

    acceptance: float = 0.75
    # in the first epoch, when only siblings can be drafted from
    first_acceptance: float = 0.35
    max_window: int = 16
    # of a drafted token in a forward pass, against a decoded one
    verify_cost: float = 0.35

    def __post_init__(self) -> None:
        shares = (self.acceptance, self.first_acceptance)
        if not (all(0 <= a < 1 for a in shares) and self.max_window >= 1 and self.verify_cost >= 0):
            raise SimError(f"speculation: {self}: acceptance is in [0, 1), the window at least 1")

    def tokens_per_forward(self, window: int) -> float:
        """1 + a + a^2 + ... + a^w (Leviathan et al., arXiv 2211.17192, equation 1)."""
        return (1 - self.acceptance ** (window + 1)) / (1 - self.acceptance)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Speed and memory of one engine. Times in seconds, sizes in tokens."""

    # one response, no context
    step_s: float = 0.0095
    # responses at which a step takes twice as long
    half_batch: float = 107.0
    # more for each token of context
    context_s: float = 1.7e-8
    # for each token
    prefill_s: float = 1.2e-5
    # capacity; 0 = unlimited
    kv_tokens: int = 0
    speculation: SimSpeculation | None = None
    # until the first step of an engine that had nothing to do
    start_s: float = 0.0
    # measured seconds against the batch, for one token of each response, drafts and contexts as
    # they were; takes the place of the first three
    curve: Curve | None = None

    def __post_init__(self) -> None:
        times = (self.step_s, self.half_batch, self.context_s, self.prefill_s, self.start_s)
        good = (
            all(math.isfinite(t) and t >= 0 for t in times)
            and self.step_s > 0
            and self.half_batch > 0
        )
        if not good or self.kv_tokens < 0:
            raise SimError(f"engine: {self}: times and sizes must be positive")

    def forward(self, batch: int) -> tuple[float, float]:
        """(seconds without context, tokens) of one forward pass with the window that pays most."""
        if self.curve is not None:
            return max(LEAST_S, self.curve.at(batch)), 1.0
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
        """The least that one token costs a node with up to `batch` responses, context left out."""
        return min(
            seconds / tokens / b
            for b in range(1, batch + 1)
            for seconds, tokens in [self.forward(b)]
        )

    def alone_s(self, prompt_tokens: int, num_tokens: int) -> float:
        """A response that has a node for itself."""
        seconds, tokens = self.forward(1)
        context = num_tokens * prompt_tokens + num_tokens * (num_tokens - 1) / 2
        return (num_tokens * seconds + self.context_s * context) / tokens

    def costs(self) -> StepCosts:
        """As an engine would measure it."""
        response_s = self.step_s / self.half_batch
        return StepCosts(self.step_s, response_s, self.context_s, self.prefill_s)

    def slower(self, factor: float) -> "EngineProfile":
        """The same engine on a machine that takes `factor` times as long."""
        return replace(
            self,
            step_s=self.step_s * factor,
            context_s=self.context_s * factor,
            prefill_s=self.prefill_s * factor,
            start_s=self.start_s * factor,
            curve=self.curve and self.curve.scaled(factor),
        )
