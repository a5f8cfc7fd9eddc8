"""What an address is, in every place that reads one: host:port, as users, files and peers write it.

Pure: owns the grammar. Looks nothing up, and does not say whether anybody listens there.
"""

import ipaddress
import re

from lightrl.errors import ConfigError

WILDCARD = "0.0.0.0"
ALL_HOSTS = {WILDCARD, "*"}  # of whoever listens everywhere; it is reached elsewhere

_ADDRESS = re.compile(
    r"(\*|\[[0-9a-f:.]{2,45}\]|[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*):(\*|[0-9]{1,5})",
    re.IGNORECASE | re.ASCII,
)
_EXAMPLE = "tcp://10.0.0.1:5600"


def split_address(address: str) -> tuple[str, int] | None:
    """("10.0.0.1", 5600) for "10.0.0.1:5600", ("::1", 0) for "[::1]:*"; None for anything else."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return None
    host, port = match[1].removeprefix("[").removesuffix("]"), match[2].replace("*", "0")
    return (host, int(port)) if int(port) < 1 << 16 else None


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`. Example: "10.0.0.1:41873", "[::1]:41873"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_known(address: str) -> tuple[str, int] | None:
    """As `split_address`, of a service that listens: host and port are known."""
    found = split_address(address)
    return None if found is None or found[0] == "*" or found[1] == 0 else found


def not_everywhere(address: str, host: str) -> str:
    """Of whoever listens everywhere, the one by which it can be reached: that of another of its
    services, `host`. Any other address as it is."""
    found = split_address(address)
    return address if found is None or found[0] != WILDCARD else join_address(host, found[1])


def host_and_port(address: str) -> tuple[str, int]:
    """Of a coordinator: ("10.0.0.1", 5600) for "tcp://10.0.0.1:5600" or "10.0.0.1:5600"; port 0 for
    "*".

    Raises ConfigError with an example if it is neither.
    """
    plain = address.removeprefix("tcp://")
    host = plain.rpartition(":")[0]
    if ":" in host or "[" in host:
        raise ConfigError(f"{address}: IPv6 is not supported; use an IPv4 address: {_EXAMPLE}")
    if (found := split_address(plain)) is None:
        raise ConfigError(f"{address}: not an address; one looks like {_EXAMPLE}")
    return found


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach it. Example: "127.0.0.1", "::1",
    "localhost"; of other names nobody knows it here."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
