"""What an environment node calls: environments, in worker processes or behind an endpoint.

Owns what they return and raise; `pool.py` and `programs.py` implement `Environments`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightrl.errors import LightRLError
from lightrl.messages.responses import FinishReason


class EnvironmentUnusable(LightRLError):
    """The source, a tool or the interpreter cannot be used, or workers cannot be kept alive."""


class EnvironmentRaised(LightRLError):
    """User code raised, or returned what is no observation; one line."""


class StepTimedOut(LightRLError):
    """A call took longer than `environment.timeout_s`; its episode is lost."""


class WorkerLost(LightRLError):
    """The worker of an episode died. `in_call`: during a call of the episode, the likely cause."""

    def __init__(self, text: str, in_call: bool = False, is_suspect: bool = False) -> None:
        super().__init__(text)
        self.in_call, self.is_suspect = in_call, is_suspect


@dataclass(frozen=True, slots=True)
class Returned:
    """What `reset` or `step` returned: worker/base.py has the meaning of the first fields."""

    messages: list[dict[str, Any]]
    reward: float | None = None
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_tool_calls: int = 0
    has_end: bool = True  # the environment gives a reward when a limit ends the episode
    state: bytes = b""  # what `save` returned, if environment.resume is "snapshot"
    seconds: float = 0.0  # of the call
    digest: str = ""  # of messages, reward and done
    # of an agent that asked with tokens: all of its prompt
    token_ids: Sequence[int] | None = None
    # of the turn that follows, as an agent asked for; 0 = as many as the limits allow
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The tokens of a turn, for an agent that asks for them."""

    # all tokens before it
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    # one for each of `token_ids`; empty if they are not known
    logprobs: Sequence[float]
    finish_reason: FinishReason
    # policy version that sampled the last one
    version: int


class Environments(Protocol):
    """Plays episodes, each of which has any unique name. `await start()`, calls at any time,
    `await stop()` in any case. The calls of an episode must not overlap."""

    # of the run; those of an episode come with `reset`
    tools: list[dict[str, Any]]
    # all that happens is a call of these tools
    is_stateless: bool

    @property
    def has_user_turns(self) -> bool:
        """A chat template must be able to append them; agents may need tool results alone."""
        ...

    async def start(self) -> None:
        """Raises EnvironmentUnusable, one line."""
        ...

    async def stop(self) -> None: ...

    async def reset(
        self, episode: str, row: dict[str, Any], seed: int, expected: str = ""
    ) -> Returned:
        """Begin. `expected`: the digest that a replay has to give. Raises EnvironmentRaised,
        StepTimedOut, WorkerLost, EnvironmentUnusable."""
        ...

    async def load(self, episode: str, row: dict[str, Any], state: bytes) -> None:
        """Begin an episode from what `save` returned. Raises as `reset`."""
        ...

    async def step(
        self, episode: str, message: dict[str, Any], tokens: TurnTokens, expected: str = ""
    ) -> Returned:
        """Give a turn of the model, as a message and as tokens. Raises as `reset`;
        WorkerLost(in_call=False) if the episode was lost before."""
        ...

    async def end(
        self, episode: str, cut: dict[str, Any] | None, tokens: TurnTokens | None
    ) -> Returned:
        """A limit ended an episode: return the reward that the environment gives now, if it does.
        `cut`: the turn that was cut. Raises as `step`."""
        ...

    def answers(self, message: dict[str, Any]) -> bool:
        """Return whether tools of the run answer a message."""
        ...

    def close(self, episode: str, why: str = "") -> None:
        """Forget an episode, whatever it is doing. `why`: for its agent."""
        ...
