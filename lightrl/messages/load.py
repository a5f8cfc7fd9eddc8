"""The load of a rollout node's engine: how much runs there, and how full its cache is.

Under the rules of message.py.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from lightrl.messages.fields import Count, EngineSeconds, Int64


@dataclass(frozen=True, slots=True)
class Drafting:
    """Counts of speculative decoding since the engine started.

    Example: Drafting(90, 80, 12, 92, 0.001, 0.2)
    """

    # tokens
    drafted: Count = 0
    # of them
    accepted: Count = 0
    # response-steps, with a draft or without
    forwards: Count = 0
    # tokens that came of them
    emitted: Count = 0
    # spent on drafting alone
    draft_s: EngineSeconds = 0.0
    # of all steps
    engine_s: EngineSeconds = 0.0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that an engine measured when it started: of a decode step, for each response in it,
    for each token of their context, and of a token that is only computed.

    Example: StepCosts(0.0095, 9e-5, 1.7e-8, 1.2e-5)
    """

    base_s: EngineSeconds
    response_s: EngineSeconds
    token_s: EngineSeconds = 0.0
    prefill_s: EngineSeconds = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """The current load of a rollout node's engine. Example: Load(running=12, waiting=0,
    kv_usage=0.3)."""

    running: Int64 = 0
    waiting: Int64 = 0
    # share of the KV cache in use, 0..1
    kv_usage: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    # KV preemptions since the engine started
    num_preemptions: Int64 = 0
    # None: this engine does not speculate
    drafting: Drafting | None = None
    # that its KV cache holds; 0 = as many as its slots need, or not known
    kv_tokens: Count = 0
    # of engines of which several sizes take turns
    costs: StepCosts | None = None
