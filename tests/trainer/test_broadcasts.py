"""A trainer's ranks in broadcast groups: real ranks, a receiver that is a process of its own, and a
scripted coordinator that gives the orders."""

import asyncio
import contextlib
import hashlib
import logging
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightrl.config.run_file import parse_config
from lightrl.errors import WeightsError
from lightrl.messages.broadcasts import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastOpened,
    BroadcastSums,
    JoinBroadcast,
    OpenBroadcast,
    SendBroadcast,
    VersionTaken,
)
from lightrl.messages.training import Checkpointed
from lightrl.messages.weights import PublishWeights
from lightrl.system.addresses import split_address
from lightrl.trainer import broadcasts
from lightrl.weights.broadcast.rendezvous import Membership, Unreachable, reach
from lightrl.weights.version.manifest import VersionFile
from tests.support.tiers import e2e
from tests.support.trainer_coordinator import DEADLINE_S, Coordinator, kill, turns, until
from tests.trainer.broadcast_receiver import receiver

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("warm_ranks"),
]


@pytest.fixture
def new_config(model_dir):
    def make(steps, ranks=1, timeout_s=20.0, mode="auto", **checkpoint):
        return parse_config(
            {
                "model": {"path": str(model_dir), "dtype": "bfloat16"},
                "data": {"path": "unused", "max_prompt_length": 8},
                "rollout": {"max_response_length": 32},
                "train": {
                    "steps": steps,
                    "ranks": ranks,
                    "max_tokens_per_gpu": 40,
                    "optim": {"lr": 1e-6},  # so that differences are small
                },
                "weights": {"broadcast": mode, "timeout_s": timeout_s},
                "checkpoint": checkpoint or {"interval": 0},
            }
        )

    return make


class Orders:
    """What a coordinator says of broadcasts, and what a trainer answers."""

    def __init__(self, coordinator, stack):
        self.coordinator = coordinator
        self.stack = stack
        self.num_ranks = coordinator.config.train.ranks
        self.timeout_s = coordinator.config.weights.timeout_s
        self._seen = set()

    def tell(self, message):
        self.coordinator.trainer.handle(message)

    async def answer(self, *kinds):
        """The next of these that was not returned before."""
        sent = self.coordinator.sent

        def find():
            fresh = (i for i in range(len(sent)) if i not in self._seen)
            return next((i for i in fresh if isinstance(sent[i], kinds)), None)

        await until(lambda: find() is not None)
        self._seen.add(found := find())
        return sent[found]


async def opened_by(orders, epoch=1):
    orders.tell(OpenBroadcast(epoch))
    return await orders.answer(BroadcastOpened)


async def formed(orders, epoch=1):
    """A group of the ranks and one receiver: its name, the receiver's process and pipe."""
    opened = await opened_by(orders, epoch)
    assert (opened.epoch, opened.reason) == (epoch, "")
    num_ranks = orders.num_ranks
    sizes = (num_ranks, num_ranks + 1)
    orders.tell(JoinBroadcast(opened.group, opened.address, 0, *sizes, "gloo"))
    place = Membership(opened.group, num_ranks, *sizes, "gloo", orders.timeout_s)
    process, pipe = orders.stack.enter_context(receiver(split_address(opened.address), place))
    assert await said(pipe) == "formed"
    assert await orders.answer(BroadcastJoined, BroadcastFailed) == BroadcastJoined(opened.group)
    return opened.group, process, pipe


async def said(pipe):
    def take():
        assert pipe.poll(DEADLINE_S)
        return pipe.recv()

    return await asyncio.to_thread(take)


def file_of(coordinator, version):
    """The version as it lies, and a digest of its bytes."""
    published = [m for m in coordinator.sent if isinstance(m, PublishWeights)]
    message = next(m for m in published if m.policy_version == version)
    [path] = coordinator.published.glob(f"version_{version}.*.bin")
    manifest = path.with_suffix(".manifest")
    return VersionFile(version, message.digest, message.num_bytes, str(path), str(manifest))


def digest_of(file):
    return hashlib.sha256(Path(file.path).read_bytes()).hexdigest()


