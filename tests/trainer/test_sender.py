"""Real ranks send what they have published to a broadcast group, and outlive its end."""

import asyncio
import resource
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrl.system.addresses import split_address
from lightrl.trainer.protocol import (
    EMULATED_TARGET,
    GroupOpened,
    LeaveGroup,
    OpenGroup,
    SendWeights,
    WeightsSent,
)
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.proof import Proof, proof_seed
from lightrl.weights.broadcast.rendezvous import UNWANTED, GroupJoined, JoinGroup, Membership
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.manifest import read_manifest
from lightrl.weights.version.tensors import read_tensors
from tests.trainer.test_rank import DEADLINE_S, started, step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


async def replies(ranks):
    async with asyncio.timeout(DEADLINE_S):
        return [await rank.receive() for rank in ranks]


async def joined(ranks, num_receivers=1, piece_bytes=4096, timeout_s=20.0):
    """The group of one receiver, which is here."""
    ranks[0].send(OpenGroup("127.0.0.1"))
    [opened] = await replies(ranks[:1])
    assert isinstance(opened, GroupOpened)
    world = len(ranks) + num_receivers
    place = Membership(secrets.token_hex(16), 0, len(ranks), world, "gloo", timeout_s, piece_bytes)
    for i, rank in enumerate(ranks):
        rank.send(JoinGroup(opened.address, replace(place, rank=i)))
    own = replace(place, rank=len(ranks))
    group = await asyncio.to_thread(form, split_address(opened.address), own, "cpu")
    assert await replies(ranks) == [GroupJoined(place.name)] * len(ranks)
    return place.name, group


def tell_to_send(ranks, file, name):
    for rank in ranks:
        rank.send(SendWeights(file, name))


async def received(ranks, name, group, file):
    """Tensors by name; the sums here and those of the ranks."""
    tell_to_send(ranks, file, name)
    proof = Proof(proof_seed(name, file.policy_version))
    tensors = read_manifest(file).tensors
    got = await asyncio.to_thread(lambda: dict(receive(group, tensors, proof)))
    sent = await replies(ranks)
    assert all(isinstance(s, WeightsSent) and s.error is None for s in sent)
    total = tuple(sum(sums) % (1 << 64) for sums in zip(*(s.sums for s in sent), strict=True))
    return got, proof.sums(), total


@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_send_each_version_and_go_on_when_the_group_is_over(start, processes, samples):
    async def run():
        async with processes(start(), 2) as ranks:
            file = (await started(ranks))[0].published.file
            name, group = await joined(ranks)
            got, here, there = await received(ranks, name, group, file)
            assert got.keys() == dict(read_tensors(file)).keys()
            assert all(torch.equal(got[n], t) for n, t in read_tensors(file))
            assert here == there
            file = (await step(ranks, samples, 0))[0].file
            again, here, there = await received(ranks, name, group, file)
            assert all(torch.equal(again[n], t) for n, t in read_tensors(file))
            assert here == there
            assert any(not torch.equal(got[n], t) for n, t in again.items())
            group.abandon("the engine has ended")
            tell_to_send(ranks, file, name)
            failed = await replies(ranks)
            assert [f.error for f in failed] == ["broadcast: the engine has ended"] * 2
            file = (await step(ranks, samples, 1))[0].file
            name, group = await joined(ranks)  # another epoch
            _, here, there = await received(ranks, name, group, file)
            assert here == there
            group.abandon("over")

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() <= before + 4  # what waits for the end of an operation


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_leave_a_group_that_forms_or_is_sent_to_at_once(start, processes, samples):
    """Nobody else would end it for long."""

    async def run():
        async with processes(start(), 2) as ranks:
            file = (await started(ranks))[0].published.file
            ranks[0].send(OpenGroup("127.0.0.1"))
            [opened] = await replies(ranks[:1])
            place = Membership(secrets.token_hex(16), 0, 2, 3, "gloo", 200.0)
            began = time.monotonic()
            for i, rank in enumerate(ranks):
                rank.send(JoinGroup(opened.address, replace(place, rank=i)))
                rank.send(LeaveGroup())
            assert all(answer.error is not None for answer in await replies(ranks))
            name, group = await joined(ranks, timeout_s=200.0)
            for rank in ranks:
                rank.send(SendWeights(file, name))
                rank.send(LeaveGroup())
            failed = await replies(ranks)
            assert [f.error for f in failed] == [f"broadcast: {UNWANTED}"] * 2
            assert await asyncio.to_thread(group._lifeline.wait_over, DEADLINE_S) == UNWANTED
            assert time.monotonic() < began + 60
            file = (await step(ranks, samples, 0))[0].file
            name, group = await joined(ranks)
            _, here, there = await received(ranks, name, group, file)
            assert here == there
            group.abandon("over")

    asyncio.run(run())


def address_space(pid, room):
    """Lets this process have as many bytes more; None: as many as it likes."""
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
    resource.prlimit(pid, resource.RLIMIT_AS, (hard if room is None else used + room, hard))


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_without_memory_or_file_to_send_goes_on_training(
    start, processes, samples, tmp_path
):
    async def run():
        async with processes(start(), 2) as ranks:
            file = (await started(ranks))[0].published.file
            name, group = await joined(ranks)
            # Much less than the version takes, and more than a thread: of one that dies before its
            # first line, Python's `Thread.start` never hears.
            large = tmp_path / "large.bin"
            with large.open("wb") as sparse:
                sparse.truncate(4 << 30)
            address_space(ranks[0].pid, 1 << 30)
            ranks[0].send(SendWeights(replace(file, path=str(large), num_bytes=4 << 30), name))
            ranks[1].send(SendWeights(file, name))
            failed = await replies(ranks)
            assert "memory" in failed[0].error
            assert failed[1].error is not None
            assert await asyncio.to_thread(group._lifeline.wait_over, DEADLINE_S) is not None
            address_space(ranks[0].pid, None)
            name, group = await joined(ranks)
            tell_to_send(ranks, replace(file, manifest_path="/nowhere"), name)
            failed = await replies(ranks)
            assert all(f.error is not None for f in failed)
            assert await asyncio.to_thread(group._lifeline.wait_over, DEADLINE_S) is not None
            file = (await step(ranks, samples, 0))[0].file
            name, group = await joined(ranks)
            _, here, there = await received(ranks, name, group, file)
            assert here == there
            group.abandon("over")

    asyncio.run(run())


@pytest.mark.usefixtures("warm_emulated")
def test_emulated_ranks_say_that_they_have_nothing_to_send(start, processes):
    async def run():
        async with processes(
            start(rollout={"engine": "emulated"}, train={"engine": "emulated"}), 1, EMULATED_TARGET
        ) as ranks:
            await started(ranks)
            ranks[0].send(OpenGroup("127.0.0.1"))
            [opened] = await replies(ranks)
            assert opened.error is not None

    asyncio.run(run())
