"""Who may connect: ZeroMQ's authentication protocol (ZAP), answered in the coordinator's event
loop.

Owns the one authenticator that a process can have, which serves all its routers; each admits
clients whose public key it knows, nobody else. Must not know where keys come from.

What a connection has proved, ZeroMQ keeps with it and hands out with every message that it brings,
as the message's "User-Id": whatever a client calls itself, it cannot change that.

ZeroMQ's own authenticators are a thread or a task for good; this one lives as long as there is a
router. Without it every connection is refused (ZAP_ENFORCE_DOMAIN), not let through.
"""

import asyncio

import zmq

ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Doorkeeper:
    """Answers for the routers of this process. They call `admit` and, when they close, `forget`."""

    def __init__(self) -> None:
        self._admitted: dict[
            bytes, dict[bytes, str]
        ] = {}  # domain (one of each router) -> public key -> User-Id
        self._sock: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1

    def admit(self, domain: str, clients: dict[bytes, str]) -> None:
        """From now on this router's loop answers; a peer of `domain` must have the key pair of one
        of these public keys, and is known by the User-Id beside it."""
        self._admitted[domain.encode()] = clients
        if self._sock is None:
            sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
            sock.set(zmq.LINGER, 0)
            sock.bind(ENDPOINT)
            self._sock, self._fd, self._loop = sock, sock.fileno(), None
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._answer)
            self._answer()

    def forget(self, domain: str) -> None:
        self._admitted.pop(domain.encode(), None)
        if not self._admitted and self._sock is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._sock.unbind(ENDPOINT)  # at once, so that the next router may bind it
            self._sock.close()
            self._sock = None

    def _answer(self) -> None:
        """Until none waits: ZeroMQ tells only once that there is something."""
        while self._sock is not None:
            try:
                frames = self._sock.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            request = frames[1] if len(frames) > 1 else b""
            user = self._user_of(frames)
            verdict = (b"200", b"OK") if user else (b"400", b"not the key of this run")
            self._sock.send_multipart([_VERSION, request, *verdict, user.encode(), b""])

    def _user_of(self, frames: list[bytes]) -> str:
        """Empty for a stranger. Frames: version, request, domain, address, identity, mechanism, the
        client's public key. (The identity is the router's own: that of the client is not known
        yet.)"""
        if len(frames) != 7:
            return ""
        version, _, domain, _, _, mechanism, client_key = frames
        if (version, mechanism) != (_VERSION, b"CURVE"):
            return ""
        return self._admitted.get(domain, {}).get(client_key, "")


DOORKEEPER = Doorkeeper()
