"""Every row of the data looked at before it is needed: what is wrong is said at the start, not when
its turn comes.

A small set is looked at where the run begins; a large one in a process of its own, while the run
begins: its first prompts need not wait for the last ones.
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

SMALL = 20_000  # rows that are looked at before anything else
NICENESS = 10


@dataclass(frozen=True, slots=True)
class CheckSets:
    """The only command. `names`: the sets to look at; `vocabulary`: of the model."""

    config_json: str
    names: tuple[str, ...]
    vocabulary: int


@dataclass(frozen=True, slots=True)
class SetChecked:
    """A set is sound, or `failure` says in one line what is not. `dropped`: the line to say."""

    name: str
    dropped: str
    failure: str


COMMANDS: Codec[CheckSets] = Codec(CheckSets)
EVENTS: Codec[SetChecked] = Codec(SetChecked)


def check_small(sets: Iterable[PromptSet]) -> list[PromptSet]:
    """Looks at the small sets; returns the others. Raises DataError, one line."""
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
    """In a process of its own; returns when all of these sets are known to be sound, or that
    process has died: then what is wrong is said when its turn comes. Raises DataError, one line."""
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
        report(f"WARNING: rows are not looked at before their turn any more: {e}")
    finally:
        child.kill()
        await child.stop()


def main(sock: socket.socket) -> None:
    """The child: looks at the sets that the first command names, one after the other."""
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
                one = PromptSet(settings, config.data, tokenizer, command.vocabulary)
                for _ in one.scan():
                    pass
                one.require_any()
                pipe.send(SetChecked(settings.name, one.dropped_line(), ""))
            except LightRLError as e:
                pipe.send(SetChecked(settings.name, "", str(e)))
    except EOFError:
        pass  # nobody waits for it any more
