"""What the adapter uses of gymnasium, with the same names."""

import random


class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start

    def __repr__(self):
        return f"Discrete({self.n})"


class Box:
    def __repr__(self):
        return "Box()"


class Walk:
    """From 0 to 3; a slippery step goes nowhere."""

    observation_space = Discrete(4)

    def __init__(self, slips=0.5, render_mode=None, actions=None):
        self.slips, self.render_mode = slips, render_mode
        self.action_space = actions or Discrete(2, start=1)

    def reset(self, seed=None, options=None):
        self.place, self.rng = 0, random.Random(seed)
        return self.place, {}

    def step(self, action):
        assert action in (1, 2)
        if self.rng.random() >= self.slips:
            self.place = max(0, self.place + (1 if action == 2 else -1))
        return self.place, float(self.place == 3), self.place == 3, False, {}

    def render(self):
        return (
            "".join(f"\x1b[41m{k}\x1b[0m" if k == self.place else str(k) for k in range(4)) + "\n"
        )

    def close(self):
        pass


def make(name, **args):
    if name == "Pendulum-v1":
        return Walk(actions=Box())
    if name != "Walk-v0":
        raise LookupError(f"Environment `{name}` doesn't exist.\nDid you mean Walk-v0?")
    return Walk(**args)
