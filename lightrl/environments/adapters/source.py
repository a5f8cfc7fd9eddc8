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
    return row["index"] if isinstance(row.get("index"), int) else seed


def seed_random(seeds: random.Random) -> None:
    """Seed `random` and `numpy.random` with the next number of an episode's own `seeds`, before its
    code runs: episodes of a process share these modules, and a replay must draw the same."""
    number = seeds.getrandbits(32)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
