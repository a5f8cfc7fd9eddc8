"""Environment nodes of a simulated run: they reset and step the environments of episodes.

Owns when each observation arrives, and which node is present. The core has the state of every
episode, and the length of its turns follows from the workload.
"""

import math
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from lightrl.core.events import Event, MessageArrived, NodeJoined, NodeLeft, NodeLost
from lightrl.core.state import Response
from lightrl.messages.episodes import BeginEpisode, EndEpisode, EpisodeEnded, Observed, StepEpisode
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL, Drain, Hello
from lightrl.sim.fleet.engine import blank
from lightrl.sim.inputs.workload import SimEnvironment
from lightrl.sim.responses import Lengths, reward
from lightrl.sim.simulation import Simulation

# (node, incarnation of the episode, unique number)
_Step: TypeAlias = tuple[str, int, int]


@dataclass(eq=False)
class SimEpisodes:
    """Answers the messages of episodes. The sampled tokens of an episode are those of a response of
    the workload, in turns of equal length."""

    _world: Simulation
    _environment: SimEnvironment
    _lengths: Lengths
    # node -> incarnation of its process; lost ones are missing
    _present: dict[str, int] = field(default_factory=dict[str, int])
    # episode -> the step that is awaited
    _awaited: dict[str, _Step] = field(default_factory=dict[str, _Step])
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def start(self) -> None:
        for k in range(self._environment.nodes):
            self._world.at(0.0, lambda name=f"environment-{k}": self._join(name))

    def _join(self, name: str) -> None:
        incarnation = self._present[name] = next(self._numbers)
        slots = self._environment.slots
        hello = Hello(name, incarnation, ("environment",), PROTOCOL, 1, slots=slots, host=name)
        self._world.feed(NodeJoined(hello))

    def lose(self, name: str) -> None:
        """Lose a node without warning, with its environments. It joins again once the core has
        detected the loss."""
        world = self._world
        del self._present[name]
        self._awaited = {k: step for k, step in self._awaited.items() if step[0] != name}
        at = world.now + world.scenario.transfer.lost_after_s
        world.at(at, lambda: world.feed(NodeLost(name, "connection lost")))
        world.at(at, lambda: self._join(name))

    def deliver(self, node: str, message: Message) -> list[Event]:
        """Deliver a message to an environment node; return what follows immediately."""
        if node not in self._present:
            return []
        match message:
            case BeginEpisode(response, incarnation, turns=turns):  # again: all turns are stepped
                self._begin(node, response, incarnation, range(len(turns) + 1))
            case StepEpisode(response, incarnation, turn):
                self._begin(node, response, incarnation, range(turn + 1, turn + 2))
            case EndEpisode(episodes):
                for name, incarnation in episodes:
                    if self._awaited.get(name, ())[:2] == (node, incarnation):
                        del self._awaited[name]
            case Drain(_, reason):
                del self._present[node]
                return [NodeLeft(node, reason, ok=True)]
            case _:
                pass
        return []

    def _begin(self, node: str, name: str, incarnation: int, turns: range) -> None:
        """Begin a reset, or the steps that lead to these observations."""
        world, step = self._world, (node, incarnation, next(self._numbers))
        self._awaited[name] = step
        seed = world.core.table.responses[name].seed
        seconds = sum(self._environment.seconds(seed, turn) for turn in turns)
        world.at(world.now + seconds, lambda: self._answer(name, step, seconds))

    def _answer(self, name: str, step: _Step, seconds: float) -> None:
        if self._awaited.get(name) != step:
            return
        del self._awaited[name]
        node, incarnation, _ = step
        response, out = self._world.core.table.responses[name], self._world.outcome
        turn, limit = len(response.turns), response.group.max_response_tokens
        out.environment_s += seconds
        if turn == self._num_turns(response):
            out.episodes += 1
            stop = "length" if response.num_sampled >= limit else "done"
            score = reward(response.seed)
            answer = EpisodeEnded(name, incarnation, turn, stop, score, seconds=seconds)
        else:
            first = self._world.scenario.workload.prompt_tokens
            num_tokens = self._environment.observation_tokens if turn else first
            out.turns += 1
            out.inserted_tokens += num_tokens
            offset, tokens = len(response.tokens), blank(num_tokens)
            answer = Observed(
                name, incarnation, turn, offset, tokens, limit, "", "", seconds=seconds
            )
        self._world.feed(MessageArrived(node, answer))

    def _num_turns(self, response: Response) -> int:
        turns = self._environment.num_turns(response.seed)
        return min(turns, self._lengths.current(response))

    def turn_of(self, response: Response) -> tuple[int, bool]:
        """Return the tokens of an episode, inserted ones included, at which its turn ends, and
        whether that is the limit of the episode."""
        final, turns = self._lengths.current(response), self._num_turns(response)
        sampled = math.ceil(final * len(response.turns) / turns)
        return response.num_inserted + sampled, sampled >= response.group.max_response_tokens
