"""Episodes whose plain calls draw the same numbers in a replay."""

import random
import sys
from collections.abc import Callable
from typing import Any

from lightrl.environments.worker.base import Episode, Message


class Randomness:
    """The numbers that an episode draws from the modules `random` and `numpy.random`. Episodes of a
    process share these modules, so each restores its own state.

    Example: with self.randomness: self.environment.step(text)
    """

    def __init__(self, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate()
        self._numpy = getattr(sys.modules.get("numpy"), "random", None)
        if self._numpy is not None:
            self._numpy_state = self._numpy.RandomState(seed % (1 << 32)).get_state()

    def __enter__(self) -> None:
        mine, self._state = self._state, random.getstate()
        random.setstate(mine)
        if self._numpy is not None:
            mine, self._numpy_state = self._numpy_state, self._numpy.get_state()
            self._numpy.set_state(mine)

    def __exit__(self, *_: object) -> None:
        self.__enter__()  # swaps again


class Seeded:
    """An episode that is made when it begins, so that its constructor draws from the seed, too.
    Asynchronous calls share the generators of the process; `load` restores none."""

    def __init__(self, make: Callable[[], Episode]) -> None:
        self._make = make
        self._episode: Any = None
        self._randomness = Randomness(0)

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self._randomness = Randomness(seed)
        with self._randomness:
            self._episode = self._make()
            return self._episode.reset(row, seed)

    def step(self, message: Message) -> Any:
        with self._randomness:
            return self._episode.step(message)

    def load(self, state: bytes) -> Any:
        with self._randomness:
            self._episode = self._make()
            return self._episode.load(state)

    def close(self) -> Any:
        return None if self._episode is None else self._episode.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)  # save, if it has it
