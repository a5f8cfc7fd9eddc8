"""Send the messages of episodes: with the row of the data, and in the order that resumption needs.

The core decides what is sent; rows come from prompts.py, and journaling.py reports what is durable.
"""

from asyncio import TaskGroup
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightrl.config.environment import Environment
from lightrl.coordinator.journaling import Journaling
from lightrl.coordinator.prompts import Prompts
from lightrl.core.coordinator import Coordinator
from lightrl.messages.episodes import BeginEpisode, EndEpisode, StepEpisode
from lightrl.messages.message import Message
from lightrl.messages.responses import Abort, Generate

# Their order matters where environments have effects.
Ordered: TypeAlias = BeginEpisode | StepEpisode | EndEpisode | Generate | Abort


@dataclass(eq=False)
class EpisodeMessages:
    """Sends the messages of episodes with `send`."""

    _settings: Environment
    _prompts: Prompts
    _core: Coordinator
    _journaling: Journaling
    _send: Callable[[str, Message], None]

    def send(self, node: str, message: Ordered, tasks: TaskGroup) -> None:
        """Send to a node. Rows that are not in memory are read in `tasks`.

        An environment that can be replayed may see a turn before it is durable: after a crash of
        the coordinator the turn is sampled again, and the environment is built again. Others have
        effects: an observation is durable before the next turn is sampled, and a turn is before its
        environment receives it.
        """
        if isinstance(message, BeginEpisode):
            group = self._core.table.responses[message.response].group
            prompt, is_eval = group.prompt.id, group.round.is_eval
            if (row := self._prompts.row_json(prompt, is_eval)) is None:
                reading = self._read_and_send(node, message, prompt, is_eval)
                tasks.create_task(reading, name="row of an episode")
                return
            message = replace(message, row=row)
        self._send_in_order(node, message)

    async def _read_and_send(
        self, node: str, message: BeginEpisode, prompt: str, is_eval: bool
    ) -> None:
        row = await self._prompts.read_row(prompt, is_eval)
        at = self._core.fleet.nodes.get(node)
        response = at.episodes.get(message.response) if at is not None else None
        if response is not None and response.incarnation == message.incarnation:
            self._send_in_order(node, replace(message, row=row))

    def _send_in_order(self, node: str, message: Ordered) -> None:
        if self._settings.resume == "replay":
            self._send(node, message)
            return
        at = self._core.fleet.nodes.get(node)

        def send() -> None:  # unless another process has the name by then
            if self._core.fleet.nodes.get(node) is at:
                self._send(node, message)

        self._journaling.when_durable(send)
