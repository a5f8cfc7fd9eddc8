"""Devices that change sides, by the rules of the core, in whole runs."""

from dataclasses import replace

import pytest

from lightrl.core.settings import EvalSet, Tail
from lightrl.core.sharing.sharing_rules import Change, Rule, StepTimes, View
from lightrl.messages.responses import Sampling
from lightrl.sim.inputs.scenario import OffloadRule, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.world import World
from tests.sim.conftest import COLOCATED, nodes, world

# Training takes about as long as sampling, and a switch some time.
SCENARIO = replace(COLOCATED, training=replace(COLOCATED.training, token_s=8e-4, switch_s=0.2))
ALWAYS = (TraceEvent(0.0, "s0", True), TraceEvent(0.0, "s1", True))
RULES: tuple[OffloadRule, ...] = ("foreseen", "window")


def shared_world(rule: OffloadRule, trace: tuple[TraceEvent, ...] = ALWAYS, **changes) -> World:
    changes = {"fleet": nodes(2), "num_steps": 5, **changes}
    return world(SCENARIO, Switches(offload=rule), trace=trace, **changes)


def steps_s(outcome: SimOutcome) -> list[float]:
    return [step.step_s for step in outcome.steps]


@pytest.mark.parametrize("tail", [Tail(), Tail(1.25)], ids=["plain", "tail batching"])
@pytest.mark.parametrize("rule", RULES)
def test_changing_sides_changes_times_alone(rule: OffloadRule, tail: Tail):
    never = shared_world("off", tail=tail).run()
    out = shared_world(rule, tail=tail, check=True).run()
    assert out.winners == never.winners
    assert out.kept == never.kept
    assert out.counters["responses_moved"] > never.counters["responses_moved"]
    assert sum(steps_s(out)[2:]) < 0.95 * sum(steps_s(never)[2:])
    assert "train" not in out.device_times["spot"]


class Noting:
    """A rule, and what it has decided."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.released_at: list[float] = []
        self.kinds: set[str] = set()

    def decide(self, view: View, now: float) -> Change:
        change = self._rule.decide(view, now)
        self.kinds.add(view.kind)
        self.released_at += [now] if change.release else []
        return change

    def learn(self, step: StepTimes) -> None:
        self._rule.learn(step)


def noting(w: World) -> Noting:
    w.core.policy.rule = noted = Noting(w.core.policy.rule)
    return noted


@pytest.mark.parametrize("rule", RULES)
def test_if_the_others_vanish_around_a_release_its_nodes_come_back(rule: OffloadRule):
    """A second before, at the moment itself, a second after."""
    undisturbed = shared_world(rule)
    noted = noting(undisturbed)
    usual_s = max(steps_s(undisturbed.run()))
    at = noted.released_at[len(noted.released_at) // 2]
    for when in (at - 1.0, at, at + 1.0):
        gone = tuple(TraceEvent(when, name, False) for name in ("s0", "s1"))
        w = shared_world(rule, (*ALWAYS, *gone), check=True)
        out = w.run()
        assert out.counters["trained_responses"] == 5 * 8 * 4
        assert max(steps_s(out)) < 4 * usual_s


@pytest.mark.parametrize("rule", RULES)
def test_nodes_that_flap_every_second_lose_nothing(rule: OffloadRule):
    trace = tuple(
        TraceEvent(float(t), name, bool((t + k) % 2))
        for t in range(60)
        for k, name in enumerate("ab")
    )
    out = shared_world(rule, trace, check=True).run()
    assert out.counters["trained_responses"] == 5 * 8 * 4
    assert out.counters["rollout_tokens"] == out.trained_tokens + out.counters["aborted_tokens"]


def test_nobody_changes_sides_in_an_evaluation():
    w = shared_world(
        "foreseen", eval_interval=1, eval_sets=(EvalSet("e", 8, 1, Sampling(0.0), 600),)
    )
    noted = noting(w)
    assert w.run().counters["eval_tokens"] > 0
    assert noted.released_at
    assert noted.kinds == {"plain"}


def test_without_preemptible_nodes_both_rules_scale_down():
    out = {rule: shared_world(rule, (), fleet=nodes(4)).run() for rule in ("off", *RULES)}
    assert sum(steps_s(out["window"])) < sum(steps_s(out["off"]))
    assert sum(steps_s(out["foreseen"])) < sum(steps_s(out["off"]))
