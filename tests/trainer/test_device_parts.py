"""A trainer node whose replicas get their devices one by one: each works once it has its own, what
needs all waits for all, and a step comes out as if they had come together."""

import asyncio
import signal

import pytest

from lightrl.config.run_file import parse_config
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import ShardsTaken, TrainShard
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.protocol import Accumulate, Done, Suspended, Update
from lightrl.trainer.state import TrainerState
from tests.support.trainer_coordinator import Coordinator, kill, turns, until

STEPS = 3
HALF, BOTH = (1,), (0, 1)
SHARD = TrainShard(0, 0, 0, ())


@pytest.fixture
def new_config(model_dir):
    def make(engine="emulated", **train):
        return parse_config(
            {
                "model": {"path": str(model_dir)},
                "data": {"path": "unused"},
                "rollout": {
                    "engine": "emulated",
                    "placement": "shared",
                    "engine_args": {"parked_mb": 0.25},
                },
                "train": {
                    "engine": engine,
                    "steps": STEPS,
                    "ranks": 2,
                    "replicas": 2,
                    "max_tokens_per_gpu": 40,
                    "prompts_per_step": 8,
                }
                | train,
                "checkpoint": {"interval": 1},
            }
        )

    return make


class Giving(Coordinator):
    """One that gives the devices as the test has it; steps that it feeds by itself have all."""

    number = 0

    def give(self, step, parts):
        self.trainer.handle(SetDevices("trainer", step, True, parts))

    async def hand(self, shard):
        self.trainer.handle(shard)
        await until(lambda: ShardsTaken(shard.step, shard.index) in self.sent)

    @property
    def parked(self):
        return [m.number for m in self.sent if isinstance(m, DevicesReleased)]

    async def park(self):
        self.number += 1
        self.trainer.handle(SetDevices("trainer", self.number, False))
        await until(lambda: self.number in self.parked)


def trained(config, folder, groups, prepare):
    async def run():
        coordinator = Giving(config, folder, groups)
        prepare(coordinator)
        await coordinator.run_and_close()
        return coordinator

    return asyncio.run(run())


async def half_of_a_step(coordinator, step=1):
    """All shards have come to the replica that has its devices; it has computed what it got."""
    coordinator.give(step, HALF)
    for shard in coordinator.shards(step):
        await coordinator.hand(shard)
    now = coordinator.trainer._step
    await until(lambda: now.queue.is_accumulated and not now.is_busy)
    await turns()


@pytest.mark.usefixtures("warm_emulated")
def test_a_replica_works_while_others_have_no_devices_and_the_step_ends_when_they_have(
    new_config, groups, tmp_path
):
    def prepare(coordinator):
        async def step():
            await half_of_a_step(coordinator)
            assert coordinator.trainer._step.can_advance is False
            assert 2 not in coordinator.digests
            coordinator.give(0, BOTH)  # of a step that is over
            await turns()
            assert 2 not in coordinator.digests
            coordinator.give(1, BOTH)

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert len(found.digests) == STEPS + 1
    assert set(found.replicas[2]) == {1}  # the other one had none
    assert set(found.replicas[3]) == {0, 1}
    assert set(found.parked) == {0}  # at the end of each step alone


@pytest.mark.usefixtures("warm_emulated")
def test_what_one_replica_has_computed_stays_when_it_parks_and_another_goes_on(
    new_config, groups, tmp_path
):
    def prepare(coordinator):
        async def step():
            first, second, *others = coordinator.shards(1, (2, 2, 2, 2))
            coordinator.give(1, HALF)
            await coordinator.hand(first)
            step = coordinator.trainer._step
            await until(lambda: step.queue.portions and not step.is_busy)
            await coordinator.park()
            assert not coordinator.trainer.devices.has_devices
            coordinator.trainer.handle(second)
            await turns()
            assert ShardsTaken(1, 1) not in coordinator.sent
            coordinator.give(1, (0,))  # without another shard
            await until(lambda: 0 in step.queue.replicas)
            await until(lambda: ShardsTaken(1, 1) in coordinator.sent)
            coordinator.give(1, BOTH)
            for shard in others:
                await coordinator.hand(shard)

        coordinator.on["published", 1] = step

    found = trained(new_config(max_tokens_per_gpu=32), tmp_path / "run", groups, prepare)
    assert found.replicas[2][0] == 1
    assert 0 in found.replicas[2]
    assert sum(found.portions[2]) == 8
    assert found.parked.count(1) == 1


@pytest.mark.usefixtures("warm_emulated")
def test_a_park_before_the_rest_has_come_does_not_wait_for_the_end_of_the_step(
    new_config, groups, tmp_path
):
    """All shards are here, but it could not end: who asks would wait for who is asked."""

    def prepare(coordinator):
        async def step():
            await half_of_a_step(coordinator)
            await coordinator.park()
            await turns()
            assert coordinator.parked == [0, 0, 1]  # no version comes of it
            coordinator.give(1, BOTH)

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert found.parked == [0, 0, 1, 0, 0]


