"""What the worker process sees of any environment: reset, step, close, and what they return.

Runs in the interpreter of `environment.command`, so everything in this folder must import nothing
but the standard library and this folder. Adapters turn the classes of other frameworks into
`Episode`.
"""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]  # of a chat: role, content, and what the role needs
ToolSchema: TypeAlias = dict[str, Any]  # as in OpenAI's API: {"type": "function", "function": {}}


class UserError(Exception):
    """What an author has to mend; the text is one line."""


@dataclass(slots=True)
class Observation:
    """What `reset` or `step` returned, in one form.

    Example: Observation([{"role": "user", "content": "higher"}], reward=0.0)
    """

    # new messages of the chat; those of `reset` are the whole chat so far
    messages: list[Message]
    # of the turn before; None = none was given
    reward: float | None = None
    done: bool = False
    # figures of the episode
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    # tools of this episode, beside those of the run; read after `reset`
    tools: list[ToolSchema] = field(default_factory=list[ToolSchema])
    num_tool_calls: int = 0


class Episode(Protocol):
    """One episode of an environment. These methods may be plain or asynchronous. An environment
    that can be saved also has `save() -> bytes`, plain, and `load(state: bytes) -> None`. One that
    gives its reward at the end also has `end(cut: Message | None) -> Observation`: a limit ended
    the episode, perhaps within the turn `cut`, which `step` does not get."""

    def reset(self, row: dict[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin. `row`: of the data; `seed`: the same for all responses to a row."""
        ...

    def step(self, message: Message) -> Observation | Awaitable[Observation]:
        """Take a turn of the model: {"role": "assistant", "content": text}, with "tool_calls" if
        there are any, each {"id", "type": "function", "function": {"name", "arguments": dict}}."""
        ...

    def close(self) -> Awaitable[None] | None: ...
