"""A user's class with reset, step and close as an `Episode`, with tools beside it if there are any.

Owns what the methods of such a class take and return; see README.md. Standard library only.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

from lightrl.environments.worker.base import Episode, Message, Observation, UserError
from lightrl.environments.worker.frames import kind_of

_IS_MESSAGE = re.compile(r"\b(dict|Dict|Mapping|Message)\b")
_FIELDS = ("observation", "messages", "reward", "done", "metrics", "tools")
_FORMS = "text, a list of messages or a dict"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load_class(target: Any, args: dict[str, Any], name: str) -> Callable[[], Episode]:
    """Return a factory of episodes. Raises UserError, one line, if the class cannot be used."""
    for method in ("reset", "step") if inspect.isclass(target) else ("__call__",):
        if not callable(getattr(target, method, None)):
            what = "the class has no method" if inspect.isclass(target) else "no class, has no"
            raise UserError(f"{name}: {what} {method!r}")
    try:
        inspect.signature(target).bind(**args)
    except TypeError as e:
        raise UserError(f"{name}: environment.args does not fit: {e}") from None
    except ValueError:  # a class in C
        pass
    return lambda: NativeEpisode(target(**args))


class NativeEpisode:
    """One object of the user's class. Has `save` and `load` only if the object has both."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._wants_message = wants_message(target.step)
        if hasattr(target, "save") and hasattr(target, "load"):
            self.save, self.load = target.save, target.load

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        return _observed(_call_reset(self._target.reset, row, seed), "reset")

    def step(self, message: Message) -> Any:
        given = message if self._wants_message else message.get("content") or ""
        return _observed(self._target.step(given), "step")

    def close(self) -> Any:
        return self._target.close() if hasattr(self._target, "close") else None


class WithTools:
    """An episode whose turns with tool calls the tools of the run answer, and its class the
    others."""

    def __init__(self, episode: Any, tools: Any) -> None:
        self._episode = episode
        self._tools = tools
        self.reset = episode.reset
        if hasattr(episode, "save") and hasattr(episode, "load"):
            self.save, self.load = episode.save, episode.load

    def step(self, message: Message) -> Any:
        return (self._tools if message.get("tool_calls") else self._episode).step(message)

    async def close(self) -> None:
        for each in (self._episode, self._tools):
            if inspect.isawaitable(closed := each.close()):
                await closed


def wants_message(step: Callable[..., Any]) -> bool:
    """Return whether `step` takes the assistant message, and not its text: its parameter is
    annotated as a dict, or called `message` and not annotated as text."""
    first = next(iter(inspect.signature(step).parameters.values()), None)
    if first is None:
        return False
    is_named = first.name == "message" and first.annotation not in (str, "str")
    return is_named or _IS_MESSAGE.search(str(first.annotation)) is not None


def to_observation(value: Any, call: str) -> Observation:
    """Return what `reset` or `step` of a user's class returned as an Observation: text, a list of
    messages or a dict; of `step` also (observation, reward, done). Raises UserError."""
    if isinstance(value, Observation):
        return value
    fields: dict[str, Any] = {"observation": value}
    if isinstance(value, dict) and "role" not in value:
        fields = value
        if unknown := [key for key in value if key not in _FIELDS]:
            raise UserError(f"{call} returned a dict with {unknown[0]!r}, not {', '.join(_FIELDS)}")
    elif isinstance(value, tuple):
        more = " or (observation, reward, done)" if call == "step" else ""
        if not more or len(value) != 3:
            raise UserError(f"{call} returned a tuple of {len(value)}, not {_FORMS}{more}")
        fields = dict(zip(_FIELDS[:1] + _FIELDS[2:4], value))  # noqa: B905
    messages = fields.get("messages", fields.get("observation"))
    done = fields.get("done", False)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, dict) and "role" in messages:
        messages = [messages]
    elif messages is None and call == "step" and done:
        messages = []
    elif not isinstance(messages, list):
        raise UserError(f"{call} returned {kind_of(messages)}, not {_FORMS}")
    metrics, tools = fields.get("metrics") or {}, fields.get("tools") or []
    return Observation(messages, fields.get("reward"), done, metrics, list(tools))


def _observed(value: Any, call: str) -> Any:
    """Return an Observation, or an awaitable of one if `value` is awaitable."""

    async def later() -> Observation:
        return to_observation(await value, call)

    return later() if inspect.isawaitable(value) else to_observation(value, call)


def _call_reset(reset: Callable[..., Any], row: dict[str, Any], seed: int) -> Any:
    """Call `reset` with what it has parameters for: row and seed, by these names or in this
    order."""
    found = inspect.signature(reset).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found):
        return reset(row, seed)
    values = {"row": row, "seed": seed}
    names = [p.name for p in found if p.kind in _POSITIONAL]
    given = [values.get(n, v) for n, v in zip(names, values.values())]  # noqa: B905
    keywords = [p.name for p in found if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return reset(*given, **{n: values[n] for n in keywords if n in values})
