"""Classes for TRL's `environment_factory`: "trl:FILE.py:CLASS" or "trl:package.module:CLASS".

`environment.args` are keyword arguments of the class. Its public methods are the tools; a turn
without a call ends the episode, whose reward is `get_reward()`, or the attribute `reward`; without
either reward functions score it. TRL itself is not needed.
"""

import inspect
from collections.abc import Callable
from typing import Any

from lightrl.environments.adapters.source import loading, prompt_of, user
from lightrl.environments.worker.base import Episode, Message, Observation, ToolSchema, UserError
from lightrl.environments.worker.load import import_object
from lightrl.environments.worker.native import rewarded
from lightrl.environments.worker.schemas import describe


def load(name: str, args: dict[str, Any]) -> Callable[[], Episode]:
    reference = f"trl:{name}"
    with loading(reference):
        made = import_object(name)
        instance = made(**args)
        if not hasattr(instance, "reset"):
            raise UserError(f"{reference}: has no method reset")
        tools = _tools(instance).items()
        schemas = [describe(tool, key, f"{reference}.{key}")[0] for key, tool in tools]
    return lambda: _Episode(made(**args), schemas)


def _tools(instance: Any) -> dict[str, Callable[..., Any]]:
    """By name. Listed on the class, as TRL does: on an instance properties would be evaluated."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    others = ("reset", "get_reward")
    return {n: getattr(instance, n) for n in names if n not in others and not n.startswith("_")}


class _Episode:
    def __init__(self, environment: Any, schemas: list[ToolSchema]) -> None:
        self.environment, self.schemas = environment, schemas
        self.tools = _tools(environment)

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        messages = prompt_of(row) or [user("")]
        messages[-1]["content"] += self.environment.reset(**row) or ""  # as TRL does
        return Observation(messages, tools=self.schemas)

    def step(self, message: Message) -> Any:
        """Plain methods are called here, outside of the event loop; others are awaited later."""
        if calls := message.get("tool_calls"):
            return _answered(calls, [self._result(**call["function"]) for call in calls])
        return self.end(None)

    def end(self, cut: Message | None) -> Any:
        get_reward = getattr(self.environment, "get_reward", None)
        return rewarded(get_reward() if get_reward else getattr(self.environment, "reward", None))

    def close(self) -> None:
        pass

    def _result(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            if name not in self.tools:
                raise ValueError(f"Tool {name} not found.")
            return self.tools[name](**arguments)
        except Exception as e:  # code of the user's
            return {"error": str(e)}  # TRL's words


async def _answered(calls: list[dict[str, Any]], values: list[Any]) -> Observation:
    messages: list[Message] = []
    for call, value in zip(calls, values, strict=True):
        try:
            text = str(await value if inspect.isawaitable(value) else value)
        except Exception as e:  # code of the user's
            text = str({"error": str(e)})
        named = {"tool_call_id": call["id"], "name": call["function"]["name"]}
        messages.append({"role": "tool", **named, "content": text})
    return Observation(messages, num_tool_calls=len(calls))
