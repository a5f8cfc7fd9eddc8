"""Surplus responses that run on, as in a system that has no scores before the rollout is over."""

from collections.abc import Sequence

from lightrl.core.commands import CloseRound, Command, Send
from lightrl.core.events import Event, MessageArrived
from lightrl.core.rounds.race import DECIDED
from lightrl.core.state import Response
from lightrl.messages.responses import Abort, ResponseTokens, TokenChunk
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.world import World


class Surplus:
    """What a group has too much runs on, and is scored, until its round closes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._handle, world.handle = world.handle, self._watch
        # aborted by the core, but still running
        self._kept: dict[tuple[str, int], tuple[SimMachine, Response]] = {}

    def _watch(self, event: Event, now: float) -> list[Command]:
        commands = [self._without_kept(command) for command in self._handle(event, now)]
        match event:
            case MessageArrived(message=TokenChunk(responses=items)):
                # after what the core aborts because of them
                self._world.at(now, lambda: self._score_finished(items))
            case _:
                pass
        return commands

    def _score_finished(self, items: Sequence[ResponseTokens]) -> None:
        for item in items if self._kept else ():
            key = (item.response, item.attempt)
            if item.finish_reason and (kept := self._kept.pop(key, None)):
                self._world.reward_workers.defer(kept[1])

    def _without_kept(self, command: Command) -> Command:
        match command:
            case Send(node, Abort(attempts)):
                machine = self._world.machines[node]
                return Send(node, Abort(tuple(a for a in attempts if not self._keeps(machine, *a))))
            case CloseRound():
                for (response, number), (machine, _) in self._kept.items():
                    self._world.abort(machine, response, number)
                self._kept.clear()
            case _:
                pass
        return command

    def _keeps(self, machine: SimMachine, response: str, number: int) -> bool:
        table = self._world.core.table
        round, kept = table.round, table.responses.get(response)
        if round is None or kept is None or round.cut == DECIDED or not machine.present:
            return False
        self._kept[response, number] = machine, kept
        return True