async def sent(orders, group, pipe, version):
    """Sends this version; asserts that it came as it lies in its file."""
    file = file_of(orders.coordinator, version)
    orders.tell(SendBroadcast(group, version))
    pipe.send(file)
    sums, digest = await said(pipe)
    assert await orders.answer(BroadcastSums, BroadcastFailed) == BroadcastSums(
        group, version, sums
    )
    assert digest == digest_of(file)


def run(coordinator_of, script):
    """A trainer with this script of what is said to it, to its end."""

    async def main():
        with contextlib.ExitStack() as stack:
            coordinator = coordinator_of()
            coordinator.says_taken = False
            orders = Orders(coordinator, stack)
            script(coordinator, orders)
            await coordinator.run_and_close()
            return coordinator

    return asyncio.run(main())


def kinds_of(coordinator):
    return [type(m) for m in coordinator.sent]


@pytest.mark.parametrize("ranks", [2, *e2e([1])])
def test_versions_are_sent_before_checkpoint_and_difference(
    new_config, groups, tmp_path, ranks, monkeypatch
):
    monkeypatch.setattr(broadcasts, "TAKEN_S", DEADLINE_S)  # a busy machine says it late
    config = new_config(4, ranks, interval=1)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            coordinator.group = await formed(orders)
            name, _, pipe = coordinator.group
            await sent(orders, name, pipe, 1)
            assert Checkpointed not in kinds_of(coordinator)
            coordinator.feed(1)

        async def second():
            orders.tell(VersionTaken(2, broadcasts=True, wants_delta=True))
            name, _, pipe = coordinator.group
            await sent(orders, name, pipe, 2)
            coordinator.feed(2)

        async def third():
            orders.tell(VersionTaken(3, broadcasts=False, wants_delta=False))
            coordinator.feed(3)

        coordinator.on |= {("published", 1): first, ("published", 2): second}
        coordinator.on["published", 3] = third

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    said = coordinator.sent
    with_deltas = [m.policy_version for m in said if isinstance(m, PublishWeights) and m.deltas]
    assert with_deltas == [2]
    kinds = kinds_of(coordinator)
    assert kinds.count(BroadcastSums) == 2
    at = [i for i, kind in enumerate(kinds) if kind is BroadcastSums]
    saved = [i for i, kind in enumerate(kinds) if kind is Checkpointed]
    assert at[0] < saved[0]
    assert at[1] < saved[1]  # the one before may be written meanwhile
    assert said[-1].step == 4


@pytest.mark.e2e
def test_a_member_that_never_comes_costs_the_time_limit(new_config, groups, tmp_path):
    config = new_config(2, timeout_s=2.0)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            opened = await opened_by(orders)
            began = time.monotonic()
            orders.tell(JoinBroadcast(opened.group, opened.address, 0, 1, 2, "gloo"))
            failed = await orders.answer(BroadcastFailed)
            assert failed.group == opened.group
            assert failed.reason == "members [1] of 2 did not come"
            assert time.monotonic() < began + 4.0
            orders.tell(VersionTaken(1, broadcasts=False, wants_delta=True))
            coordinator.feed(1)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    said = coordinator.sent
    assert [m.policy_version for m in said if isinstance(m, PublishWeights) and m.deltas] == [1]
    assert coordinator.num_hellos == 1


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["the coordinator says so", "the coordinator is gone", "stop"])
def test_a_group_that_will_not_form_is_not_waited_for(new_config, groups, tmp_path, how):
    config = new_config(2, timeout_s=200.0)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            opened = await opened_by(orders)
            orders.tell(JoinBroadcast(opened.group, opened.address, 0, 1, 2, "gloo"))
            await turns()
            if how == "stop":
                coordinator.trainer.stop()
            elif how == "the coordinator is gone":
                coordinator.trainer.pause()
                coordinator.says_taken = True
                coordinator.rejoin()
            else:
                orders.tell(VersionTaken(1, broadcasts=False, wants_delta=False))
                failed = await orders.answer(BroadcastFailed)
                assert failed.reason == "it is not wanted any more"
                coordinator.feed(1)

        coordinator.on["published", 1] = first

    began = time.monotonic()
    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert time.monotonic() < began + 100
    assert coordinator.num_hellos == 1
    assert coordinator.sent[-1].step == (1 if how == "stop" else 2)