@pytest.mark.usefixtures("warm_emulated")
def test_an_update_in_the_middle_of_a_step_waits_for_all_devices(new_config, groups, tmp_path):
    def prepare(coordinator):
        async def step():
            coordinator.give(1, HALF)
            for shard in coordinator.shards(1, (4, 2, 2)):
                coordinator.trainer.handle(shard)
            step = await until(lambda: coordinator.trainer._step)
            await until(lambda: step.queue.has_mini_batch and not step.is_busy)
            await turns()
            assert not step.can_advance
            assert sum(step.queue.portions) == 4
            coordinator.give(1, BOTH)

        coordinator.on["published", 1] = step

    found = trained(new_config(mini_batches=2), tmp_path / "run", groups, prepare)
    assert sum(found.portions[2]) == 8


@pytest.mark.usefixtures("warm_emulated")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "not asked"])
def test_ranks_that_die_with_half_of_the_devices_start_when_they_have_all(
    new_config, groups, tmp_path, caplog, rank, is_asked
):
    """Whichever of them dies; engines have the other half. Meanwhile nothing is on any device, and
    an order is answered so."""

    def prepare(coordinator):
        async def step():
            await half_of_a_step(coordinator)
            kill(rank)
            trainer = coordinator.trainer
            await until(lambda: trainer._state is TrainerState.DOWN and trainer.devices.are_away)
            assert not trainer.devices.has_devices
            if is_asked:
                await coordinator.park()
                coordinator.give(1, HALF)
            coordinator.trainer.handle(coordinator.shards(1)[0])  # before it knows of their death
            await turns()
            assert coordinator.num_hellos == 1
            assert caplog.text.count("they start when their devices are given back") == 1
            assert "starting again" not in caplog.text
            coordinator.give(1, BOTH)

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert found.num_hellos == 2
    assert len(found.digests) == STEPS + 1
    assert found.parked.count(1) == is_asked


@pytest.mark.usefixtures("warm_emulated")
def test_a_rank_that_dies_while_it_is_asked_for_half_of_the_devices_answers_by_that(
    new_config, groups, tmp_path
):
    def prepare(coordinator):
        async def step():
            await half_of_a_step(coordinator)
            kill(1, signal.SIGSTOP)
            coordinator.number += 1
            coordinator.trainer.handle(SetDevices("trainer", coordinator.number, False))
            await turns()
            assert 1 not in coordinator.parked
            kill(1)
            await until(lambda: 1 in coordinator.parked)
            assert coordinator.num_hellos == 1
            coordinator.give(1, BOTH)

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert found.num_hellos == 2


@pytest.mark.usefixtures("warm_emulated")
def test_a_trainer_that_is_to_stop_waits_for_the_devices_of_a_step_that_has_come(
    new_config, groups, tmp_path
):
    def prepare(coordinator):
        async def step():
            await half_of_a_step(coordinator)
            coordinator.trainer.stop()
            await turns()
            coordinator.give(1, BOTH)

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert sorted(found.digests) == [0, 1, 2]


@pytest.fixture
def node(new_config):
    sent = []
    made = NodeDevices(new_config(), sent.append)
    return made, sent


def park(node):
    for rank in range(2):
        node.on_event(rank, Done(0, suspended=Suspended(100, 0.5)))


def test_who_may_work(node):
    devices, sent = node
    devices.starting(4)
    park(devices)
    devices.published()
    devices.on_message(SHARD)
    assert not devices.is_given
    devices.give(SetDevices("trainer", 3, True, BOTH))
    assert not devices.is_given
    devices.give(SetDevices("trainer", 4, True, HALF))
    assert devices.is_given
    assert not devices.all_given
    assert [devices.is_given_to(k) for k in BOTH] == [False, True]
    devices.on_command(Accumulate(4, ()))
    devices.ask(1, ends_first=True)  # it cannot end
    assert not devices.is_given
    park(devices)
    assert sent == [DevicesReleased("trainer", 1, 200, sent[0].seconds)]
    devices.give(SetDevices("trainer", 4, True, BOTH))
    assert devices.all_given
    devices.on_command(Update(4, 1, 1, 5))
    devices.give(SetDevices("trainer", 4, True, BOTH))  # it was on its way
    assert not devices.is_given
    devices.give(SetDevices("trainer", 5, True, HALF))
    devices.forget_orders()
    assert not devices.is_given


def test_whose_ranks_are_lost_says_so_only_while_they_have_to_wait(node):
    devices, sent = node
    devices.starting(0)
    devices.lost()
    assert devices.has_devices  # no version was announced: they restart immediately
    park(devices)
    devices.published()
    devices.give(SetDevices("trainer", 0, True, BOTH))
    devices.on_command(Accumulate(0, ()))
    devices.ask(1, ends_first=True)
    devices.lost()
    assert devices.has_devices
    assert sent == []
    devices.forget_orders()
    devices.give(SetDevices("trainer", 0, True, HALF))
    devices.ask(2)
    devices.lost()
    assert not devices.has_devices
    assert devices.are_away
    assert [m.number for m in sent] == [2]
    devices.ask(3)
    assert [m.number for m in sent] == [2, 3]


def test_of_devices_that_change_sides_as_a_whole_work_says_all(new_config):
    devices = NodeDevices(new_config(replicas=1), lambda _: None)
    devices.on_message(SHARD)
    assert devices.all_given
    assert devices.is_given_to(1)
