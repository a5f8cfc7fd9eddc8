"""Classes of SkyRL-Gym (BaseTextEnv): "skyrl:FILE.py:CLASS", "skyrl:package.module:CLASS", or the
name of one that skyrl_gym registers: "skyrl:gsm8k".

`environment.args` are the class's `env_config`; the row is its `extras`, with `max_turns` of the
args. `postprocessed_action` is ignored: sampled tokens stay as they are.
"""

import importlib
import random
from collections.abc import Callable
from typing import Any

from lightrl.environments.adapters.source import loading, prompt_of, seed_random, text_of
from lightrl.environments.worker.base import Episode, Message, Observation, UserError
from lightrl.environments.worker.load import import_object


def load(name: str, args: dict[str, Any]) -> Callable[[], Episode]:
    reference = f"skyrl:{name}"
    with loading(reference, "skyrl-gym"):
        if ":" not in name:
            name = importlib.import_module("skyrl_gym").spec(name).entry_point
        made = import_object(name)
        if missing := [method for method in ("init", "step", "close") if not hasattr(made, method)]:
            raise UserError(f"{reference}: is no BaseTextEnv: it has no {missing[0]}")
        config = importlib.import_module("omegaconf").OmegaConf.create(args)
    limits = {k: v for k, v in args.items() if k == "max_turns"}
    return lambda: _Episode(lambda row: made(env_config=config, extras={**limits, **row}))


class _Episode:
    def __init__(self, make: Callable[[dict[str, Any]], Any]) -> None:
        self.make = make
        self.environment: Any = None

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.seeds = random.Random(seed)
        seed_random(self.seeds)
        self.environment = self.make(row)
        prompt, _ = self.environment.init(prompt_of(row))
        return Observation(list(prompt))

    def step(self, message: Message) -> Observation:
        seed_random(self.seeds)
        output = self.environment.step(text_of(message))
        return Observation(output["observations"], float(output["reward"]), bool(output["done"]))

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()
