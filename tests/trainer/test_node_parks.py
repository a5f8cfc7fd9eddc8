"""A trainer node whose devices are shared, with emulated ranks and a scripted coordinator: when it
parks, what it answers, and that nothing else changes."""

import asyncio
import signal
from functools import partial

import pytest

from lightrl.config.run_file import parse_config
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.trainers import TrainerRelay
from lightrl.messages.training import ShardsTaken, StepDone
from lightrl.messages.weights import PublishWeights
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.node import FollowerNode
from lightrl.trainer.protocol import Accumulate, Done, RankStarted, ResetStep, Suspended, Update
from lightrl.trainer.rank_processes import Place
from lightrl.trainer.state import TrainerState
from tests.support.trainer_coordinator import Coordinator, kill, pid_of, turns, until

pytestmark = pytest.mark.usefixtures("warm_emulated")

STEPS = 3
PARKED_MB = 0.25


@pytest.fixture
def new_config(model_dir):
    def make(placement="shared", engine_args=None, deterministic=True, **train):
        return parse_config(
            {
                "run": {"deterministic": deterministic},
                "model": {"path": str(model_dir)},
                "data": {"path": "unused"},
                "rollout": {
                    "engine": "emulated",
                    "placement": placement,
                    "engine_args": {"parked_mb": PARKED_MB} | (engine_args or {}),
                },
                "train": {"engine": "emulated", "steps": STEPS, "max_tokens_per_gpu": 40} | train,
                "checkpoint": {"interval": 1},
            }
        )

    return make


class Asking(Coordinator):
    """One that asks for the devices in the middle of steps."""

    def __init__(self, *args):
        super().__init__(*args)
        self.number = 0
        self.taken_for_away = set()  # at each message

    def take(self, message):
        if self.trainer.devices.are_away:
            self.taken_for_away.add(type(message))
        super().take(message)

    @property
    def parked(self):
        return [m for m in self.sent if isinstance(m, DevicesReleased)]

    def ask(self):
        self.number += 1
        self.trainer.handle(SetDevices("trainer", self.number, False))

    async def park(self):
        """Has it park, and sees that it stays so."""
        self.ask()
        await until(lambda: any(m.number == self.number for m in self.parked))
        await turns()
        assert not self.trainer.devices.has_devices

    async def give(self, shard):
        self.hand_over(shard)
        await until(lambda: ShardsTaken(shard.step, shard.index) in self.sent)

    async def step_parked_everywhere(self, step):
        for shard in self.shards(step):
            await self.park()
            await self.give(shard)


def trained(config, folder, groups, prepare=lambda coordinator: None):
    async def run():
        coordinator = Asking(config, folder, groups)
        prepare(coordinator)
        await coordinator.run_and_close()
        return coordinator

    return asyncio.run(run())


def before(sent, kind, version):
    """The last message before that of this version."""
    i = next(i for i, m in enumerate(sent) if isinstance(m, kind) and m.policy_version == version)
    return sent[i - 1]


@pytest.fixture
def calm(new_config, groups, tmp_path):
    """Versions of a trainer with devices of its own."""

    def run(**train):
        coordinator = trained(new_config("own", **train), tmp_path / "calm", groups)
        assert not coordinator.parked
        return coordinator.digests

    return run


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_parked_between_all_shards_makes_the_same_versions(
    new_config, groups, tmp_path, calm, ranks
):
    def prepare(coordinator):
        step = coordinator.step_parked_everywhere
        coordinator.on["published", 1] = partial(step, 1)

    config = new_config(ranks=ranks, engine_args={"park_ms": 2.0, "fetch_ms": 1.0})
    found = trained(config, tmp_path / "run", groups, prepare)
    assert found.digests == calm(ranks=ranks)
    assert [m.number for m in found.parked] == [0, 0, *range(1, found.number + 1), 0, 0]
    assert {m.num_bytes for m in found.parked} == {int(PARKED_MB * 1e6) * ranks}
    for version in range(STEPS + 1):
        last = before(found.sent, PublishWeights, version)
        assert last.number == 0
        assert last.seconds == 0.002
    assert found.trainer.devices.has_devices is False
    # Before its version is announced no engine has them: ranks that die then start immediately.
    assert not {PublishWeights, ShardsTaken} & found.taken_for_away
    assert StepDone in found.taken_for_away


