"""What an engine process is told, in order, with a look ahead while it does something long."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from lightrl.engine.base import (
    EngineCommand,
    EngineEvent,
    LoadWeights,
    ProveWeights,
    ReceiveWeights,
)
from lightrl.system.child import Pipe

EnginePipe: TypeAlias = Pipe[EngineCommand, EngineEvent]


class Inbox:
    """Of one pipe, which nobody else receives from. EOFError when the daemon has closed it."""

    def __init__(self, pipe: EnginePipe, commands: Iterable[EngineCommand] = ()) -> None:
        """`commands` have been received already."""
        self._pipe = pipe
        self._commands = deque(commands)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether there is a command; waits so long for one (None: for ever)."""
        self._commands += self._pipe.receive(0.0 if self._commands else timeout_s)
        return bool(self._commands)

    def take_all(self) -> Iterator[EngineCommand]:
        """Those that are here, each when the one before has been performed."""
        while self._commands:
            yield self._commands.popleft()

    def is_unwanted(self) -> bool:
        """Whether what is received by broadcast now is of no use: somebody has said so, or that
        another version be loaded, while it comes."""
        self.wait(0.0)
        return any(
            isinstance(command, LoadWeights | ReceiveWeights) or command == ProveWeights(())
            for command in self._commands
        )
