"""Which address this machine has towards others, and which network interface an address belongs to:
on Linux only, elsewhere nobody knows that."""

import contextlib
import fcntl
import socket
import struct
import sys
from collections.abc import Iterator

from lightrl.system.addresses import is_loopback

_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16sH14s")  # ifreq: name, family, the rest of sockaddr_in


def interface_of(host: str) -> str | None:
    """The name of the interface that has this IPv4 address or host name; None if there is none.

    Example: interface_of("127.0.0.1") == "lo"
    """
    with contextlib.suppress(OSError):
        wanted = socket.gethostbyname(host)
        return next((name for name, address in _addresses() if address == wanted), None)
    return None


def _addresses() -> Iterator[tuple[str, str]]:
    """(name, IPv4 address) of each interface that has one. Raises OSError."""
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _REQUEST.pack(name.encode(), socket.AF_INET, b"")
            with contextlib.suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                yield name, socket.inet_ntoa(_REQUEST.unpack(reply[: _REQUEST.size])[2][2:6])


def own_host(towards: str = "192.0.2.1") -> str:
    """The address that this machine uses towards another one, by default towards any; nothing is
    sent. Loopback only if there is no other, or `towards` is on this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # the default is a documentation address: routed like the rest of the world
            probe.connect((towards, 9))
            return probe.getsockname()[0]
        except OSError:  # no route out of here
            pass
    found: list[str] = []
    with contextlib.suppress(OSError):  # often its name stands for 127.0.1.1
        found.append(socket.gethostbyname(socket.gethostname()))
    with contextlib.suppress(OSError):
        found += [address for _, address in _addresses()]
    return next((host for host in found if not is_loopback(host)), "127.0.0.1")
