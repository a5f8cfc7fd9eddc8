"""The commands to an engine process, in order, with a look ahead while one takes long."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from lightrl.engine.base import (
    DropBroadcast,
    EngineCommand,
    EngineEvent,
    LoadWeights,
    ReceiveWeights,
)
from lightrl.system.child import Pipe

EnginePipe: TypeAlias = Pipe[EngineCommand, EngineEvent]


class Inbox:
    """The commands of one pipe, of which it is the only reader. EOFError when the daemon has closed
    it."""

    def __init__(self, pipe: EnginePipe, commands: Iterable[EngineCommand] = ()) -> None:
        """`commands` have been received already."""
        self._pipe = pipe
        self._commands = deque(commands)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait so long for a command (None: without limit). Returns whether there is one."""
        self._commands += self._pipe.receive(0.0 if self._commands else timeout_s)
        return bool(self._commands)

    def take_all(self) -> Iterator[EngineCommand]:
        """Yield the available commands, each when the one before has been performed."""
        while self._commands:
            yield self._commands.popleft()

    def is_unwanted(self) -> bool:
        """Return whether the version that is being received is obsolete: a command is here to drop
        it, or to load another one."""
        self.wait(0.0)
        ending = LoadWeights | ReceiveWeights | DropBroadcast
        return any(isinstance(command, ending) for command in self._commands)
