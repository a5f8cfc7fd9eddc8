"""Environments of verifiers < 0.3 (MultiTurnEnv, ToolEnv): "verifiers:ENVIRONMENT", or
"verifiers:FILE.py:load_environment" for one that is not installed.

`environment.args` are keyword arguments of `load_environment`. A turn calls the methods that the
environment's `rollout` calls, in that order, without a client. A row without a prompt is one of the
environment's own data set, by `index`, else by the seed.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from lightrl.environments.adapters.source import index_of, loading, prompt_of
from lightrl.environments.worker.base import Episode, Message, Observation, ToolSchema, UserError
from lightrl.environments.worker.load import import_object

PACKAGE = "verifiers<0.3"


class RewardRaised(BaseException):
    """Passes the rubric, which takes an Exception of a function for a reward of 0."""


def load(name: str, args: dict[str, Any]) -> Callable[[], Episode]:
    reference = f"verifiers:{name}"
    with loading(reference, PACKAGE):
        verifiers = importlib.import_module("verifiers")
        installed = functools.partial(verifiers.load_environment, name)
        made = (import_object(name) if ":" in name else installed)(**args)
        if not isinstance(made, verifiers.MultiTurnEnv):
            raise UserError(f"{reference}: {type(made).__name__} is no MultiTurnEnv or ToolEnv")
        _prepare(reference, made.rubric)
        messages = importlib.import_module("verifiers.utils.message_utils")
    normalized = getattr(messages, "normalize_messages", list)  # in 0.1 messages are dicts
    no_client = type("NoClient", (getattr(verifiers, "Client", object),), {})  # it passes for one
    no_client.__abstractmethods__ = frozenset()
    return lambda: _Episode(made, object.__new__(no_client), normalized)


def _prepare(reference: str, rubric: Any) -> None:
    """Let functions with a weight raise RewardRaised. Raises UserError if one scores groups."""
    for each in getattr(rubric, "rubrics", ()):
        _prepare(reference, each)
    if groups := [function for function in rubric.funcs if rubric._is_group_func(function)]:
        raise UserError(f"{reference}: {groups[0].__name__} scores groups, and not one episode")
    pairs = zip(rubric.funcs, rubric.weights, strict=True)
    rubric.funcs[:] = [_raising(function) if weight else function for function, weight in pairs]


def _raising(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **named: Any) -> Any:
        try:
            answer = function(*args, **named)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as e:  # code of the user's
            raise RewardRaised(f"reward {function.__name__}: {type(e).__name__}: {e}") from e

    return call


class _Episode:
    def __init__(self, environment: Any, client: Any, normalized: Callable[[Any], Any]) -> None:
        self.environment, self.client, self.normalized = environment, client, normalized
        self.state: Any = None
        self.prompt: Any = None
        self.is_over = False

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        if prompt := prompt_of(row):
            row = {"example_id": index_of(row, 0), **row, "prompt": prompt}
        else:
            rows = self.environment.get_dataset()
            row = dict(rows[index_of(row, seed) % len(rows)])
        self.state = await self.environment.init_state(row, self.client, "", {})
        self.state = await self.environment.setup_state(self.state) or self.state
        if await self.environment.is_completed(self.state):
            return await self._end(self.state["prompt"])
        self.prompt = await self.environment.get_prompt_messages(self.state)
        tools = self.state.get("tool_defs") or self.state.get("oai_tools") or []
        return Observation(_plain(self.prompt), tools=[_schema(tool) for tool in tools])

    async def end(self, cut: Message | None) -> Observation:
        if cut is not None:
            await self._take(cut, is_truncated=True)
        return await self._end([])

    async def step(self, message: Message) -> Observation:
        calls = message.get("tool_calls") or []
        answer = await self._take(message)
        if await self.environment.is_completed(self.state):
            return await self._end([], len(calls))
        held = _plain([*self.prompt, *answer])
        self.prompt = await self.environment.get_prompt_messages(self.state)
        if (last := self.state.get("final_env_response")) is not None:
            await self.environment.is_completed(self.state)
            return await self._end(self.normalized(last), len(calls))
        messages = _plain(self.prompt)
        if messages[: len(held)] != held:
            raise ValueError("changes earlier messages; an episode can only append")
        return Observation(messages[len(held) :], num_tool_calls=len(calls))

    async def _take(self, message: Message, is_truncated: bool = False) -> Any:
        """Add a turn to the trajectory, and return it as the environment's messages."""
        calls = [_call(call, json.dumps) for call in message.get("tool_calls") or []]
        answer = {**message, "tool_calls": calls}
        answer = self.normalized([{k: v for k, v in answer.items() if v or k == "content"}])
        turn = dict.fromkeys(("response", "tokens", "reward", "advantage"))
        turn |= {"prompt": self.prompt, "completion": answer, "is_truncated": is_truncated}
        turn |= {"trajectory_id": self.state["trajectory_id"], "extras": {}}
        await self.environment.add_trajectory_step(self.state, turn)
        return answer

    async def close(self) -> None:
        if self.state is not None and not self.is_over:
            clean_up = getattr(self.environment, "_cleanup", None) or self.environment.cleanup
            await clean_up(self.state)

    async def _end(self, messages: Any, num_calls: int = 0) -> Observation:
        self.is_over = True
        await self.environment.render_completion(self.state)
        if not hasattr(self.environment, "_cleanup"):  # of 0.1, which `is_completed` calls
            await self.environment.cleanup(self.state)
        if self.state.get("error") is not None:
            raise self.state["error"]
        try:
            await self.environment.rubric.score_rollout(self.state)
        except RewardRaised as e:
            raise RuntimeError(str(e)) from e
        reward, metrics = float(self.state["reward"]), self.state["metrics"] or {}
        return Observation(_plain(messages), reward, True, metrics, num_tool_calls=num_calls)


def _fields(value: Any) -> dict[str, Any]:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else {**value}


def _schema(tool: Any) -> ToolSchema:
    tool = _fields(tool)
    return tool if "function" in tool else {"type": "function", "function": tool}


def _call(call: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A call in the form of OpenAI's API, its arguments converted."""
    function = call.get("function", call)
    function = {"name": function["name"], "arguments": convert(function["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def _plain(messages: Any) -> list[Message]:
    """Messages as dicts; contents are text, arguments are dicts."""
    plain = [_fields(message) for message in messages]
    for message in plain:
        if message["role"] == "text":  # what a string became
            message["role"] = "user"
        if isinstance(content := message.get("content"), list):
            message["content"] = "".join(part.get("text", "") for part in content)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_call(call, json.loads) for call in calls]
    return plain
