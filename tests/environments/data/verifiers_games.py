"""Environments in the classic API of verifiers: one with tools, one with turns of its own."""

import verifiers as vf


def rows(rows):
    try:
        from datasets import Dataset
    except ModuleNotFoundError:
        return rows  # with the fake
    return Dataset.from_list(rows)


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


def correct(completion, answer) -> float:
    return 1.0 if answer in completion[-1]["content"] else 0.0


def load_tools(num_tasks: int = 4) -> vf.Environment:
    tasks = [{"question": f"{k} * {k + 7}?", "answer": str(k * (k + 7))} for k in range(num_tasks)]
    rubric = vf.Rubric(funcs=[correct], weights=[1.0])
    return vf.ToolEnv(dataset=rows(tasks), tools=[multiply], rubric=rubric, max_turns=4)


class Doubling(vf.MultiTurnEnv):
    """The model must answer with twice the number."""

    async def setup_state(self, state):
        state["number"], state["hits"] = int(state["answer"]), 0

    async def env_response(self, messages, state, **kwargs):
        state["hits"] += messages[-1]["content"] == str(2 * state["number"])
        state["number"] += 1
        reply = [{"role": "user", "content": f"Double {state['number']}."}]
        if messages[-1]["content"] == "stop":
            state["final_env_response"] = reply = [{"role": "user", "content": "Bye."}]
        return reply

    @vf.stop
    async def was_rude(self, state):
        turns = state["trajectory"]
        return bool(turns) and "no" in turns[-1]["completion"][-1]["content"]


class Forgetting(Doubling):
    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


def share(state) -> float:
    return state["hits"] / 2


def broken(state) -> float:
    raise OSError("the judge does not answer")


def ranked(states) -> list[float]:
    return [0.0 for _ in states]


def doubling(kind, function):
    tasks = [{"question": f"Double {k}.", "answer": str(k)} for k in range(3, 9)]
    return kind(dataset=rows(tasks), rubric=vf.Rubric(funcs=[function]), max_turns=3)


def load_doubling():
    return doubling(Doubling, share)


def load_broken():
    return doubling(Doubling, broken)


def load_ranked():
    return doubling(Doubling, ranked)


def load_forgetting():
    return doubling(Forgetting, share)
