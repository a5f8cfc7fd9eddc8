"""Engines of several sizes over the same devices, by the planner of the core, in whole runs."""

from dataclasses import replace

import pytest

from lightrl.core.settings import Tail
from lightrl.errors import SimError
from lightrl.sim.inputs.nodes import SPOT, NodeSpec, can_group, of_all_sizes
from lightrl.sim.inputs.scenario import PRESETS, Switches
from lightrl.sim.variants import SimFleet, compare
from lightrl.sim.world import World
from tests.sim.conftest import COLOCATED, SCENARIO, SETTINGS, nodes, world

PLANNER = Switches(planner=True)
# Long rounds do not fit into small engines; twice the devices are hardly faster.
TIGHT = replace(
    COLOCATED,
    engines={
        size: replace(COLOCATED.engine.slower(1 / 1.05**k), kv_tokens=kv)
        for k, (size, kv) in enumerate({1: 400, 2: 4000}.items())
    },
)


def tight(switches: Switches = PLANNER, **changes: object) -> World:
    changes = {"tail": Tail(1.25), "num_steps": 10, "num_prompts": 40, **changes}
    return world(TIGHT, switches, **changes)  # type: ignore[arg-type]


def test_rounds_get_the_size_that_is_faster_and_nothing_else_changes():
    ours, fixed = tight(check=True).run(), tight(Switches()).run()
    assert ours.winners == fixed.winners
    assert ours.kept == fixed.kept
    assert ours.preemptions < fixed.preemptions
    assert {s.parallelism for s in ours.steps} == {2}
    assert ours.elapsed_s < fixed.elapsed_s
    assert ours.device_s["rollout"] == pytest.approx(4 * ours.elapsed_s, rel=0.02)


def test_long_rounds_that_will_not_fit_are_foreseen():
    steps = tight().run().steps
    first = next(step for step in steps if step.kind == "long")
    assert first.parallelism == 2
    assert first.preemptions == 0


def test_engines_of_all_sizes_lie_over_the_same_devices():
    spot = NodeSpec("s", 8, SPOT)
    made = of_all_sizes([*nodes(4, slots=8), spot], (1, 2, 4))
    assert made[0] == spot
    assert [(n.name, n.slots, n.parallel, n.width) for n in made[1:]] == [
        *((f"n{k}", 8, 1, 1) for k in range(4)),
        *(("n0x2", 16, 2, 2), ("n2x2", 16, 2, 2), ("n0x4", 32, 4, 4)),
    ]
    with pytest.raises(SimError, match="3 nodes with engines of 1 cannot be grouped by 2"):
        of_all_sizes(nodes(3), (1, 2))


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(SimError, match="take turns with each other, not with the trainer"):
        world(COLOCATED, replace(PLANNER, offload="foreseen"))
    with pytest.raises(SimError, match="workload small does not describe an engine of 3 devices"):
        world(SCENARIO, parallel=(1, 3))


def test_compared_where_the_nodes_can_be_grouped():
    settings = replace(SETTINGS, num_steps=1)
    assert "planner" in compare(settings, SCENARIO, SimFleet(nodes(2)))
    assert "planner" not in compare(settings, SCENARIO, SimFleet(nodes(3)))
    assert not can_group(nodes(4), [1])


def test_the_preset_with_a_limit_of_32k_has_engines_of_several_sizes():
    engines = PRESETS["rollpacker-32b-32k"]().engines
    assert sorted(engines) == [1, 2, 4]
    assert engines[4].kv_tokens > 4 * engines[1].kv_tokens
