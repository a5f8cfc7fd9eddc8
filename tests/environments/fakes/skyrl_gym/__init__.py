"""What the adapter uses of SkyRL-Gym, with the same names."""

import random
import types


class BaseTextEnv:
    def __init__(self):
        self.turns, self.max_turns = 0, 1

    def init(self, prompt):
        return prompt, {}

    def close(self):
        pass


class Echo(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.word, self.turns = extras["reward_spec"]["ground_truth"], 0
        self.max_turns, self.bonus = extras["max_turns"], env_config.bonus

    def step(self, action):
        self.turns += 1
        done = self.turns == self.max_turns
        said = [] if done else [{"role": "user", "content": f"Again, {random.random()}."}]
        reward = (action == self.word) + self.bonus
        return {"observations": said, "reward": reward, "done": done, "metadata": {}}


def spec(name):
    if name != "echo":
        raise LookupError(f"No registered env with id: {name}")
    return types.SimpleNamespace(entry_point="skyrl_gym:Echo")
