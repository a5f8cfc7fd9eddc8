"""What the adapter uses of textarena, with the same names."""

import enum
import random


class ObservationType(enum.Enum):
    PROMPT = 1
    PLAYER_ACTION = 2
    GAME_MESSAGE = 4


class Dice:
    """Guess the sum of the dice that have been thrown; each turn throws another one."""

    def reset(self, num_players, seed=None):
        assert num_players == 1, f"The number of players has to be 1, received {num_players}"
        random.seed(seed)
        self.total, self.rewards, self.info = random.randint(1, 6), None, {0: {}}
        self.new = [(-1, "Guess the [sum].", ObservationType.PROMPT)]

    def step(self, action):
        self.new.append((0, action, ObservationType.PLAYER_ACTION))
        if action == f"[{self.total}]":
            self.rewards, self.info = {0: 1}, {0: {"reason": "Right."}}
            return True, {}
        self.total += random.randint(1, 6)
        self.new.append((-1, f"Wrong; now {self.total}.", ObservationType.GAME_MESSAGE))
        return False, {}

    def get_observation(self):
        new, self.new = self.new, []
        return 0, new

    def close(self):
        return self.rewards, self.info


class Chess(Dice):
    def reset(self, num_players, seed=None):
        assert num_players == 2, f"The number of players has to be 2, received {num_players}"


class Brackets:
    """A wrapper of actions, whose observations repeat all that was said."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def step(self, action):
        return self.env.step(action if "[" in action else f"[{action}]")

    def get_observation(self):
        raise AssertionError("the chat has the history")


def make(env_id, **args):
    return Brackets({"Dice-v0": Dice, "Chess-v0": Chess}[env_id](**args))
