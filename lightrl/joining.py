"""How a node takes part in a run: under which address others reach its coordinator, in words that
people can use.

Owns the rule that no address of this machine alone is offered to other machines.
"""

import contextlib
import socket
from pathlib import Path

from lightrl.system.addresses import ALL_HOSTS, host_and_port, is_loopback, own_host


def reachable(address: str) -> str:
    """What others connect to: `address` with this machine's own address for "all of them".

    Example: "tcp://10.0.0.1:5600" for "tcp://0.0.0.0:5600".
    """
    host, port = host_and_port(address)
    return f"tcp://{own_host()}:{port}" if host in ALL_HOSTS else address


def join_command(address: str, key: str | Path) -> str:
    """What is run where the node is to be. The key is a file, so that it is in no list of
    processes."""
    return f"lightrl up --join {address} --key {key}"


def is_here_only(address: str) -> bool:
    """Whether no other machine reaches this address: it is, or is the name of, loopback."""
    host, _ = host_and_port(address)
    if is_loopback(host):
        return True
    with contextlib.suppress(OSError):
        return is_loopback(socket.gethostbyname(host))
    return False


def why_here_only(address: str, bind: str) -> str:
    """What keeps other machines from joining at `address`, and what to set; "" if nothing does.
    `bind`: run.bind."""
    if not is_here_only(address):
        return ""
    if host_and_port(bind)[0] in ALL_HOSTS:
        return "other machines cannot join: this one has no address but loopback"
    _, port = host_and_port(bind)
    everywhere = f"tcp://0.0.0.0:{port or '*'}"
    return f'other machines cannot join: run.bind is loopback; set run.bind = "{everywhere}"'


def join_hint(address: str, bind: str, key: Path) -> str:
    """In one line. `address` is where the coordinator listens."""
    seen = reachable(address)
    why = why_here_only(seen, bind)
    where = "here" if why else "on another machine"
    return f"add one {where} with: {join_command(seen, key)}" + (f" ({why})" if why else "")
