"""Episodes in virtual time: what their environments cost, and that no loss changes a token."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from lightrl.cli import main
from lightrl.core.commands import Command, Send
from lightrl.core.events import Event
from lightrl.core.settings import EpisodeSettings, Tail
from lightrl.core.state import ResponseState
from lightrl.messages.training import TrainResponse, TrainShard
from lightrl.sim.inputs.hardware import EngineProfile, SimTraining, SimTransfer
from lightrl.sim.inputs.scenario import Scenario
from lightrl.sim.inputs.workload import SHORT_TAIL, SimEnvironment, Workload
from lightrl.sim.report import Figures, figures
from lightrl.sim.world import World
from tests.sim.conftest import nodes, world
from tests.sim.test_command import QUICKSTART, SMALL

LIMIT = 2048
SLOW = SimEnvironment(mean_s=0.5)  # sigma 1: one of a hundred takes 3 s
INSTANT = replace(SLOW, mean_s=0.0)


def scenario(environment: SimEnvironment, **engine: Any) -> Scenario:
    return Scenario(
        Workload("e", SHORT_TAIL.scaled(LIMIT), num_prompts=200, environment=environment),
        engines={1: EngineProfile(**engine)},
        training=SimTraining(token_s=1e-6, step_s=0.1),
        transfer=SimTransfer(load_s=0.1),
    )


def episodes(
    environment: SimEnvironment, num_nodes: int = 1, slots: int = 64, **changes: Any
) -> World:
    """256 episodes a step, on so many slots together."""
    changes = {"prompts_per_step": 32, "group_size": 8, "num_steps": 3} | changes
    return world(
        scenario(environment),
        fleet=nodes(num_nodes, slots=slots // num_nodes),
        episodes=EpisodeSettings(),
        max_response_tokens=LIMIT,
        **changes,
    )


@cache
def measured(environment: SimEnvironment, num_nodes: int, staleness: int) -> Figures:
    w = episodes(environment, num_nodes, max_staleness=staleness)
    return figures(w.run(), w.scenario)


@pytest.mark.parametrize(("num_nodes", "staleness"), [(1, 0), (1, 1), (2, 1), (4, 1)])
def test_an_environment_of_half_a_second_costs_a_tenth_at_most(num_nodes: int, staleness: int):
    slow, instant = (measured(e, num_nodes, staleness) for e in (SLOW, INSTANT))
    assert slow.trained_tokens == instant.trained_tokens
    assert slow.tokens_per_s >= 0.9 * instant.tokens_per_s
    assert slow.episodes is not None
    assert slow.episodes.environment_s == pytest.approx(0.5 * (1 + slow.episodes.turns), rel=0.1)


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("environment", [SLOW, INSTANT], ids=["slow", "instant"])
def test_episodes_are_prefilled_once(environment: SimEnvironment, num_nodes: int):
    """One node prefills what is inserted, and nothing else; more nodes move few turns."""
    found = measured(environment, num_nodes, 1).episodes
    assert found is not None
    assert found.prefilled <= (1.2 if num_nodes > 1 else 0.8)


def test_without_room_for_the_kv_whole_contexts_are_prefilled():
    found = {}
    for kv_tokens in (0, 20_000):
        tight = scenario(SLOW, kv_tokens=kv_tokens)
        made = world(
            tight,
            fleet=nodes(1, slots=64),
            episodes=EpisodeSettings(),
            num_steps=1,
            prompts_per_step=32,
            max_response_tokens=LIMIT,
        )
        found[kv_tokens] = figures(made.run(), tight).episodes
    assert found[20_000].prefilled > 1.5 * found[0].prefilled


def test_a_waiting_episode_holds_no_slot():
    w = episodes(SLOW, 2, num_steps=1)
    handle, most = w.core.handle, [0, 0]

    def watch(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        waiting = [r for r in w.core.table.responses.values() if r.state is ResponseState.WAITING]
        running = sum(len(m.engine.running) for m in w.machines.values())
        for machine in w.machines.values():
            held = {*machine.engine.running, *(a.response for a in machine.engine.waiting)}
            assert held.isdisjoint(r.id for r in waiting)
        if len(waiting) + running > sum(most):
            most[:] = len(waiting), running
        return commands

    w.handle = watch
    out = w.run()
    assert sum(most) > 64  # more are open than there are slots
    assert out.episodes == 256


def trained(w: World) -> dict[str, TrainResponse]:
    """The responses that reach the trainer."""
    found: dict[str, TrainResponse] = {}
    handle = w.handle

    def watch(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, TrainShard):
                for group in command.message.groups:
                    found.update({f"{r.response}": r for r in group.responses})
        return commands

    w.handle = watch
    w.run()
    return found


@pytest.mark.parametrize("tail", [Tail(), Tail(1.25, 1.25)], ids=["plain", "race"])
def test_lost_nodes_change_no_trained_token(tail: Tail):
    two = replace(SLOW, nodes=2)
    small = {"prompts_per_step": 8, "group_size": 4, "num_steps": 2, "foresight": False}
    undisturbed = trained(episodes(SLOW, 2, tail=tail, **small))
    assert len(undisturbed) == 64
    w = episodes(two, 2, tail=tail, check=True, **small)
    for at_s, name in ((2.0, "environment-0"), (3.1, "environment-1"), (9.0, "environment-0")):
        w.at(at_s, lambda name=name: w.episodes.lose(name))
    for at_s, name in ((2.5, "n0"), (6.0, "n1"), (7.5, "n0")):
        w.at(at_s, lambda name=name: w.fleet.kill(w.machines[name]))
        w.at(at_s + 1.0, lambda name=name: w.fleet.join(w.machines[name]))
    assert trained(w) == undisturbed
    assert w.core.table.counters.nodes_lost >= 6


def test_environments_are_options_of_the_command(capsys):
    environment = ("--environment-s", "0.5,0.1", "--turns", "2", "--observation-tokens", "7")
    arguments = (*SMALL, "environment.source=guess.py:Guess", *environment)
    with pytest.raises(SystemExit):
        main(["simulate", str(QUICKSTART), *arguments])
    out = capsys.readouterr().out
    assert "2 turns on average, observations of 7 tokens after 0.5 s (lognormal, sigma 0.1)" in out
    assert "episodes   96 of " in out
    assert "% of the slots were busy" in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--turns", "2"), "--turns: the config has no environment"),
        (
            ("environment.source=guess.py:Guess", "--environment-s", "0.5,x"),
            "--environment-s 0.5,x: is not MEAN or MEAN,SIGMA, of seconds",
        ),
    ],
)
def test_a_wrong_environment_is_one_line(capsys, options: tuple[str, ...], complaint: str):
    with pytest.raises(SystemExit):
        main(["simulate", str(QUICKSTART), *SMALL, *options])
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line
