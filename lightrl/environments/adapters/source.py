"""What adapters share: errors of one line, messages, random numbers.

Runs in the interpreter of `environment.command`, so standard library only: see worker/base.py.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightrl.environments.worker.base import Message, UserError

MAX_LINE = 300  # characters of an error


@contextmanager
def loading(reference: str, package: str = "") -> Iterator[None]:
    """Turn what is raised within into UserError, one line. `package`: what pip installs."""
    try:
        yield
    except UserError:
        raise
    except ModuleNotFoundError as e:
        hint = f": {sys.executable} -m pip install '{package}'" if package else ""
        raise UserError(f"{reference}: no module {e.name!r} in {sys.executable}{hint}") from e
    except (Exception, SystemExit) as e:  # user code may raise anything
        lines = [line.strip() for line in str(e).splitlines() if line.strip(" *")]
        raise UserError(f"{reference}: {type(e).__name__}: {''.join(lines[:1])[:MAX_LINE]}") from e


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def text_of(message: Message) -> str:
    return message.get("content") or ""


def prompt_of(row: Mapping[str, Any]) -> list[Message]:
    """The messages of the column `prompt` or `question`; [] if there is none."""
    prompt = row.get("prompt", row.get("question"))
    return [user(prompt)] if isinstance(prompt, str) else [{**message} for message in prompt or ()]


def index_of(row: Mapping[str, Any], seed: int) -> int:
    """Which task of a data set the row means: its `index`, else any."""
    index = row.get("index")
    return index if isinstance(index, int) else seed


class Randomness:
    """The numbers that an episode draws from the modules `random` and `numpy.random`. Episodes of a
    process share these modules, so each restores its own state: a replay draws the same numbers.

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
