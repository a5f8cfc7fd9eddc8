"""Devices whose parts change sides by themselves: of which replica each engine's are, and what a
run has that cannot have parts."""

from pathlib import Path
from typing import Any

import pytest

from lightrl.config.run_file import parse_config
from lightrl.config.schema import Config
from lightrl.core_settings import settings_of
from lightrl.devices import plan
from lightrl.devices.assign import NO_GPUS, Assignment, DeviceRequest, assign
from lightrl.devices.driver import NO_DRIVER
from lightrl.devices.plan import part_with, shared_with
from tests.devices.test_assign import gpus

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"


def config_of(nodes: int = 1, ranks: int = 4, replicas: int = 2, **more: Any) -> Config:
    rollout = {"placement": "shared", "nodes": 4, "engine": "emulated", **more.pop("rollout", {})}
    return parse_config(
        {
            "model": {"path": str(QUICKSTART / "model")},
            "data": {"path": "unused"},
            "rollout": rollout,
            "train": {"nodes": nodes, "ranks": ranks, "replicas": replicas, "engine": "emulated"},
            **more,
        }
    )


@pytest.mark.parametrize(
    ("parts", "fields"),
    [
        (2, {}),
        (4, {"replicas": 4}),
        (4, {"nodes": 2, "replicas": 4}),
        (1, {"replicas": 1}),
        (1, {"rollout": {"placement": "own"}}),
        (1, {"run": {"deterministic": True}}),
        (2, {"rollout": {"engine_args": {"tensor_parallel_size": 2}}}),
        (1, {"replicas": 4, "rollout": {"engine_args": {"tensor_parallel_size": 2}}}),
        (1, {"rollout": {"engine_args": {"tensor_parallel_size": 4}}}),
        (2, {"rollout": {"devices": [1, 2]}}),
        (1, {"rollout": {"devices": [1, 2], "engine_args": {"tensor_parallel_size": 2}}}),
        # a node has ranks of two replicas, or a replica has ranks of two nodes
        (1, {"nodes": 3, "ranks": 2, "replicas": 2}),
        (1, {"nodes": 4, "ranks": 1, "replicas": 2}),
    ],
)
def test_how_many_parts_change_sides_by_themselves(parts: int, fields: dict[str, Any]):
    config = config_of(**fields)
    assert config.device_parts == parts
    assert settings_of(config, 1).device_parts == parts


def found(config: Config, **changes: Any) -> Assignment:
    train = config.train
    shares = {"trainers": train.nodes, "is_shared": True}
    wanted = DeviceRequest(ranks=train.world, engines=config.rollout.nodes, **{**shares, **changes})
    return assign(gpus(8), {}, wanted)


def parts_of(config: Config, assignment: Assignment) -> list[tuple[str, int]]:
    nodes = config.train.nodes
    return [
        (shared_with(config, assignment, k), part_with(config, assignment, k, nodes))
        for k in range(config.rollout.nodes)
    ]


def test_an_engine_has_devices_of_one_replica():
    config = config_of()
    got = found(config)
    assert [part.tokens for part in got.engines] == [("0",), ("1",), ("2",), ("3",)]
    t = "trainer-0"
    assert parts_of(config, got) == [(t, 0), (t, 0), (t, 1), (t, 1)]
    got = found(config, per_engine=2)
    assert [part.tokens for part in got.engines] == [("0", "1"), ("2", "3")] * 2
    assert parts_of(config, got) == [(t, 0), (t, 1)] * 2


def test_each_trainer_node_has_parts_of_its_own():
    config = config_of(nodes=2, replicas=4)
    got = found(config)
    assert parts_of(config, got) == [
        ("trainer-0", 0),
        ("trainer-0", 0),
        ("trainer-0", 1),
        ("trainer-0", 1),
    ]
    config = config_of(nodes=2, ranks=2, replicas=4)
    assert parts_of(config, found(config)) == [
        ("trainer-0", 0),
        ("trainer-0", 1),
        ("trainer-1", 0),
        ("trainer-1", 1),
    ]


def test_without_gpus_engines_go_round_all_parts():
    config = config_of(nodes=2, replicas=4)
    assert parts_of(config, NO_GPUS) == [
        ("trainer-0", 0),
        ("trainer-1", 0),
        ("trainer-0", 1),
        ("trainer-1", 1),
    ]
    whole = config_of(replicas=1)
    assert {part for _, part in parts_of(whole, NO_GPUS)} == {0}


def test_the_dry_run_names_parts_and_those_that_only_train():
    assert plan.describe(config_of(), NO_DRIVER)[:2] == [
        "rollout-0, rollout-2: in turn with part 0 of trainer-0",
        "rollout-1, rollout-3: in turn with part 1 of trainer-0",
    ]
    assert plan.describe(config_of(rollout={"nodes": 1}), NO_DRIVER)[:2] == [
        "rollout-0: in turn with part 0 of trainer-0",
        "only trains, for no engine uses it: part 1 of trainer-0",
    ]
    assert plan.describe(config_of(replicas=1), NO_DRIVER)[0] == (
        "rollout-0, rollout-1, rollout-2, rollout-3: in turn with trainer-0"
    )
