"""Messages about responses: orders to rollout nodes, and tokens from them.

Under the rules of message.py.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from lightrl.messages.fields import (
    MAX_STOPS,
    RESPONSES,
    Attempt,
    Int32,
    Int64,
    Name,
    Tokens,
    Version,
    Word,
)

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 = greedy; top_k 0 = off. Example: Sampling(1.0)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOPS)] = ()


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One response to generate or to resume.

    `seed` and the absolute position (index into prompt + response) determine the noise of every
    sampled token. `prefix` holds tokens sampled earlier, by this or another node, and the
    observations of an episode, whose prompt is empty. Example:
    ResponseRequest("p7@0#3", 1, seed=9, prompt=<2 tokens>, prefix=<0 tokens>, max_new_tokens=5)
    """

    response: Name
    attempt: Int32
    # 0 <= seed < 2**63
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    # int32
    prompt: Tokens
    # int32, tokens of the response already held; prompt or prefix may be empty, not both
    prefix: Tokens
    # counted after the prefix
    max_new_tokens: Int64
    # tokens of `prefix` before the turn that is sampled: no stop string begins in them
    turn_start: Int32 = 0


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """Earlier responses to a prompt, oldest first: the source of drafts for new ones.

    Example: PromptHistory("p7@1", responses=(<12 int32>, <9 int32>), rewards=(1.0, None))
    """

    # of the responses that it helps
    group: Name
    # int32
    responses: Annotated[tuple[Tokens, ...], RESPONSES]
    # one for each; None = no score
    rewards: Annotated[tuple[float | None, ...], RESPONSES]


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate these responses with this version of the policy.

    `histories` are of the groups of the requests; a node gets each with the first request of its
    group.
    Example: Generate(policy_version=4, sampling=Sampling(1.0), requests=(ResponseRequest(...),))
    """

    policy_version: Version
    sampling: Sampling
    requests: Annotated[tuple[ResponseRequest, ...], RESPONSES]
    histories: Annotated[tuple[PromptHistory, ...], RESPONSES] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop generating these attempts; tokens already sent are kept. Example: Abort((("p7@0#3",
    1),))."""

    attempts: Annotated[tuple[Attempt, ...], RESPONSES]


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """New tokens of one response. `offset` counts tokens of the response, prefix included.

    Example: ResponseTokens("p7@0#3", 1, offset=16, token_ids=<16 int32>, logprobs=<16 float32>)
    """

    response: Name
    attempt: Int32
    offset: Int32
    # int32
    token_ids: Tokens
    # float32, of the whole softmax at the temperature, whatever top_k and top_p leave out
    logprobs: Tokens
    finish_reason: FinishReason | None = None
    # with the last tokens: those of prompt and prefix whose KV was cached; None = not known
    num_cached: Int32 | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """All new tokens of one node, of one policy version whose digest that node has confirmed.

    Example: TokenChunk(4, "9f3a...", (ResponseTokens(...), ResponseTokens(...)))
    """

    policy_version: Version
    digest: Word
    responses: Annotated[tuple[ResponseTokens, ...], RESPONSES]