def test_it_parks_in_the_middle_of_what_has_come_and_goes_on_when_more_does(
    new_config, groups, tmp_path, calm
):
    def prepare(coordinator):
        async def step():
            first, second, *others = coordinator.shards(1, (1, 5, 2))
            await coordinator.give(first)
            step = coordinator.trainer._step
            await until(lambda: step.queue.portions and not step.is_busy)
            kill(number=signal.SIGSTOP)
            await coordinator.give(second)
            coordinator.ask()
            await turns()
            assert not any(m.number for m in coordinator.parked)  # it is not done yet
            kill(number=signal.SIGCONT)
            await until(lambda: any(m.number == 1 for m in coordinator.parked))
            await coordinator.park()  # once more
            assert step.can_advance is False  # though there is more
            assert step.queue.held
            for shard in others:
                await coordinator.give(shard)

        coordinator.on["published", 1] = step

    assert trained(new_config(), tmp_path / "run", groups, prepare).digests == calm()


def test_a_step_of_which_all_has_come_ends_before_it_parks(new_config, groups, tmp_path, calm):
    def prepare(coordinator):
        async def step():
            kill(number=signal.SIGSTOP)
            for shard in coordinator.shards(1):
                coordinator.trainer.handle(shard)
            coordinator.ask()
            await turns()
            kill(number=signal.SIGCONT)

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert found.digests == calm()
    assert [m.number for m in found.parked] == [0, 0, 1, 0, 0]


def test_a_replica_does_not_wait_for_one_with_much_before_it(new_config, groups, tmp_path):
    """Each gets little at a time, so that it can park; that delays no other."""

    def prepare(coordinator):
        async def step():
            for shard in coordinator.shards(1, (1,) * 8):
                await coordinator.give(shard)
                if shard.index == 0:  # what follows on a version is over
                    kill(number=signal.SIGSTOP)
                if shard.index == 6:
                    kill(number=signal.SIGCONT)

        coordinator.on["published", 1] = step

    config = new_config(deterministic=False, ranks=2, replicas=2, max_tokens_per_gpu=8)
    found = trained(config, tmp_path / "run", groups, prepare)
    assert found.replicas[2].count(1) >= 5


@pytest.mark.parametrize("is_parked", [True, False], ids=["parked", "half parked"])
def test_ranks_that_die_without_their_devices_start_when_they_are_given_back(
    new_config, groups, tmp_path, caplog, calm, is_parked
):
    """Those that die with them start immediately, and were not reported as parked."""

    def prepare(coordinator):
        async def step():
            first, *_ = coordinator.shards(1)
            await coordinator.give(first)
            if is_parked:
                await coordinator.park()
            else:
                kill(number=signal.SIGSTOP)
                coordinator.ask()
                await turns()
            kill()
            await until(lambda: coordinator.trainer._state is TrainerState.DOWN)
            await until(lambda: pid_of(0) is None) if is_parked else None
            await turns()
            devices = coordinator.trainer.devices
            assert devices.has_devices is not is_parked
            if is_parked:
                assert "they start when their devices are given back" in caplog.text
                assert "starting again" not in caplog.text
                assert coordinator.num_hellos == 1
                coordinator.trainer.handle(first)  # of whoever does not know that they died

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert found.num_hellos == 2
    assert found.digests == calm()
    assert [m.number for m in found.parked if m.number] == ([1] if is_parked else [])


def test_a_coordinator_that_is_back_begins_a_parked_step_anew(new_config, groups, tmp_path, calm):
    def prepare(coordinator):
        async def step():
            await coordinator.give(coordinator.shards(1)[0])
            await coordinator.park()
            coordinator.trainer.pause()
            coordinator.sent.append("welcomed")
            coordinator.rejoin()  # which feeds it the step again

        coordinator.on["published", 1] = step

    found = trained(new_config(), tmp_path / "run", groups, prepare)
    assert found.digests == calm()
    welcomed = found.sent.index("welcomed")
    assert found.sent[welcomed + 1].number == 0  # sent again before the version


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


@pytest.fixture
def devices(new_config):
    sent, clock = [], Clock()
    made = NodeDevices(new_config(ranks=2), sent.append, clock=clock)
    return made, sent, clock


def park(devices):
    for rank in range(2):
        devices.on_event(rank, Done(0, suspended=Suspended(100 + rank, 0.5 + rank)))


