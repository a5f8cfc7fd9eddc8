"""What the adapter uses of verifiers 0.2, with the same names; messages are dicts as in 0.1."""

import abc
import inspect
import json


class Client(abc.ABC):
    @abc.abstractmethod
    def setup_client(self): ...


class Rubric:
    def __init__(self, funcs=None, weights=None):
        self.funcs = funcs or []
        self.weights = weights or [1.0] * len(self.funcs)

    def _is_group_func(self, function):
        return "states" in inspect.signature(function).parameters

    async def score_rollout(self, state):
        state["reward"], state["metrics"] = 0.0, {}
        for function, weight in zip(self.funcs, self.weights, strict=True):
            wanted = inspect.signature(function).parameters
            named = {k: v for k, v in state.items() if k in wanted} | {"state": state}
            try:
                value = function(**{k: v for k, v in named.items() if k in wanted})
                value = await value if inspect.isawaitable(value) else value
            except Exception:  # noqa: BLE001, as it does
                value = 0.0
            state["metrics"][function.__name__] = value
            state["reward"] += weight * value


def stop(function):
    function.stops = True
    return function


class Environment:
    def __init__(self, dataset=None, rubric=None, max_turns=10):
        self.dataset, self.rubric, self.max_turns = dataset, rubric or Rubric(), max_turns

    def get_dataset(self):
        return self.dataset

    async def init_state(self, row, client, model, sampling_args):
        assert isinstance(client, Client)
        row = (
            {"prompt": [{"role": "user", "content": row["question"]}], **row}
            if "question" in row
            else row
        )
        start = {"trajectory": [], "trajectory_id": "t", "error": None, "final_env_response": None}
        return {**row, **start, "tool_defs": getattr(self, "tool_defs", None)}

    async def setup_state(self, state):
        return None

    async def is_completed(self, state):
        methods = [getattr(self, name) for name in dir(type(self))]
        stops = [method for method in methods if getattr(method, "stops", False)]
        return any([await method(state) for method in stops])

    async def cleanup(self, state):
        state["is_cleaned"] = True


class MultiTurnEnv(Environment):
    @stop
    async def max_turns_reached(self, state):
        return len(state["trajectory"]) >= self.max_turns

    @stop
    async def has_final_env_response(self, state):
        return state["final_env_response"] is not None

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *await self.env_response(messages, state)]

    async def add_trajectory_step(self, state, step):
        state["trajectory"].append(step)

    async def render_completion(self, state):
        last = state["trajectory"][-1]
        said = [*last["prompt"], *last["completion"], *(state["final_env_response"] or [])]
        state["completion"] = said[len(state["prompt"]) :]


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools, **kwargs):
        super().__init__(**kwargs)
        self.tools = {tool.__name__: tool for tool in tools}
        parameters = {"type": "object", "properties": {}}
        named = {"description": "", "parameters": parameters}
        self.tool_defs = [{"name": name, **named} for name in self.tools]

    @stop
    async def no_tools_called(self, state):
        turns = state["trajectory"]
        return bool(turns) and not turns[-1]["completion"][-1].get("tool_calls")

    async def env_response(self, messages, state):
        results = []
        for call in messages[-1]["tool_calls"]:
            result = self.tools[call["function"]["name"]](
                **json.loads(call["function"]["arguments"])
            )
            results.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
        return results


class EnvGroup(Environment):
    pass


def load_environment(name, **args):
    if name != "group":
        raise ValueError(f"Could not import '{name}' environment.")
    return EnvGroup(**args)
