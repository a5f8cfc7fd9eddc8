"""Games of textarena for one player: "textarena:GuessTheNumber-v0".

`environment.args` go to `textarena.make`. The chat holds what was said before, so observations are
the game's new messages alone, and not the prompts that its wrappers make of all messages.
"""

import importlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from lightrl.environments.adapters.source import loading, seed_random, text_of, user
from lightrl.environments.worker.base import Episode, Message, Observation

PLAYER = 0


def load(name: str, args: dict[str, Any]) -> Callable[[], Episode]:
    with loading(f"textarena:{name}", "textarena"):
        make = partial(importlib.import_module("textarena").make, env_id=name, **args)
        _Episode(make()).reset({}, 0)  # it may be a game for more players
    return lambda: _Episode(make())


class _Episode:
    def __init__(self, game: Any) -> None:
        self.game = self.unwrapped = game  # wrappers of actions add missing brackets
        while hasattr(self.unwrapped, "env"):
            self.unwrapped = self.unwrapped.env

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.seeds = random.Random(seed)
        seed_random(self.seeds)
        self.game.reset(num_players=1, seed=seed)
        return Observation([user(self._text())])

    def step(self, message: Message) -> Observation:
        seed_random(self.seeds)
        done, _ = self.game.step(text_of(message))
        if not done:
            return Observation([user(self._text())])
        rewards, info = self.game.close()
        reason = (info or {}).get(PLAYER, {}).get("reason") or "The game is over."
        reward = (rewards or {}).get(PLAYER)
        return Observation([user(reason)], None if reward is None else float(reward), done=True)

    def close(self) -> None:
        pass

    def _text(self) -> str:
        _, messages = self.unwrapped.get_observation()
        # the kind is the last; some games misplace it when they repeat what the player did
        said = [m[1] for m in messages if "PLAYER_ACTION" not in f"{m[0]} {m[-1]}"]
        return "\n".join(said) or "Go on."
