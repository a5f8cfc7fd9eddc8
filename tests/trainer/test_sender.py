"""Real ranks: rank 0 sends what they have published to a broadcast group, and outlives its end."""

import asyncio
import secrets
import threading
import time
from dataclasses import replace

import pytest
import torch

from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.trainer.protocol import (
    EMULATED_TARGET,
    Done,
    LeaveBroadcast,
    OpenGroup,
    SendWeights,
)
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.membership import UNWANTED, Membership
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.manifest import read_manifest
from lightrl.weights.version.tensors import read_tensors
from tests.trainer.test_rank import DEADLINE_S, started, step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


async def replies(ranks):
    async with asyncio.timeout(DEADLINE_S):
        return [await rank.receive() for rank in ranks]


async def opened(rank, timeout_s=20.0):
    """The receiver's place in a new group of two."""
    place = BroadcastGroup(secrets.token_hex(16), "", 0, 2, "gloo")
    rank.send(OpenGroup("127.0.0.1", Membership(place, timeout_s)))
    [answer] = await replies([rank])
    assert isinstance(answer, Done)
    return Membership(replace(place, address=answer.address, rank=1), timeout_s)


async def sent(rank, file, place, group=None):
    """The group, which forms if there is none, after one version went through it as it should."""
    rank.send(SendWeights(file, place.group.name))
    if group is None:
        group = await asyncio.to_thread(form, place, "cpu")
    manifest = read_manifest(file)
    got = await asyncio.to_thread(lambda: dict(receive(group, manifest)))
    [answer] = await replies([rank])
    assert answer.error is None
    expected = dict(read_tensors(file))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    return group


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_sends_each_version_and_trains_on_when_the_group_is_over(start, processes, samples):
    async def run():
        async with processes(start(), 2) as ranks:
            file = (await started(ranks))[0].published.file
            place = await opened(ranks[0], timeout_s=2.0)
            group = await sent(ranks[0], file, place)
            file = (await step(ranks, samples, 0))[0].file
            await sent(ranks[0], file, place, group)
            group.abort("the engine has ended")
            ranks[0].send(SendWeights(file, "another"))
            [failed] = await replies(ranks[:1])
            assert failed.error == "broadcast: not a member of this group"
            file = (await step(ranks, samples, 1))[0].file
            place = await opened(ranks[0])  # another group
            (await sent(ranks[0], file, place)).abort("over")

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() <= before + 4  # of groups that end


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_leaves_a_group_that_forms_or_is_sent_to_soon(start, processes, samples):
    async def run():
        async with processes(start(), 2) as ranks:
            file = (await started(ranks))[0].published.file
            began = time.monotonic()
            place = await opened(ranks[0], timeout_s=200.0)
            ranks[0].send(SendWeights(file, place.group.name))
            ranks[0].send(LeaveBroadcast())
            assert await replies(ranks[:1]) == [Done(0, f"broadcast: {UNWANTED}")]
            place = await opened(ranks[0], timeout_s=200.0)
            ranks[0].send(SendWeights(file, place.group.name))
            group = await asyncio.to_thread(form, place, "cpu")  # and receives nothing
            ranks[0].send(LeaveBroadcast())
            assert await replies(ranks[:1]) == [Done(0, f"broadcast: {UNWANTED}")]
            group.abort("over")
            assert time.monotonic() < began + 60
            file = (await step(ranks, samples, 0))[0].file
            place = await opened(ranks[0])
            (await sent(ranks[0], file, place)).abort("over")

    asyncio.run(run())


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_without_the_file_to_send_goes_on_training(start, processes, samples):
    async def run():
        async with processes(start(), 2) as ranks:
            file = (await started(ranks))[0].published.file
            place = await opened(ranks[0])
            group = await sent(ranks[0], file, place)
            ranks[0].send(SendWeights(replace(file, path="/nowhere"), place.group.name))
            [failed] = await replies(ranks[:1])
            assert "cannot be mapped" in failed.error
            group.abort("over")
            file = (await step(ranks, samples, 0))[0].file
            place = await opened(ranks[0])
            (await sent(ranks[0], file, place)).abort("over")

    asyncio.run(run())


@pytest.mark.usefixtures("warm_emulated")
def test_emulated_ranks_say_that_they_have_nothing_to_send(start, processes):
    async def run():
        async with processes(
            start(rollout={"engine": "emulated"}, train={"engine": "emulated"}), 1, EMULATED_TARGET
        ) as ranks:
            await started(ranks)
            place = BroadcastGroup("g", "", 0, 2, "gloo")
            ranks[0].send(OpenGroup("127.0.0.1", Membership(place, 20.0)))
            [answer] = await replies(ranks)
            assert answer.error is not None

    asyncio.run(run())