@pytest.mark.e2e
def test_a_version_of_which_the_coordinator_says_nothing_costs_a_second(
    new_config,
    groups,
    tmp_path,
):
    config = new_config(3)
    began, took = [], []

    def script(coordinator, orders):
        def done():
            began.append(time.monotonic())
            coordinator.spawn(delta())

        async def delta():
            await until(
                lambda: any(isinstance(m, PublishWeights) and m.deltas for m in coordinator.sent)
            )
            took.append(time.monotonic() - began[0])

        coordinator.on["done", 0] = done

    run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert 0.95 < took[0] < 10


@pytest.mark.e2e
def test_an_idle_trainer_sends_its_first_version(new_config, groups, tmp_path):
    config = new_config(1)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(0, broadcasts=True, wants_delta=False))
            name, _, pipe = await formed(orders)
            await sent(orders, name, pipe, 0)
            orders.tell(SendBroadcast("of another run", 0))
            failed = await orders.answer(BroadcastFailed)
            assert failed.group == "of another run"
            orders.tell(SendBroadcast(name, 7))
            failed = await orders.answer(BroadcastFailed)
            assert failed.reason == "version 7 is not the newest, which is 0"
            coordinator.feed(0)

        coordinator.on["published", 0] = first

    run(lambda: Coordinator(config, tmp_path / "run", groups), script)


@pytest.mark.e2e
def test_a_coordinator_that_goes_is_not_waited_for_and_a_new_group_forms(
    new_config,
    groups,
    tmp_path,
):
    """While it forms, and while the first version after that is awaited."""
    config = new_config(2, timeout_s=60.0)

    def script(coordinator, orders):
        async def first():
            began = time.monotonic()
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            await opened_by(orders)
            coordinator.trainer.pause()
            orders.tell(OpenBroadcast(2))  # nobody hears it
            coordinator.on["published", 1] = again
            coordinator.rejoin()
            assert time.monotonic() < began + 30

        async def again():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            name, _, pipe = await formed(orders, epoch=1)
            await sent(orders, name, pipe, 1)
            coordinator.feed(1)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert kinds_of(coordinator).count(BroadcastOpened) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, *e2e([signal.SIGSTOP])])
def test_a_rank_that_dies_or_hangs_while_it_sends_is_started_again(
    new_config,
    groups,
    tmp_path,
    number,
):
    config = new_config(2, ranks=2, timeout_s=3.0)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            name, _, pipe = await formed(orders)
            pipe.send(file_of(coordinator, 1))
            kill(1, number)
            orders.tell(SendBroadcast(name, 1))
            assert "broadcast" in await said(pipe)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert coordinator.num_hellos == 2
    assert BroadcastSums not in kinds_of(coordinator)


@pytest.mark.e2e
def test_a_trainer_that_is_to_stop_waits_for_no_order(new_config, groups, tmp_path):
    config = new_config(3, timeout_s=60.0)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            await opened_by(orders)
            coordinator.trainer.stop()

        coordinator.on["published", 1] = first

    began = time.monotonic()
    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert time.monotonic() < began + 60
    assert coordinator.sent[-1] == Checkpointed(1, 0)


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["the coordinator says so", "the coordinator is gone", "stop"])
def test_a_send_that_is_over_is_given_up_at_once(
    new_config,
    groups,
    tmp_path,
    caplog,
    how,
):
    """Though a receiver that does not take part yet could do so for a long time."""
    config = new_config(2, ranks=2, timeout_s=200.0)
    taken = []

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            name, _, pipe = await formed(orders)
            began = time.monotonic()
            orders.tell(SendBroadcast(name, 1))
            await turns()
            if how == "stop":
                coordinator.trainer.stop()
            elif how == "the coordinator is gone":
                coordinator.trainer.pause()
            else:
                orders.tell(VersionTaken(1, broadcasts=False, wants_delta=False))
            await until(lambda: "no broadcast: " in caplog.text)  # the ranks have left
            pipe.send(file_of(coordinator, 1))
            assert "broadcast: " in await said(pipe)
            taken.append(time.monotonic() - began)
            if how == "the coordinator is gone":
                coordinator.says_taken = True
                coordinator.rejoin()
            elif how != "stop":
                coordinator.feed(1)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert taken[0] < 30
    assert coordinator.num_hellos == 1
    assert BroadcastSums not in kinds_of(coordinator)
    failed = [m.reason for m in coordinator.sent if isinstance(m, BroadcastFailed)]
    reasons = {
        "the coordinator says so": ["it is not wanted any more"],
        "stop": ["the trainer ends"],
    }
    assert failed == reasons.get(how, [])  # who is gone hears nothing
    assert coordinator.sent[-1].step == (1 if how == "stop" else 2)


