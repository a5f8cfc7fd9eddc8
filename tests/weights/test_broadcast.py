"""Broadcasts over gloo: what arrives, and what a dead, stopped or unwilling member costs."""

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightrl.errors import WeightsError
from lightrl.system.addresses import interface_of, is_loopback, join_address, own_host
from lightrl.weights.broadcast import group as groups
from lightrl.weights.broadcast.group import form, listen
from lightrl.weights.broadcast.membership import UNWANTED
from lightrl.weights.broadcast.transfer import receive, send
from lightrl.weights.version.layout import BUCKET_BYTES
from tests.support.tiers import e2e
from tests.weights.broadcast_members import HOST, Fault, Plan, members, membership, version

SOON_S = 30.0
MIXED = (
    ("a.scalar", "float32", ()),
    ("b.one_row", "bfloat16", (1, 7)),
    ("c.empty", "float32", (0, 4)),
    ("d.uneven", "bfloat16", (5, 3)),
    ("e.large", "float32", (1001, 257)),
    ("f.embedding", "bfloat16", (9001, 1000)),
    ("g.flags", "bool", (3,)),
    ("h.counter", "int64", ()),
    *((f"layers.{i}.norm", "bfloat16", (33,)) for i in range(40)),
    ("z.last_empty", "float32", (0,)),
)
LARGE = tuple((f"layers.{i:02}.weight", "bfloat16", (512, 4096)) for i in range(12))


@pytest.mark.parametrize("num_receivers", [3, *e2e([1, 2])])
def test_every_receiver_gets_every_bit_of_two_versions_in_order(num_receivers):
    what = Plan(MIXED, num_receivers, versions=2)
    with members(what) as group:
        reports = group.reports(60)
    assert [reports[r].error for r in range(what.world)] == [None] * what.world
    receivers = [reports[r] for r in range(1, what.world)]
    assert [r.num_right for r in receivers] == [2] * num_receivers
    assert all(r.names == tuple(sorted(name for name, _, _ in MIXED)) for r in receivers)


