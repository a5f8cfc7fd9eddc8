"""Broadcasts between processes over gloo: what arrives, and what a dead or stopped member costs."""

import contextlib
import os
import random
import secrets
import signal
import socket
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.pieces import byte_range, rows, schedule
from lightrl.weights.broadcast.rendezvous import Membership, Rendezvous
from lightrl.weights.broadcast.transfer import REUSED_BYTES, _Memory, receive, send
from lightrl.weights.version.layout import plan
from tests.support.tiers import e2e
from tests.weights.broadcast_members import Fault, Plan, members

ETH_P_ALL, SO_RCVBUFFORCE = 3, 33  # of Linux; the second lets root have a larger buffer
MIXED = (
    ("a.scalar", "float32", ()),
    ("b.one_row", "bfloat16", (1, 7)),
    ("c.empty", "float32", (0, 4)),
    ("d.uneven", "bfloat16", (5, 3)),
    ("e.large", "float32", (1001, 257)),
    ("f.embedding", "bfloat16", (3001, 100)),
    ("g.flags", "bool", (3,)),
    ("h.counter", "int64", ()),
    *((f"layers.{i}.norm", "bfloat16", (33,)) for i in range(40)),
    ("z.last_empty", "float32", (0,)),
)
LARGE = tuple((f"layers.{i:02}.weight", "bfloat16", (512, 512)) for i in range(20))


@pytest.mark.parametrize(
    ("num_ranks", "num_receivers", "is_chain"),
    [
        (2, 2, True),
        (1, 3, False),
        *e2e((*sizes, True) for sizes in [(1, 1), (3, 1), (1, 3)]),
        *e2e((*sizes, False) for sizes in [(1, 1), (2, 2), (3, 1)]),
    ],
)
def test_every_receiver_gets_every_bit_of_two_versions_in_order(num_ranks, num_receivers, is_chain):
    what = Plan(MIXED, num_ranks, num_receivers, versions=2, is_chain=is_chain)
    with members(what) as group:
        reports = group.reports(60)
    assert [reports[r].error for r in range(what.world)] == [None] * what.world
    receivers = [reports[r] for r in range(num_ranks, what.world)]
    assert [r.num_right for r in receivers] == [2] * num_receivers
    assert all(r.names == tuple(t.name for t in what.tensors) for r in receivers)
    for version in range(2):
        of_ranks = [reports[r].sums[version] for r in range(num_ranks)]
        total = tuple(sum(s) % (1 << 64) for s in zip(*of_ranks, strict=True))
        assert [r.sums[version] for r in receivers] == [total] * num_receivers
    assert receivers[0].sums[0] != receivers[0].sums[1]


def test_nothing_of_a_version_is_held_when_it_has_been_sent():
    """Else its file would keep its pages until the next version."""
    tensors = plan([(f"layers.{i}", "uint8", (1 << 20,)) for i in range(4)])
    meet, place = Rendezvous("127.0.0.1"), Membership("name", 0, 1, 2, "gloo", timeout_s=20.0)
    held: list[weakref.ref[memoryview]] = []

    def rows_of(i):
        view = memoryview(bytearray(tensors[i].num_bytes))
        held.append(weakref.ref(view))
        return torch.frombuffer(view, dtype=torch.uint8)

    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(form, meet, place, "cpu")
        other = form(meet.address, replace(place, rank=1), "cpu")
        group = forming.result(20)
        coming = pool.submit(lambda: sum(1 for _ in receive(other, tensors)))
        send(group, tensors, rows_of)
        assert coming.result(20) == len(tensors)
        assert group.over is None
        assert [view() for view in held] == [None] * len(tensors)
        other.abandon("the test is over")


@pytest.mark.skipif(not hasattr(socket, "AF_PACKET") or os.geteuid() != 0, reason="needs root")
def test_who_listens_to_a_group_that_forms_does_not_learn_its_name():
    """Else sums could be forged, the numbers of which are made of it."""
    meet, name = Rendezvous("127.0.0.1"), secrets.token_hex(16)
    place = Membership(name, 0, 1, 2, "gloo", timeout_s=20.0)
    heard = bytearray()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as ear:
        ear.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        ear.bind(("lo", 0))
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(form, meet, place, "cpu")
            other = pool.submit(form, meet.address, replace(place, rank=1), "cpu")
            for group in (first.result(), other.result()):
                group.abandon("the test is over")
        ear.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                heard += ear.recv(1 << 17)
    assert place.shown_name in heard
    assert name.encode() not in heard