@pytest.mark.e2e
def test_orders_that_a_trainer_is_given_as_it_ends_are_refused(new_config, groups, tmp_path):
    config = new_config(3, timeout_s=60.0)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            orders.tell(SendBroadcast("waits", 1))
            coordinator.trainer.stop()
            orders.tell(JoinBroadcast("comes late", "10.0.0.1:1", 0, 1, 2, "gloo"))
            orders.tell(OpenBroadcast(7))

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    why = "the trainer ends"
    refused = [m for m in coordinator.sent if isinstance(m, BroadcastFailed | BroadcastOpened)]
    assert refused == [
        BroadcastFailed("waits", why),
        BroadcastFailed("comes late", why),
        BroadcastOpened(7, "", "", why),
    ]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "how", ["the coordinator says so", "the coordinator is gone", "a wrong number of ranks"]
)
def test_a_rendezvous_that_nobody_will_join_is_closed(new_config, groups, tmp_path, how):
    config = new_config(2, timeout_s=200.0)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            opened = await opened_by(orders)
            address, deadline = split_address(opened.address), time.monotonic() + 20
            place = Membership(opened.group, 1, 1, 3, "gloo", 200.0)
            line = await asyncio.to_thread(reach, address, place, deadline)
            if how == "the coordinator is gone":
                coordinator.trainer.pause()
            elif how == "a wrong number of ranks":
                orders.tell(JoinBroadcast(opened.group, opened.address, 0, 2, 3, "gloo"))
                failed = await orders.answer(BroadcastFailed)
                assert failed == BroadcastFailed(opened.group, "2 ranks of 3, not 1")
            else:
                orders.tell(VersionTaken(1, broadcasts=False, wants_delta=False))
            with pytest.raises(WeightsError, match="member 0 is gone"):
                await asyncio.to_thread(line.expect, deadline)
            with pytest.raises(Unreachable):
                await asyncio.to_thread(reach, address, replace(place, rank=2), deadline)
            if how == "the coordinator is gone":
                coordinator.says_taken = True
                coordinator.rejoin()
            else:
                orders.tell(VersionTaken(1, broadcasts=False, wants_delta=False))
                coordinator.feed(1)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert coordinator.sent[-1].step == 2


@pytest.mark.e2e
def test_a_rank_that_is_late_ends_the_group_and_not_itself(
    new_config,
    groups,
    tmp_path,
    caplog,
):
    """It stands still until after the time limit of a send, and then goes on."""
    config = new_config(2, ranks=2, timeout_s=6.0)
    caplog.set_level(logging.INFO)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            name, _, pipe = await formed(orders)
            pipe.send(file_of(coordinator, 1))
            kill(0, signal.SIGSTOP)
            orders.tell(SendBroadcast(name, 1))
            assert "broadcast: " in await said(pipe)
            await until(lambda: "told to leave" in caplog.text or coordinator.num_hellos > 1)
            kill(0, signal.SIGCONT)
            failed = await orders.answer(BroadcastFailed)
            assert failed.group == name
            assert failed.reason.startswith("no WeightsSent within 12")
            orders.tell(OpenBroadcast(2))  # nobody is in the way of another group
            assert (await orders.answer(BroadcastOpened)).reason == ""
            orders.tell(VersionTaken(1, broadcasts=False, wants_delta=False))
            coordinator.feed(1)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert coordinator.num_hellos == 1


@pytest.mark.e2e
def test_a_word_that_is_said_again_ends_nothing(new_config, groups, tmp_path):
    config = new_config(2, timeout_s=60.0)

    def script(coordinator, orders):
        async def first():
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=False))
            orders.tell(OpenBroadcast(7))
            orders.tell(VersionTaken(1, broadcasts=True, wants_delta=True))
            assert (await orders.answer(BroadcastOpened)).epoch == 7
            name, _, pipe = await formed(orders)
            await sent(orders, name, pipe, 1)
            coordinator.feed(1)

        coordinator.on["published", 1] = first

    run(lambda: Coordinator(config, tmp_path / "run", groups), script)