@contextlib.contextmanager
def pair(timeout_s=20.0):
    """The rank's and the receiver's end of one group, and threads for them."""
    store = listen(HOST, 2, timeout_s)
    places = [membership(r, 2, join_address(HOST, store.port), timeout_s) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(form, places[0], "cpu", store)
        other = form(places[1], "cpu")
        try:
            yield first.result(SOON_S), other, pool
        finally:
            other.abort("the test is over")
            first.result().abort("the test is over")


@pytest.fixture
def listened(monkeypatch):
    """The addresses at which the members' backends listen."""
    hosts, make = [], groups._gloo

    def spied(store, rank, world, timeout, host):
        hosts.append(host)
        return make(store, rank, world, timeout, host)

    monkeypatch.setattr(groups, "_gloo", spied)
    return hosts


def formed(*reached_at):
    """All members of a group, one for each address by which rank 0 is reached, and that one."""
    world = 1 + len(reached_at)
    store = listen("0.0.0.0", world, 20.0)
    addresses = [join_address(host, store.port) for host in ("0.0.0.0", *reached_at)]
    with ThreadPoolExecutor(world) as pool:
        found = [
            pool.submit(form, membership(rank, world, at), "cpu", None if rank else store)
            for rank, at in enumerate(addresses)
        ]
        return [member.result(SOON_S) for member in found]


@pytest.mark.parametrize("order", [1, -1])
def test_members_listen_where_those_of_other_machines_reach_them(listened, order):
    if is_loopback(there := own_host()):
        pytest.skip("this machine has no address but loopback")
    members = formed(*[HOST, there][::order])
    assert listened == [there] * 3
    for member in members:
        member.abort("the test is over")


def test_a_group_of_one_machine_stays_on_loopback(listened):
    members = formed(HOST, HOST)
    assert listened == [HOST] * 3
    for member in members:
        member.abort("the test is over")


def test_interfaces_are_found_by_their_addresses():
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert interface_of("0.0.0.0") is None
    assert interface_of("no such host.") is None


def names(group, manifest, is_unwanted=None):
    return [name for name, _ in receive(group, manifest, is_unwanted)]


@pytest.mark.parametrize("position", [0, BUCKET_BYTES - 1, BUCKET_BYTES, -1])
def test_bytes_that_are_not_those_of_the_manifest_are_refused(position):
    manifest, data = version((("a", "uint8", (BUCKET_BYTES + 100,)),), 1)
    data[position] ^= 1
    with pair() as (rank, other, pool):
        sending = pool.submit(send, rank, data)
        with pytest.raises(WeightsError, match=r"broadcast: bucket \d: digest differs"):
            names(other, manifest)
        assert other.over is not None
        with contextlib.suppress(WeightsError):  # unless all was on its way already
            sending.result(SOON_S)


def test_two_words_that_change_places_are_refused():
    manifest, data = version((("a", "float32", (64,)),), 1)
    words = data.view(torch.int64)
    words[0], words[1] = words[1].clone(), words[0].clone()
    with pair() as (rank, other, pool):
        sending = pool.submit(send, rank, data)
        with pytest.raises(WeightsError, match="digest differs"):
            names(other, manifest)
        sending.result(SOON_S)


def test_who_sends_or_receives_what_is_unwanted_leaves_soon():
    manifest, data = version(LARGE, 1)
    with pair(200.0) as (rank, _, _), pytest.raises(WeightsError, match=UNWANTED):
        send(rank, data, lambda: True)
    with pair(200.0) as (_, other, _), pytest.raises(WeightsError, match=UNWANTED):
        names(other, manifest, lambda: True)


def test_a_group_that_forms_is_given_up_as_soon_as_it_is_unwanted():
    store = listen(HOST, 2, 200.0)
    place, is_over = membership(0, 2, join_address(HOST, store.port), 200.0), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(form, place, "cpu", store, is_over.is_set)
        is_over.set()
        with pytest.raises(WeightsError, match=UNWANTED):
            forming.result(SOON_S)


@pytest.mark.parametrize("member", [0, 1])
def test_a_member_whose_connection_has_ended_is_named(member):
    """However it ended: by then its process may still have to end."""
    manifest, data = version(LARGE, 1)
    with pair() as (*both, _):
        gone, left = both[member], both[1 - member]
        gone.abort("it leaves")
        gone._thread.join(SOON_S)
        with pytest.raises(WeightsError, match=f"^broadcast: member {member} is gone$"):
            send(left, data) if member else names(left, manifest)


def test_a_consumer_that_stops_early_ends_the_group():
    manifest, data = version(LARGE, 1)
    with pair() as (rank, other, pool):
        sending = pool.submit(send, rank, data)
        coming = receive(other, manifest)
        next(coming)
        coming.close()
        assert other.over is not None
        with pytest.raises(WeightsError, match="broadcast"):
            next(receive(other, manifest))
        rank.abort("the test is over")
        with contextlib.suppress(WeightsError):
            sending.result(SOON_S)


def test_a_lack_of_memory_ends_the_transfer():
    huge, _ = version((("a", "uint8", (8,)),), 1)
    with pair() as (_, other, _), pytest.raises(WeightsError, match=r"broadcast: .*memory"):
        names(other, type(huge)((type(huge.tensors[0])("a", "uint8", (1 << 60,), 0),), 8, b""))


STUCK = """
import torch
from lightrl.weights.broadcast.group import form, listen
from tests.weights.broadcast_members import membership
store = listen("127.0.0.1", 2, 200.0)
try:
    form(membership(0, 2, f"127.0.0.1:{store.port}", 200.0), "cpu", store, lambda: True)
except Exception as e:
    print(e)
"""


def test_a_process_ends_while_a_thread_of_its_group_is_stuck():
    found = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, timeout=60)
    assert UNWANTED in found.stdout.decode(), found.stderr.decode()
    assert found.returncode == 0


@pytest.mark.parametrize("member", [2, *e2e([0, 1, 3])])
@pytest.mark.parametrize("number", [signal.SIGKILL, *e2e([signal.SIGSTOP])])
def test_a_dead_or_stopped_member_costs_others_the_time_limit_at_most(member, number):
    what = Plan(LARGE, timeout_s=4.0, fault=Fault(member, number, tensor=0))
    others = [r for r in range(4) if r != member]
    with members(what) as group:
        group.await_formed()
        began = time.monotonic()
        reports = group.reports(30, others)
    assert sorted(reports) == others
    for rank in others:
        error = reports[rank].error
        # who needs nothing of it may have all
        assert error is not None or (rank < member and reports[rank].num_right == (rank > 0))
        assert "\n" not in (error or "")
        assert reports[rank].at < began + 4.0 + 6.0  # a busy machine


def test_a_member_that_never_comes_costs_the_time_limit_and_no_more():
    what = Plan(MIXED, timeout_s=2.0)
    with members(what) as group:
        group.signal(2, signal.SIGKILL)
        began = time.monotonic()
        reports = group.reports(20, [0, 1, 3])
    assert sorted(reports) == [0, 1, 3]
    assert all(r.error and r.at < began + 5.0 for r in reports.values())


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
        reports = group.reports(20, [r for r in range(4) if r != member])
    assert len(reports) == 3
    for report in reports.values():
        if report.error is None and report.rank > 0:
            assert report.num_right == 2
