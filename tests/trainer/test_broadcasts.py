"""A trainer that sends its versions to a group: real ranks, a receiver in a process of its own, and
a scripted coordinator that gives the orders."""

import asyncio
import contextlib
import hashlib
import signal
import time
from pathlib import Path

import pytest

from lightrl.config.run_file import parse_config
from lightrl.messages.broadcasts import (
    BroadcastGroup,
    BroadcastOrder,
    BroadcastStatus,
    VersionTaken,
)
from lightrl.messages.training import Checkpointed
from lightrl.messages.weights import PublishWeights
from lightrl.trainer import broadcasts
from lightrl.weights.broadcast.membership import Membership
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
    """The orders of a coordinator, and the trainer's reports."""

    def __init__(self, coordinator, stack):
        self.coordinator = coordinator
        self.stack = stack
        self.timeout_s = coordinator.config.weights.timeout_s
        self._seen = set()

    def order(self, version, group="", wants_delta=False):
        """Send this version, to a new group by default; `group` None: do not, or no more."""
        broadcast = None if group is None else BroadcastOrder(group, 2, "gloo")
        self.coordinator.trainer.handle(VersionTaken(version, wants_delta, broadcast))

    async def status(self):
        """The next report."""
        sent = self.coordinator.sent

        def find():
            fresh = (i for i in range(len(sent)) if i not in self._seen)
            return next((i for i in fresh if isinstance(sent[i], BroadcastStatus)), None)

        await until(lambda: find() is not None)
        self._seen.add(found := find())
        return sent[found]

    async def receiver(self, version):
        """Of a group that the trainer opens: its name, the process and its pipe."""
        self.order(version)
        opened = await self.status()
        assert opened.reason == ""
        place = BroadcastGroup(opened.group, opened.address, 1, 2, "gloo")
        process, pipe = self.stack.enter_context(receiver(Membership(place, self.timeout_s)))
        assert await next_report(pipe) == "formed"
        return opened.group, process, pipe


async def next_report(pipe):
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


async def require_received(orders, pipe, version):
    """It came as it lies in its file, and rank 0 has reported so."""
    file = file_of(orders.coordinator, version)
    pipe.send(file)
    expected = await asyncio.to_thread(Path(file.path).read_bytes)
    assert await next_report(pipe) == hashlib.sha256(expected).hexdigest()
    await until(lambda: orders.coordinator.trainer._broadcasts._over is None)


def run(coordinator_of, script):
    """A trainer with this script of the coordinator, to its end."""

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


def failures(coordinator):
    return [m.reason for m in coordinator.sent if isinstance(m, BroadcastStatus) and m.reason]


@pytest.mark.parametrize("ranks", [2, *e2e([1])])
def test_versions_are_sent_before_checkpoint_and_difference(
    new_config, groups, tmp_path, ranks, monkeypatch
):
    monkeypatch.setattr(broadcasts, "TAKEN_S", DEADLINE_S)  # a busy machine says it late
    config = new_config(4, ranks, interval=1)

    def script(coordinator, orders):
        async def first():
            coordinator.group, _, coordinator.pipe = await orders.receiver(1)
            assert Checkpointed not in kinds_of(coordinator)
            await require_received(orders, coordinator.pipe, 1)
            coordinator.feed(1)

        async def second():
            orders.order(2, coordinator.group, wants_delta=True)
            await require_received(orders, coordinator.pipe, 2)
            coordinator.feed(2)

        async def third():
            orders.order(3, None)
            coordinator.feed(3)

        coordinator.on |= {("published", 1): first, ("published", 2): second}
        coordinator.on["published", 3] = third

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    published = [m for m in coordinator.sent if isinstance(m, PublishWeights)]
    assert [m.policy_version for m in published if m.deltas] == [2]
    assert failures(coordinator) == []
    assert kinds_of(coordinator).count(BroadcastStatus) == 1
    assert coordinator.sent[-1].step == 4


def test_a_member_that_never_comes_costs_the_time_limit(new_config, groups, tmp_path):
    config = new_config(2, timeout_s=2.0)

    def script(coordinator, orders):
        async def first():
            began = time.monotonic()
            orders.order(1)
            opened = await orders.status()
            failed = await orders.status()
            assert (failed.policy_version, failed.group) == (1, opened.group)
            assert failed.reason != ""
            assert time.monotonic() < began + 6.0
            orders.order(1, None, wants_delta=True)
            coordinator.feed(1)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    said = coordinator.sent
    assert [m.policy_version for m in said if isinstance(m, PublishWeights) and m.deltas] == [1]
    assert coordinator.num_hellos == 1


