"""Authenticate connections with ZeroMQ's protocol (ZAP), in the coordinator's event loop.

A process has one authenticator, which serves all its routers; each router admits the public keys
that it has registered. ZeroMQ attaches the result to every message of a connection as its
"User-Id", which a client cannot change.

ZeroMQ's own authenticators run a thread or a task forever; this one ends with the last router.
Without an authenticator every connection is refused (ZAP_ENFORCE_DOMAIN).
"""

import asyncio

import zmq

ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class ZapAuthenticator:
    """Answers for the routers of this process. They call `admit`, and `forget` when they close."""

    def __init__(self) -> None:
        # domain (one of each router) -> public key -> User-Id
        self._admitted: dict[bytes, dict[bytes, str]] = {}
        self._sock: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1

    def admit(self, domain: str, clients: dict[bytes, str]) -> None:
        """Admit clients of `domain` that have one of these public keys, as the User-Id beside it.

        The running event loop answers from now on.
        """
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
            self._sock.unbind(ENDPOINT)  # `close` unbinds later; the next router may bind now
            self._sock.close()
            self._sock = None

    def _answer(self) -> None:
        """Answer all pending requests: the descriptor is edge-triggered."""
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
        """Return the User-Id, or "" for an unknown key.

        Frames: version, request, domain, address, the router's identity, mechanism, the client's
        public key.
        """
        if len(frames) != 7:
            return ""
        version, _, domain, _, _, mechanism, client_key = frames
        if (version, mechanism) != (_VERSION, b"CURVE"):
            return ""
        return self._admitted.get(domain, {}).get(client_key, "")


AUTHENTICATOR = ZapAuthenticator()
