"""What an endpoint asks for and gets, in one form for all APIs, and the backend that answers.

`app.py` translates HTTP to these types; a backend is the environment node's (programs that are
trained) or that of `lightrl serve`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from lightrl.errors import LightRLError

# Of a chat, in the form of OpenAI's chat completions: role, content (text), tool_calls, ...
Message: TypeAlias = dict[str, Any]
# {"type": "function", "function": {"name", "description", "parameters"}}
Tool: TypeAlias = dict[str, Any]


class ApiError(LightRLError):
    """A request that gets an error object; the text is one line with the remedy."""

    def __init__(
        self, status: int, text: str, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for one turn: of a chat, or of the tokens so far.

    Example: Asked(messages=[{"role": "user", "content": "1+1?"}], max_tokens=64)
    """

    # None: `token_ids` is given
    messages: Sequence[Message] | None = None
    # prompt of the turn, all tokens so far
    token_ids: Sequence[int] | None = None
    tools: Sequence[Tool] = ()
    # sampled tokens of the turn, at most; None = as many as the backend allows
    max_tokens: int | None = None
    # the client marks the request as one that it has sent before
    is_retry: bool = False
    # as asked for; None or empty = not asked for. Used only where `SamplingLimits.is_free`
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A sampled turn. Example: Answered({"role": "assistant", "content": "2"}, [5], [7], [-0.1],
    "stop", 4)"""

    # role, content, and where there are some reasoning_content and tool_calls, whose arguments are
    # a dict
    message: Message
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    # natural, one for each of `token_ids`
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    # policy version that sampled the last token
    weight_version: int


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """What a program reports of its episode. Example: EpisodeReport(1.0, {"guesses": 3.0})"""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    # the session ends now; else with its program
    is_over: bool = False
    # why the episode gets no score
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Parameters of a request that are possible: the run's own, whatever a client asks for."""

    model: str
    # tokens of prompt and turn
    max_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    # any temperature, top_p, top_k and stop are possible
    is_free: bool = False


class Backend(Protocol):
    """Answers the requests of sessions, each named by its API key. Raises ApiError."""

    @property
    def limits(self) -> SamplingLimits: ...

    async def ask(self, key: str, asked: Asked) -> Answered:
        """Return the turn. The request stays open while no engine is there. Cancelled if the client
        disconnects."""
        ...

    async def episode(self, key: str) -> dict[str, Any]:
        """Return what a program needs of its episode: row, seed, max_length."""
        ...

    async def report(self, key: str, report: EpisodeReport) -> None: ...

    async def open(self, key: str) -> dict[str, Any]:
        """Open a session with the environment key; return api_key, row, seed, max_length."""
        ...

    def require(self, key: str) -> None:
        """Raise ApiError (401) unless the key is one of a session, or the environment key."""
        ...
