"""Messages about episodes between the coordinator and an environment node.

Under the rules of message.py. Tokens travel here as int32, and what an environment returned as
opaque JSON (`record`), which the coordinator stores and never reads.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from lightrl.messages.fields import (
    RESPONSES,
    Attempt,
    EngineSeconds,
    Int32,
    LongText,
    Metrics,
    Name,
    Reason,
    Tokens,
    Version,
    Word,
)
from lightrl.messages.responses import FinishReason

MAX_STATE_BYTES = 1 << 24  # of a saved environment

# How an episode ended. "done": the environment ended it; "turns", "context", "length", "timeout": a
# limit did; "failed" and "diverged" give no score.
EpisodeStop: TypeAlias = Literal[
    "done", "turns", "context", "length", "timeout", "failed", "diverged"
]
State: TypeAlias = Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """An observation, and the tokens that were sampled after it. Example: RecordedTurn(<9 int32>,
    "5f0c", <4 int32>, "stop")."""

    # int32, inserted
    observation: Tokens
    # of what the environment returned
    digest: Word
    # int32, sampled
    sampled: Tokens
    finish_reason: FinishReason
    # reward of the observation; None = none was given
    reward: float | None = None
    # of the environment after it, where `save` exists
    state: State = b""
    # float32, of `sampled`; for programs only
    logprobs: Tokens = b""
    # that sampled the last of them
    policy_version: Version = 0


@dataclass(frozen=True, slots=True)
class BeginEpisode:
    """Begin an episode, or begin it again elsewhere: after a loss, `turns` has all that is
    recorded, and the last one is to be stepped.

    Example: BeginEpisode("p7@0#3", 1, seed=9, max_tokens=512, row='{"n": 5}')
    """

    response: Name
    # how often it was begun, from 1; messages about an older one are ignored
    incarnation: Int32
    # of the environment: the same for all responses of a prompt, and in each epoch
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    # sampled tokens of all turns, at most
    max_tokens: Int32
    # of the data, as JSON; the core leaves it empty
    row: LongText = ""
    turns: Annotated[tuple[RecordedTurn, ...], RESPONSES] = ()
    # the last of `turns` may have been stepped before, by an environment that was lost
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class StepEpisode:
    """The tokens of a turn, for an episode that the node holds. Sent again after a reconnect.

    Example: StepEpisode("p7@0#3", 1, turn=0, token_ids=<4 int32>, finish_reason="stop")
    """

    response: Name
    incarnation: Int32
    # number of the observation that they follow, from 0
    turn: Int32
    # int32
    token_ids: Tokens
    finish_reason: FinishReason
    # float32; for programs only
    logprobs: Tokens = b""
    # that sampled the last token
    policy_version: Version = 0


@dataclass(frozen=True, slots=True)
class EndEpisode:
    """Forget these episodes, (response, incarnation): they are over or not wanted. Example:
    EndEpisode((("p7@0#3", 1),))."""

    episodes: Annotated[tuple[Attempt, ...], RESPONSES]


@dataclass(frozen=True, slots=True)
class Observed:
    """The observation of an environment: tokens to insert, after which a turn is sampled. The node
    sends it again after a reconnect, until the next StepEpisode or EndEpisode.

    Example: Observed("p7@0#3", 1, 0, offset=0, token_ids=<9 int32>, max_new_tokens=64,
    digest="5f0c", record="[...]")
    """

    response: Name
    incarnation: Int32
    # number of this observation, from 0: the first one is that of `reset`
    turn: Int32
    # tokens before it, inserted and sampled
    offset: Int32
    # int32: never empty
    token_ids: Tokens
    # of the turn that follows
    max_new_tokens: Int32
    digest: Word
    record: LongText
    # None = none was given
    reward: float | None = None
    # of the environment, where `save` exists
    state: State = b""
    # in the environment
    seconds: EngineSeconds = 0.0
    num_tool_calls: Int32 = 0


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An episode is over. The node sends it again after a reconnect, until EndEpisode.

    Example: EpisodeEnded("p7@0#3", 1, turn=2, stop="done", reward=1.0)
    """

    response: Name
    incarnation: Int32
    # observations with tokens so far
    turn: Int32
    stop: EpisodeStop
    # of the episode, by the environment; None = it gave none
    reward: float | None = None
    # reward of the last turn
    turn_reward: float | None = None
    # one line, of "failed" and "diverged"
    failure: Reason = ""
    # of the last turn and the observation that ended it, as JSON
    record: LongText = ""
    # of the environment
    metrics: Metrics = field(default_factory=dict[str, float])
    seconds: EngineSeconds = 0.0
    num_tool_calls: Int32 = 0