def test_an_order_is_answered_once_and_only_when_all_ranks_have_parked(devices):
    node, sent, clock = devices
    node.on_event(0, RankStarted("cpu", 1.0, suspended=Suspended(1, 0.1)))
    assert node.has_devices
    node.on_event(1, RankStarted("cpu", 1.0, suspended=Suspended(2, 0.3)))
    assert not node.has_devices
    assert sent == []
    node.announce()
    assert sent == [DevicesReleased("trainer", 0, 3, 0.3)]
    node.on_command(ResetStep(0))
    assert not node.has_devices
    node.on_command(Accumulate(0, ()))
    assert node.has_devices
    node.ask(4)
    assert node.is_asked
    clock.now += 2.5
    node.on_event(1, Done(0, suspended=Suspended(101, 1.5)))
    assert sent[1:] == []
    node.on_event(0, Done(0, suspended=Suspended(100, 0.5)))
    assert sent[1:] == [DevicesReleased("trainer", 4, 201, 2.5)]
    assert not node.is_asked
    node.ask(4)  # again: it is still true
    node.ask(3)  # late
    assert sent[2:] == [DevicesReleased("trainer", 4, 201, 0.0)]
    node.on_command(Update(0, 1, 1, 1))
    node.ask(4)  # no longer
    assert not node.is_asked
    node.ask(5)
    park(node)
    node.announce()
    assert sent[3:] == [
        DevicesReleased("trainer", 5, 201, 0.0),
        DevicesReleased("trainer", 0, 201, 1.5),
    ]


def test_who_has_the_devices(devices):
    node, sent, _ = devices
    assert node.has_devices
    node.give()
    node.starting()
    assert not node.is_given
    park(node)
    node.published()
    assert node.are_away
    node.give()
    assert not node.are_away
    node.ask(1, ends_first=True)  # its step has come, but has not begun
    assert sent == []
    node.on_command(Accumulate(0, ()))
    node.on_command(Update(0, 1, 1, 1))
    park(node)
    assert [m.number for m in sent] == [1]
    node.published()
    assert node.are_away
    node.forget_orders()
    node.ask(1)
    assert [m.number for m in sent] == [1, 1]


def test_no_engine_has_the_devices_until_a_version_is_announced(devices):
    """For which engines wake. No shard would come for ranks that die before: they restart."""
    node, sent, _ = devices
    for begins in (node.starting, lambda: node.on_command(Update(0, 1, 1, 1))):
        begins()
        park(node)
        node.announce()
        assert sent.pop().number == 0
        assert not node.has_devices
        assert not node.are_away
        node.published()
        assert node.are_away
        node.give()
        node.on_command(Accumulate(0, ()))


def test_devices_of_its_own_are_never_given_back(new_config):
    sent = []
    node = NodeDevices(new_config("own"), sent.append)
    node.ask(1)
    node.on_command(Update(0, 1, 1, 1))
    node.announce()
    assert node.has_devices
    assert node.is_given
    assert not node.is_asked
    assert sent == []


def test_a_node_that_follows_answers_for_its_own_ranks(new_config, groups, tmp_path, calm):
    """Each node gets its order, sooner or later than the one that leads."""
    config = new_config(nodes=2)
    folder = tmp_path / "run"
    sent = []  # by the follower

    async def run():
        coordinator = Asking(config, folder, groups)
        leader = coordinator.trainer

        def to_leader(message):
            leader.followers.receive(TrainerRelay("follower", message.frame))

        follower = FollowerNode(config, Place(folder, folder), to_leader, sent.append)
        leader.followers._send = lambda m: follower.receive(TrainerRelay("leader", m.frame))
        leader.followers.set_members((("follower", 1),))

        def numbers():
            return [m.number for m in sent]

        async def step():
            first, second, third, *others = coordinator.shards(1)
            await coordinator.give(first)
            follower.devices.ask(1)
            await turns()
            assert 1 not in numbers()  # the leader orders it
            await coordinator.park()
            await until(lambda: 1 in numbers())
            assert not follower.devices.has_devices
            await coordinator.give(second)
            await until(lambda: follower.devices.has_devices)
            await coordinator.park()
            await until(lambda: not follower.devices.has_devices)
            assert 2 not in numbers()
            follower.devices.ask(2)
            assert numbers()[-1] == 2
            for shard in (third, *others):
                await coordinator.give(shard)

        coordinator.on["published", 1] = step
        following = asyncio.create_task(follower.run())
        await coordinator.run_and_close()
        follower.stop()
        await following
        return coordinator

    found = asyncio.run(run())
    assert found.digests == calm(ranks=2)
    assert [m.number for m in sent] == [0, 0, 1, 2, 0, 0]
    assert [m.number for m in found.parked] == [0, 0, 1, 2, 0, 0]
    assert {m.num_bytes for m in [*sent, *found.parked]} == {int(PARKED_MB * 1e6)}
