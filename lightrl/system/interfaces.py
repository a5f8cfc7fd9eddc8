"""Which address this machine has towards others, and which network interface an address belongs to:
on Linux only, elsewhere nobody knows that."""

import contextlib
import fcntl
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16sH14s")  # ifreq: name, family, the rest of sockaddr_in


def interface_of(host: str) -> str | None:
    """The name of the interface that has this IPv4 address or host name; None if there is none.

    Example: interface_of("127.0.0.1") == "lo"
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(socket.gethostbyname(host))
        for _, name in socket.if_nameindex():
            request = _REQUEST.pack(name.encode(), socket.AF_INET, b"")
            with contextlib.suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if _REQUEST.unpack(reply[: _REQUEST.size])[2][2:6] == wanted:
                    return name
    return None


def own_host() -> str:
    """The address that this machine uses towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # a documentation address: routed like the rest of the world
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:  # no route out of here
            pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