@pytest.mark.parametrize(
    ("member", "is_chain"),
    [(1, True), *e2e([(0, True), (2, True), (3, True), (2, False)])],
)
def test_all_others_know_soon_of_a_member_that_is_killed(member, is_chain):
    what = Plan(LARGE, fault=Fault(member, signal.SIGKILL, tensor=10), is_chain=is_chain)
    others = [r for r in range(4) if r != member]
    with members(what) as group:
        group.await_formed()
        process = group.processes[member]
        process.join(90)
        died = time.monotonic()
        reports = group.reports(10, others)
    assert sorted(reports) == others
    for rank in others:
        assert reports[rank].error == f"broadcast: member {member} is gone"
        assert reports[rank].at < died + 5.0  # a busy machine; the time limit is 20 s


@pytest.mark.e2e
@pytest.mark.parametrize("member", [0, 1, 3])
def test_all_others_fail_at_the_deadline_when_a_member_is_stopped(member):
    what = Plan(LARGE, timeout_s=4.0, fault=Fault(member, signal.SIGSTOP, tensor=10))
    others = [r for r in range(4) if r != member]
    with members(what) as group:
        group.await_formed()
        began = time.monotonic()
        reports = group.reports(20, others)
    assert sorted(reports) == others
    for rank in others:
        error = reports[rank].error
        assert error is not None
        assert "\n" not in error
        assert began + 3.5 < reports[rank].at < began + 4.0 + 3.0


@pytest.mark.e2e
def test_a_member_killed_between_two_versions_ends_the_group_for_all():
    what = Plan(LARGE[:2], versions=2, waits_for_word=True)
    with members(what) as group:
        group.await_formed()
        for pipe in group.pipes:
            pipe.send("go")
        group.signal(3, signal.SIGKILL)
        group.processes[3].join(90)
        for pipe in group.pipes[:3]:
            pipe.send("go")
        reports = group.reports(10, [0, 1, 2])
    assert {r.error for r in reports.values()} == {"broadcast: member 3 is gone"}


def test_a_member_that_never_comes_costs_the_time_limit_and_no_more():
    what = Plan(MIXED, timeout_s=2.0)
    with members(what) as group:
        group.signal(2, signal.SIGKILL)
        began = time.monotonic()
        reports = group.reports(10, [0, 1, 3])
    assert sorted(reports) == [0, 1, 3]
    assert all(r.error and r.at < began + 4.0 for r in reports.values())


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(100))
def test_a_kill_or_a_stop_at_any_moment_hangs_nobody_and_changes_no_byte(seed):
    choice = random.Random(seed)
    what = Plan(LARGE, timeout_s=3.0, versions=2)
    member = choice.randrange(4)
    with members(what) as group:
        time.sleep(choice.uniform(0.0, 0.6))  # from before they meet until after they are done
        group.signal(member, choice.choice([signal.SIGKILL, signal.SIGSTOP]))
        reports = group.reports(15, [r for r in range(4) if r != member])
    assert len(reports) == 3
    for report in reports.values():
        if report.error is None and report.rank >= 2:
            assert report.num_right == 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("piece_bytes", [100, 4096, 8 << 20])
def test_the_pieces_are_each_byte_once_and_none_is_too_large(num_ranks, piece_bytes):
    tensors = plan(MIXED)
    seen = [bytearray(t.num_bytes) for t in tensors]
    for piece in schedule(tensors, num_ranks, piece_bytes):
        assert 0 < piece.num_bytes <= piece_bytes
        for part in piece.parts:
            start, end = byte_range(tensors[part.tensor], piece.root, num_ranks)
            assert start <= part.start < part.end <= end
            for i in range(part.start, part.end):
                seen[part.tensor][i] += 1
    assert all(set(data) <= {1} for data in seen)


def test_thousands_of_small_tensors_are_a_few_operations():
    tensors = plan([(f"experts.{i}.bias", "bfloat16", (64,)) for i in range(20_000)])
    assert len(list(schedule(tensors, 2))) == 2


def test_rows_are_those_of_torch_chunk():
    for length in range(12):
        for num_ranks in (1, 2, 3, 5, 8):
            chunks = [list(c) for c in torch.chunk(torch.arange(length), num_ranks)]
            ours = [list(range(*rows(length, r, num_ranks))) for r in range(num_ranks)]
            assert [c for c in ours if c] == [[int(x) for x in c] for c in chunks if len(c)]


def test_memory_is_given_out_again_only_when_nobody_holds_a_view_of_it():
    memory = _Memory()
    tensor = memory.take(REUSED_BYTES)
    place, view = tensor.data_ptr(), tensor.view(torch.float32)[3:]
    del tensor
    other = memory.take(REUSED_BYTES)
    assert other.data_ptr() != place
    del view
    assert memory.take(REUSED_BYTES).data_ptr() == place
