"""How a node joins a run: no line names an address of this machine alone to other
machines."""

import re
import socket
from pathlib import Path

import pytest

from lightrl import keys
from lightrl.keys import is_here_only, join_hint, reachable
from lightrl.launch.local import join_lines
from lightrl.system import addresses
from lightrl.system.addresses import is_loopback

KEY = Path("/runs/one/join")
RUN = KEY.parent
SET = 'other machines cannot join: run.bind is loopback; set run.bind = "tcp://0.0.0.0:'


def hosts(text: str) -> list[str]:
    return re.findall(r"tcp://([^\s:]+):", text)


def test_a_run_that_listens_on_loopback_says_what_to_set():
    address, bind = "tcp://127.0.0.1:41873", "tcp://127.0.0.1:*"
    [join, why] = join_lines(address, bind, RUN)
    assert join == f"join it from this machine: lightrl up --join {address} --key /runs/one/join"
    assert why == f'{SET}*"'
    assert join_lines("tcp://localhost:5600", "localhost:5600", RUN)[1] == f'{SET}5600"'
    hint = join_hint(address, bind, KEY)
    assert hint.startswith(f"add one here with: lightrl up --join {address} --key {KEY} ({SET}")


def test_a_run_that_listens_everywhere_names_the_address_that_others_reach(monkeypatch):
    monkeypatch.setattr(keys, "own_host", lambda: "10.1.2.3")
    address = reachable("tcp://0.0.0.0:5600")
    command = "lightrl up --join tcp://10.1.2.3:5600 --key /runs/one/join"
    assert join_lines(address, "tcp://0.0.0.0:*", RUN) == [f"join it from elsewhere: {command}"]
    hint = join_hint("tcp://0.0.0.0:5600", "tcp://0.0.0.0:*", KEY)
    assert hint == f"add one on another machine with: {command}"


@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.1.1", "10.1.2.3"])
@pytest.mark.parametrize(
    ("address", "bind"),
    [
        ("tcp://0.0.0.0:5600", "tcp://*:5600"),
        ("tcp://0.0.0.0:5600", "tcp://0.0.0.0:*"),
        ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5600"),
        ("tcp://127.0.1.1:5600", "tcp://127.0.1.1:5600"),
        ("tcp://localhost:5600", "tcp://localhost:5600"),
        ("tcp://10.1.2.3:5600", "tcp://10.1.2.3:5600"),
    ],
)
def test_loopback_is_never_named_for_elsewhere(monkeypatch, own, address, bind):
    monkeypatch.setattr(keys, "own_host", lambda: own)
    lines = [*join_lines(reachable(address), bind, RUN), join_hint(address, bind, KEY)]
    for line in lines:
        if "elsewhere" in line or "on another machine" in line:
            assert not any(map(is_loopback, hosts(line)))
            assert "0.0.0.0" not in line
    is_here = is_here_only(reachable(address))
    assert is_here == ("other machines cannot join" in " ".join(lines))
    assert is_here == any(is_loopback(host) for host in hosts(lines[0]))


def test_a_name_that_stands_for_loopback_here_is_loopback(monkeypatch):
    """As Debian's /etc/hosts has it for the machine's own name."""
    names = {"box": "127.0.1.1", "far": "10.1.2.3"}
    monkeypatch.setattr(socket, "gethostbyname", names.__getitem__)
    assert is_here_only("tcp://box:5600")
    assert not is_here_only("tcp://far:5600")


def test_a_machine_without_a_route_takes_the_address_of_an_interface(monkeypatch):
    class NoRoute(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError("network is unreachable")

    monkeypatch.setattr(addresses.socket, "socket", NoRoute)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    both = [("lo", "127.0.0.1"), ("eth0", "10.1.2.3")]
    monkeypatch.setattr(addresses, "_addresses", lambda: iter(both))
    assert addresses.own_host() == "10.1.2.3"
    monkeypatch.setattr(addresses, "_addresses", lambda: iter(both[:1]))
    assert addresses.own_host() == "127.0.0.1"
