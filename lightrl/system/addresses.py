"""Parse and print addresses, host:port, as users, files and peers write them; and find the
addresses of this machine."""

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Iterator

from lightrl.errors import ConfigError

WILDCARD = "0.0.0.0"
ALL_HOSTS = {WILDCARD, "*"}  # of a service that listens on all interfaces

_ADDRESS = re.compile(
    r"(\*|\[[0-9a-f:.]{2,45}\]|[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*):(\*|[0-9]{1,5})",
    re.IGNORECASE | re.ASCII,
)
_EXAMPLE = "tcp://10.0.0.1:5600"
_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16sH14s")  # ifreq: name, family, the rest of sockaddr_in


def split_address(address: str) -> tuple[str, int] | None:
    """Return ("10.0.0.1", 5600) for "10.0.0.1:5600", ("::1", 0) for "[::1]:*", else None."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return None
    host, port = match[1].removeprefix("[").removesuffix("]"), match[2].replace("*", "0")
    return (host, int(port)) if int(port) < 1 << 16 else None


def join_address(host: str, port: int) -> str:
    """Return the reverse of `split_address`. Example: "10.0.0.1:41873", "[::1]:41873"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_known(address: str) -> tuple[str, int] | None:
    """Split the address of a listening service; None if host or port are wildcards."""
    found = split_address(address)
    return None if found is None or found[0] == "*" or found[1] == 0 else found


def not_everywhere(address: str, host: str) -> str:
    """Replace a wildcard host by `host`, by which another service of the peer was reached."""
    found = split_address(address)
    return address if found is None or found[0] != WILDCARD else join_address(host, found[1])


def host_and_port(address: str) -> tuple[str, int]:
    """Return ("10.0.0.1", 5600) for "tcp://10.0.0.1:5600" or "10.0.0.1:5600"; port 0 for "*".

    Raises ConfigError with an example for anything else.
    """
    plain = address.removeprefix("tcp://")
    host = plain.rpartition(":")[0]
    if ":" in host or "[" in host:
        raise ConfigError(f"{address}: IPv6 is not supported; use an IPv4 address: {_EXAMPLE}")
    if (found := split_address(plain)) is None:
        raise ConfigError(f"{address}: not an address; one looks like {_EXAMPLE}")
    return found


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`: "127.0.0.1", "::1", "localhost"."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(host: str) -> str | None:
    """Return the network interface with this IPv4 address or host name, or None (also not Linux).

    Example: interface_of("127.0.0.1") == "lo"
    """
    with contextlib.suppress(OSError):
        wanted = socket.gethostbyname(host)
        return next((name for name, address in _addresses() if address == wanted), None)
    return None


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield (name, IPv4 address) of each interface that has one. Raises OSError."""
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _REQUEST.pack(name.encode(), socket.AF_INET, b"")
            with contextlib.suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                yield name, socket.inet_ntoa(_REQUEST.unpack(reply[: _REQUEST.size])[2][2:6])


def own_host(towards: str = "192.0.2.1") -> str:
    """Return the address from which this machine reaches `towards`, by default any other machine.

    Loopback only if there is no other, or `towards` is on this machine. Sends nothing.
    """
    with (
        contextlib.suppress(OSError),  # no route
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((towards, 9))  # the default, for documentation, takes the default route
        return probe.getsockname()[0]
    found: list[str] = []
    with contextlib.suppress(OSError):  # may be 127.0.1.1
        found.append(socket.gethostbyname(socket.gethostname()))
    with contextlib.suppress(OSError):
        found += [address for _, address in _addresses()]
    return next((host for host in found if not is_loopback(host)), "127.0.0.1")
