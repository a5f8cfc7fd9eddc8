"""Evaluations of three sets in virtual time, by the core's own decisions.

The sets: few hard prompts with many long samples, many prompts with few, many easy ones answered
once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightrl.core.commands import CloseRound, Command
from lightrl.core.events import Event
from lightrl.core.settings import EvalSet, Settings
from lightrl.core.state import Round
from lightrl.messages.responses import Sampling
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.nodes import NodeSpec
from lightrl.sim.inputs.scenario import Scenario, SimTraining, SimTransfer, Switches
from lightrl.sim.inputs.workload import LengthDistribution, LengthModel, Workload
from lightrl.sim.world import World

SETS = (
    EvalSet("hard", 30, 32, Sampling(0.6, 0.95), 16384),
    EvalSet("middle", 500, 4, Sampling(0.6, 0.95), 4096),
    EvalSet("easy", 1319, 1, Sampling(0.0), 1024),
)
ENGINE = EngineProfile(context_s=0.0)  # a bound with context would depend on who runs beside whom


@dataclass(frozen=True)
class OfSets:
    """Each set with the shape of lengths of training, scaled to its limit."""

    shapes: Mapping[str, LengthDistribution]

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        shape = self.shapes.get(prompt.partition("/")[0], self.shapes[""])
        return shape.length(prompt, epoch, noise, limit, group, index)


class Watch:
    """Keeps the evaluations of a world."""

    def __init__(self, world: World) -> None:
        self.rounds: list[Round] = []
        self._handle, world.handle = world.handle, self._watch

    def _watch(self, event: Event, now: float) -> list[Command]:
        commands = self._handle(event, now)
        closed = [command.round for command in commands if isinstance(command, CloseRound)]
        self.rounds += [round for round in closed if round.is_eval]
        return commands


def evaluations(
    sets: Sequence[EvalSet],
    num_nodes: int,
    slots: int,
    num_steps: int,
    seed: int = 0,
    step_s: float = ENGINE.step_s,
) -> list[tuple[float, list[int]]]:
    """Of each: how long it took, and the tokens of its responses."""
    shape = LengthModel(seed=seed)
    shapes = {"": shape.scaled(1024)} | {s.name: shape.scaled(s.max_response_tokens) for s in sets}
    scenario = Scenario(
        Workload("sets", OfSets(shapes), num_prompts=64, prompt_tokens=100),
        engines={1: replace(ENGINE, step_s=step_s)},
        training=SimTraining(token_s=1e-6, step_s=0.1),
        transfer=SimTransfer(num_bytes=1e6, load_s=0.1),
    )
    settings = Settings(
        run_seed=seed,
        num_steps=num_steps,
        prompts_per_step=8,
        group_size=4,
        max_response_tokens=1024,
        sampling=Sampling(1.0),
        slots=slots,
        vocabulary=1,
        lease_s=5.0,
        reward_on_failure=None,
        num_prompts=64,
        eval_interval=1,
        eval_sets=tuple(sets),
    )
    nodes = [NodeSpec(f"n{k}", slots) for k in range(num_nodes)]
    world = World(settings, scenario, nodes, (), Switches(chunk_tokens=64))
    watch = Watch(world)
    world.run()
    return [
        (
            round.closed_at - round.opened_at,
            [len(r.tokens) for g in round.groups.values() for r in g.responses],
        )
        for round in watch.rounds
    ]
