"""A user's class with reset, step and close as an `Episode`, and what is put around any episode.

Owns what the methods of such a class take and return; see README.md.
"""

import copy
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

from lightrl.environments.worker.base import Episode, Message, Observation, UserError
from lightrl.environments.worker.frames import kind_of

_FIELDS = ("observation", "messages", "reward", "done", "metrics", "tools")
_FORMS = "text, a list of messages or a dict"


def load_class(target: Any, args: dict[str, Any], name: str) -> Callable[[], Episode]:
    """Return a factory of episodes. Raises UserError, one line, if the class cannot be used."""
    for method in ("reset", "step"):
        if not callable(getattr(target, method, None)):
            raise UserError(f"{name}: the class has no method {method!r}")
    try:
        inspect.signature(target).bind(**args)
    except TypeError as e:
        raise UserError(f"{name}: environment.args does not fit: {e}") from None
    except ValueError:  # a class in C
        pass
    return lambda: NativeEpisode(target(**copy.deepcopy(args)))


class NativeEpisode:
    """One object of the user's class. Has `save` and `load` only if the object has both."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._wants_message = wants_message(target.step)
        if hasattr(target, "save") and hasattr(target, "load"):
            self.save, self.load = target.save, target.load
        if callable(getattr(target, "get_reward", None)):
            self.end = lambda cut: rewarded(target.get_reward())

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        return _observed(_call_reset(self._target.reset, row, seed), "reset")

    def step(self, message: Message) -> Any:
        given = message if self._wants_message else message.get("content") or ""
        return _observed(self._target.step(given), "step")

    def close(self) -> Any:
        return self._target.close() if hasattr(self._target, "close") else None


class Seeded:
    """An episode whose plain calls draw the same numbers from the modules `random` and
    `numpy.random` when it is replayed. Made at its beginning: its constructor may draw, too."""

    def __init__(self, make: Callable[[], Episode]) -> None:
        self._make = make
        self._episode: Any = None
        self._seed = 0
        self._num_calls = 0

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self._seed = seed
        return self._begun().reset(row, seed)

    @property
    def save(self) -> Callable[[], bytes]:
        save = self._episode.save  # AttributeError: it has none
        return lambda: b"%d %d " % (self._seed, self._num_calls) + save()

    def load(self, state: bytes) -> Any:
        seed, num_calls, state = state.split(b" ", 2)
        self._seed, self._num_calls = int(seed), int(num_calls) - 1
        return self._begun().load(state)

    def step(self, message: Message) -> Any:
        self._draw_anew()
        return self._episode.step(message)

    @property
    def end(self) -> Callable[[Message | None], Any]:
        return self._episode.end  # AttributeError: it has none

    def close(self) -> Any:
        return None if self._episode is None else self._episode.close()

    def _begun(self) -> Any:
        self._draw_anew()
        self._episode = self._make()
        return self._episode

    def _draw_anew(self) -> None:
        """All episodes of the process share these generators, so each call seeds them."""
        self._num_calls += 1
        random.seed(f"{self._seed} {self._num_calls}")
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.getrandbits(32))


class WithTools:
    """An episode with the tools of the run beside it: they answer a turn that calls one of them. A
    replay skips such turns: their results are recorded."""

    def __init__(self, episode: Any, tools: Any) -> None:
        """`tools`: a ToolEpisode."""
        self._episode = episode
        self._tools = tools

    def step(self, message: Message) -> Any:
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        is_ours = any(name in self._tools.tools.sources for name in names)
        return (self._tools if is_ours else self._episode).step(message)

    async def close(self) -> None:
        for each in (self._episode, self._tools):
            if inspect.isawaitable(closed := each.close()):
                await closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)  # reset, end, save and load


def wants_message(step: Callable[..., Any]) -> bool:
    """Return whether `step` takes the assistant message, and not its text: its parameter is
    annotated as a dict, or called `message` and not annotated as text."""
    first = next(iter(inspect.signature(step).parameters.values()))
    is_named = first.name == "message" and first.annotation not in (str, "str")
    return is_named or "dict" in str(first.annotation).lower()


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
        fields = dict(zip(("observation", "reward", "done"), value, strict=True))
    messages, done = fields.get("messages", fields.get("observation")), fields.get("done", False)
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


async def rewarded(reward: Any) -> Observation:
    """Return the end of an episode; `reward` may be awaitable."""
    return Observation([], await reward if inspect.isawaitable(reward) else reward, done=True)


def _call_reset(reset: Callable[..., Any], row: dict[str, Any], seed: int) -> Any:
    """Call `reset` with what it has parameters for: row and seed, by these names or in this
    order."""
    found = inspect.signature(reset).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in found):
        return reset(row, seed)
    values = {"row": row, "seed": seed}
    keywords = {p.name for p in found if p.kind is p.KEYWORD_ONLY}
    positional = [p.name for p in found if p.kind is not p.VAR_KEYWORD and p.name not in keywords]
    given = [values.get(n, v) for n, v in zip(positional, values.values())]  # noqa: B905
    return reset(*given, **{n: v for n, v in values.items() if n in keywords})
