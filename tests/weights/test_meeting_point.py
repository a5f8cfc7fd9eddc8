"""Which addresses the members of a group listen on: such that all others reach them."""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from lightrl.system.addresses import interface_of
from lightrl.weights.broadcast import group as groups
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.rendezvous import Membership, Rendezvous


def other_address():
    """Of this machine, not loopback; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.fixture
def listened(monkeypatch):
    """The addresses at which the members' backends listen."""
    hosts, make = [], groups._backend

    def spied(store, host, place):
        hosts.append(host)
        return make(store, host, place)

    monkeypatch.setattr(groups, "_backend", spied)
    return hosts


def formed(listens_on, reached_at):
    """All members of a group, one for each address by which member 0 is reached, and that one."""
    meet = Rendezvous(listens_on)
    world = 1 + len(reached_at)
    place = Membership(secrets.token_hex(16), 0, 1, world, "gloo", 20.0)
    with ThreadPoolExecutor(world) as pool:
        members = [pool.submit(form, meet, place, "cpu")]
        for rank, host in enumerate(reached_at, 1):
            at = (host, meet.address[1])
            members.append(pool.submit(form, at, replace(place, rank=rank), "cpu"))
        return [member.result() for member in members]


@pytest.mark.parametrize("order", [1, -1])
def test_who_comes_by_loopback_listens_where_members_of_other_machines_reach_it(listened, order):
    there = other_address()
    if there is None:
        pytest.skip("this machine has no address but loopback")
    members = formed("0.0.0.0", ["127.0.0.1", there][::order])
    assert listened == [there] * 3
    data = [torch.full((1000,), rank, dtype=torch.uint8) for rank in range(3)]
    works = [member.broadcast(part, 0) for member, part in zip(members, data, strict=True)]
    for member, work in zip(members, works, strict=True):
        member.wait(work)
    assert all(not part.any() for part in data)
    members[0].abandon("the test is over")


def test_a_group_of_one_machine_stays_on_loopback(listened):
    members = formed("0.0.0.0", ["127.0.0.1", "127.0.0.1"])
    assert listened == ["127.0.0.1"] * 3
    members[0].abandon("the test is over")


def test_interfaces_are_found_by_their_addresses():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"
    assert interface_of("0.0.0.0") is None
    assert interface_of("no such host.") is None
    if (there := other_address()) is not None:
        assert interface_of(there) in {name for _, name in socket.if_nameindex()} - {"lo"}