@pytest.mark.e2e
@pytest.mark.parametrize("stage", ["forming", "sending"])
@pytest.mark.parametrize("how", ["the coordinator says so", "the coordinator is gone", "stop"])
def test_a_broadcast_that_is_over_is_given_up_soon(new_config, groups, tmp_path, how, stage):
    """Though members could still come, or receive, for a long time."""
    config = new_config(2, ranks=2, timeout_s=200.0)

    def script(coordinator, orders):
        async def first():
            if stage == "forming":
                orders.order(1)
                await orders.status()
            else:
                await orders.receiver(1)
            await turns()
            if how == "stop":
                coordinator.trainer.stop()
            elif how == "the coordinator is gone":
                coordinator.trainer.pause()
                coordinator.says_taken = True
                coordinator.rejoin()
            else:
                orders.order(1, None)
                coordinator.feed(1)

        coordinator.on["published", 1] = first

    began = time.monotonic()
    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert time.monotonic() < began + 100
    assert coordinator.num_hellos == 1
    reasons = {
        "the coordinator says so": ["it is not wanted any more"],
        "stop": ["the trainer is stopping"],
    }
    assert failures(coordinator) == reasons.get(how, [])
    assert coordinator.sent[-1].step == (1 if how == "stop" else 2)


@pytest.mark.e2e
def test_a_version_of_which_the_coordinator_says_nothing_costs_a_second(
    new_config, groups, tmp_path
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
def test_an_idle_trainer_sends_its_first_version_and_refuses_wrong_orders(
    new_config, groups, tmp_path
):
    config = new_config(1)

    def script(coordinator, orders):
        async def first():
            name, _, pipe = await orders.receiver(0)
            await require_received(orders, pipe, 0)
            orders.order(0, "of another run")
            failed = await orders.status()
            assert (failed.group, failed.reason) == (
                "of another run",
                "not a member of this group",
            )
            orders.order(7, name)
            failed = await orders.status()
            assert failed.reason == "version 7 is not the newest: 0"
            coordinator.feed(0)

        coordinator.on["published", 0] = first

    run(lambda: Coordinator(config, tmp_path / "run", groups), script)


@pytest.mark.parametrize("number", [signal.SIGKILL, *e2e([signal.SIGSTOP])])
def test_a_rank_that_dies_or_hangs_while_it_sends_is_started_again(
    new_config, groups, tmp_path, number
):
    config = new_config(2, ranks=2, timeout_s=3.0)

    def script(coordinator, orders):
        async def first():
            name, _, pipe = await orders.receiver(1)
            await require_received(orders, pipe, 1)
            kill(0, number)
            orders.order(1, name)
            pipe.send(file_of(coordinator, 1))
            assert "broadcast" in await next_report(pipe)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert coordinator.num_hellos == 2


@pytest.mark.e2e
def test_orders_to_a_trainer_that_ends_are_refused(new_config, groups, tmp_path):
    config = new_config(3, timeout_s=60.0)

    def script(coordinator, orders):
        async def first():
            orders.order(1, "waits")
            coordinator.trainer.stop()
            orders.order(2, "comes late")
            orders.order(2)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    why = "the trainer is stopping"
    refused = [m for m in coordinator.sent if isinstance(m, BroadcastStatus)]
    assert refused == [
        BroadcastStatus(1, "waits", reason=why),
        BroadcastStatus(2, "comes late", reason=why),
        BroadcastStatus(2, "", reason=why),
    ]


@pytest.mark.e2e
def test_an_order_that_is_repeated_ends_nothing(new_config, groups, tmp_path):
    config = new_config(2, timeout_s=60.0)

    def script(coordinator, orders):
        async def first():
            orders.order(1)
            orders.order(1, wants_delta=True)
            _, _, pipe = await orders.receiver(1)
            await require_received(orders, pipe, 1)
            coordinator.feed(1)

        coordinator.on["published", 1] = first

    coordinator = run(lambda: Coordinator(config, tmp_path / "run", groups), script)
    assert failures(coordinator) == []
