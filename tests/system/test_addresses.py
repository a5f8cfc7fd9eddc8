"""One grammar of addresses, whoever writes them; each reader refuses what is of no use to it."""

import pytest

from lightrl.errors import ConfigError
from lightrl.system.addresses import host_and_port, is_loopback, join_address, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1:5600", "10.0.0.1", 5600),
        ("node-1.example.org:1", "node-1.example.org", 1),
        ("LOCALHOST:65535", "LOCALHOST", 65535),
        ("*:*", "*", 0),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("[::1]:41873", "::1", 41873),
    ],
)
def test_host_and_port_are_read(address: str, host: str, port: int):
    assert split_address(address) == (host, port)
    if port and host != "*":
        assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "h",
        ":1",
        "h:",
        "h:65536",
        "h:-1",
        "h:1x",
        "h:１",
        "a b:1",
        "a..b:1",
        "a/b:1",
        "::1:5600",
    ],
)
def test_anything_else_is_none(address: str):
    assert split_address(address) is None


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:5600", "10.0.0.1:5600"])
def test_the_scheme_may_be_left_out(address: str):
    assert host_and_port(address) == ("10.0.0.1", 5600)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://nonsense", "tcp://nonsense: not an address; one looks like tcp://10.0.0.1:5600"),
        ("tcp://h:99999", "not an address"),
        ("tcp://[::1]:5600", "IPv6 is not supported; use an IPv4 address: tcp://10.0.0.1:5600"),
    ],
)
def test_what_a_user_may_not_write_is_one_line_with_an_example(address: str, reason: str):
    with pytest.raises(ConfigError) as raised:
        host_and_port(address)
    assert reason in str(raised.value)


def test_what_only_this_machine_reaches_is_known_by_its_host():
    hosts = ["127.0.0.1", "127.8.0.1", "::1", "localhost", "10.0.0.1", "fe80::1%eth0", "h", "*"]
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 4
