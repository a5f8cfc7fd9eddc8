"""Check of every row of the data before a run needs it.

A small set is read before the run begins; a large one in a process of its own, while the run
begins, so that its first prompts do not wait for the last ones.
"""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.data.prompts import PromptSet
from lightrl.errors import DataError, LightRLError
from lightrl.log import environment
from lightrl.model_files import load_tokenizer
from lightrl.system.child import Child, ChildDied, Pipe, retry_on_resource_limit
from lightrl.wire import Codec

SMALL = 20_000  # rows of a set that is read first
NICENESS = 10


@dataclass(frozen=True, slots=True)
class CheckSets:
    """The only command. `names`: the sets to check; `vocabulary`: of the model."""

    config_json: str
    names: tuple[str, ...]
    vocabulary: int


@dataclass(frozen=True, slots=True)
class SetChecked:
    """`failure`: the first error of a set, in one line, or "". `dropped`: a line to report."""

    name: str
    dropped: str
    failure: str


COMMANDS: Codec[CheckSets] = Codec(CheckSets)
EVENTS: Codec[SetChecked] = Codec(SetChecked)


def check_small(sets: Iterable[PromptSet]) -> list[PromptSet]:
    """Read the small sets; return the others. Raises DataError, one line."""
    large: list[PromptSet] = []
    for one in sets:
        if len(one) > SMALL:
            large.append(one)
            continue
        for _ in one.scan():
            pass
        one.require_any()
    return large


async def check_large(
    config: Config,
    names: Sequence[str],
    vocabulary: int,
    log: Path,
    report: Callable[[str], None],
) -> None:
    """Read these sets in a process of its own. Raises DataError, one line; after the death of that
    process, an error is raised only when its row is drawn."""
    start = partial(
        Child.start,
        "lightrl.data.check:main",
        "data",
        COMMANDS,
        EVENTS,
        env=environment("data"),
        log=log,
    )
    child = await retry_on_resource_limit(start, "data check", report)
    try:
        child.send(CheckSets(config.model_dump_json(), tuple(names), vocabulary))
        for _ in names:
            checked = await child.receive()
            if checked.failure:
                raise DataError(checked.failure)
            if checked.dropped:
                report(checked.dropped)
    except ChildDied as e:
        report(f"WARNING: rows are no longer checked ahead of their turn: {e}")
    finally:
        child.kill()
        await child.stop()


def main(sock: socket.socket) -> None:
    """The child: reads the sets of the first command, one after the other."""
    os.nice(NICENESS)
    pipe: Pipe[CheckSets, SetChecked] = Pipe(sock, COMMANDS, EVENTS)
    try:
        [command] = pipe.receive()
        config = Config.model_validate_json(command.config_json)
        tokenizer = load_tokenizer(config.model.path)
        for settings in config.data.all_sets:
            if settings.name not in command.names:
                continue
            try:
                one = PromptSet(
                    settings, config.data, tokenizer, command.vocabulary, config.environment
                )
                for _ in one.scan():
                    pass
                one.require_any()
                pipe.send(SetChecked(settings.name, one.dropped_line(), ""))
            except LightRLError as e:
                pipe.send(SetChecked(settings.name, "", str(e)))
    except EOFError:
        pass  # the parent has ended
