"""Tasks of reasoning-gym: "reasoning_gym:countdown".

`environment.args`: `attempts`, answers that an episode may give (1); `prompt`, how to answer; the
others go to `reasoning_gym.create_dataset`. The row's `index` chooses the task, else the seed does.
"""

import importlib
from collections.abc import Callable
from typing import Any

from lightrl.environments.adapters.source import index_of, loading, text_of, user
from lightrl.environments.worker.base import Episode, Message, Observation, UserError

SEED = 42  # of the data set; without one each worker process would have its own
SIZE = 10_000  # of the data set; few tasks are made before they are asked for
UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError)
HOW = "Write your final answer, and nothing else, between <answer> and </answer>."


def load(name: str, args: dict[str, Any]) -> Callable[[], Episode]:
    reference = f"reasoning_gym:{name}"
    args = {"seed": SEED, "size": SIZE, "attempts": 1, "prompt": HOW, **args}
    attempts, how = args.pop("attempts"), args.pop("prompt")
    if attempts < 1:
        raise UserError(f"{reference}: args.attempts is {attempts!r}, and must be at least 1")
    with loading(reference, "reasoning-gym"):
        tasks = importlib.import_module("reasoning_gym").create_dataset(name, **args)
        extract = importlib.import_module("reasoning_gym.utils").extract_answer
    return lambda: _Episode(tasks, extract, attempts, how)


class _Episode:
    def __init__(self, tasks: Any, extract: Callable[[str], Any], attempts: int, how: str) -> None:
        self.tasks, self.extract, self.how = tasks, extract, how
        self.attempts = self.left = attempts

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.task = self.tasks[index_of(row, seed) % len(self.tasks)]
        return Observation([user(f"{self.task['question']}\n\n{self.how}")])

    def step(self, message: Message) -> Observation:
        """The reward is that of the last attempt; a task is solved by a score of 1."""
        try:
            score = float(self.tasks.score_answer(self.extract(text_of(message)), self.task))
        except UNREADABLE:  # a task that expects a number was given a word
            score = 0.0
        self.left -= 1
        if score >= 1 or not self.left:
            return Observation([], score, True, {"attempts": float(self.attempts - self.left)})
        told = f"That is not right (score {score:g}). Attempts left: {self.left}."
        return Observation([user(f"{told} {self.how}")])

    def close(self) -> None:
        pass
