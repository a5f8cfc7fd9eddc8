"""Environments of gymnasium with discrete actions: "gym:FrozenLake-v1".

`environment.args` go to `gymnasium.make`, but for two: `actions` are names of the actions, in
order; `prompt` is what the first message begins with. With `render_mode = "ansi"` observations are
frames.
"""

import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from lightrl.environments.adapters.source import loading, text_of, user
from lightrl.environments.worker.base import Episode, Message, Observation, UserError

COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)


def load(name: str, args: dict[str, Any]) -> Callable[[], Episode]:
    reference, args = f"gym:{name}", {"prompt": f"This is {name}.", "actions": [], **args}
    prompt, words = args.pop("prompt"), [str(word).lower() for word in args.pop("actions")]

    with loading(reference, "gymnasium"):
        make = partial(importlib.import_module("gymnasium").make, name, **args)
        environment = make()
        space, seen = environment.action_space, environment.observation_space
        environment.close()
        if not hasattr(space, "start"):
            raise UserError(f"{reference}: its actions are {space}, and must be Discrete")
        if words and len(words) != space.n:
            raise UserError(f"{reference}: args.actions has {len(words)} words for {space}")
    # one that begins like another comes first
    pattern = "|".join(map(re.escape, sorted(words, reverse=True))) or r"-?\d+"
    counts = f"the last {'of these words' if words else 'integer'} in your message counts"
    words = words or [str(space.start + k) for k in range(space.n)]
    rule = f"Each turn, write one action of: {', '.join(words)}; {counts}."
    actions = {word: space.start + k for k, word in enumerate(words)}

    def read(text: str) -> Any:
        """Return the action, or None if there is no legal one."""
        found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text.lower())
        return actions.get(found[-1]) if found else None

    first = f"{prompt}\n{rule}\nObservations: {seen}."
    return lambda: _Episode(make(), read, first, rule)


class _Episode:
    def __init__(self, made: Any, read: Callable[[str], Any], first: str, rule: str) -> None:
        self.environment, self.read, self.first, self.rule = made, read, first, rule
        self.num_illegal = 0

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        observation, _ = self.environment.reset(seed=seed)
        return Observation([user(f"{self.first}\n\n{self._text(observation)}")])

    def step(self, message: Message) -> Observation:
        action = self.read(text_of(message))
        if action is None:
            self.num_illegal += 1
            told = [user(f"That is no legal action. {self.rule}")]
            return Observation(told, metrics={"illegal_actions": float(self.num_illegal)})
        observation, reward, *ends, _ = self.environment.step(action)  # terminated, truncated
        return Observation([user(self._text(observation))], float(reward), any(map(bool, ends)))

    def close(self) -> None:
        self.environment.close()

    def _text(self, observation: Any) -> str:
        if self.environment.render_mode == "ansi":
            # colours show where one is
            return COLOURED.sub(r"[\1]", self.environment.render()).strip("\n")
        return f"Observation: {_plain(observation)}"


def _plain(value: Any) -> Any:
    """Without NumPy's types, whose text is long."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value
