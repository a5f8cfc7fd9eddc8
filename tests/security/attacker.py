"""A process that sends garbage to a run: `python -m tests.security.attacker KIND ADDRESS SEED COUNT
[KEY]`.

Prints how many frames it has sent. Ends with an error if whoever it attacks has stopped answering.
"""

import asyncio
import contextlib
import os
import random
import socket
import sys
from pathlib import Path

import zmq

from lightrl.errors import ProtocolError
from lightrl.keys import new_key, read_key
from lightrl.messages.nodes import PROTOCOL, Drain, Heartbeat, Hello
from lightrl.messages.snapshot import Snapshot, Watch
from lightrl.system.addresses import host_and_port
from lightrl.transport.link import Link
from lightrl.transport.router import Router
from lightrl.weights.serve.request import MAGIC, REQUEST
from lightrl.wire import MESSAGES
from tests.security import garbage

# what one who has the key may say in their names is no garbage
REAL = ("a", "head", "trainer", "*")
BURST = 400  # frames between two questions whether the coordinator is there: its inbox stays small
GREETING = b"\xff" + bytes(8) + b"\x7f\x03"  # ZMTP 3


def stranger(address: str, rng: random.Random, count: int) -> int:
    """Without the key: raw bytes, half a handshake, frames that announce more than there is."""
    sent = 0
    while sent < count:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(host_and_port(address), 3) as sock,
        ):
            sock.settimeout(0.02)
            sock.sendall(_overture(rng))
            sent += 1
            if rng.random() < 0.1:  # answered: so far it was well-formed
                with contextlib.suppress(TimeoutError):
                    sock.recv(1000)
            for _ in range(rng.randint(0, 6)):
                sock.sendall(_zmtp_frame(rng))
                sent += 1
    return sent


def _overture(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return garbage.random_bytes(rng)
    mechanism = rng.choice(
        [b"CURVE", b"CURVE", b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", rng.randbytes(9)]
    )
    whole = GREETING + bytes([rng.choice([0, 1])]) + mechanism.ljust(20, b"\0") + bytes(32)
    return garbage.turned_over(rng, whole) if rng.random() < 0.2 else whole


def _zmtp_frame(rng: random.Random) -> bytes:
    command = rng.choice(
        [b"HELLO", b"INITIATE", b"READY", b"MESSAGE", b"ERROR", b"PING", rng.randbytes(5)]
    )
    body = bytes([len(command)]) + command + garbage.random_bytes(rng, 300)
    if command == b"HELLO" and rng.random() < 0.7:  # as long as a real one
        body = b"\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(120)
    flags = rng.choice([0, 1, 2, 4, 4, 4, 6])
    if rng.random() < 0.1:  # announces much
        return (
            bytes([flags | 2]) + rng.choice([2**20, 2**28, 2**40, 2**63]).to_bytes(8, "big") + body
        )
    if flags & 2:
        return bytes([flags]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, min(255, len(body))]) + body


async def wrong_key(address: str, rng: random.Random, count: int) -> int:
    """With keys, but of another run: nothing of what is sent may arrive."""
    sent = 0
    while sent < count:
        link = Link(address, f"a/{rng.randbytes(4).hex()}", new_key())
        for _ in range(200):
            link._send_frames([garbage.frame(rng)])  # tests may
            sent += 1
        link.send(Drain("*", "wrong key"))
        await asyncio.sleep(0.01)
        link.close()
    return sent


async def insider(address: str, rng: random.Random, count: int, key: str) -> int:
    """With the key: as a node, as a tool, and as another process under the name of a real node."""
    me = f"{os.getpid()}"  # two peers of one identity would take each other's answers
    names = ["a", "trainer", f"fuzz-{me}", f"tool-{me}", f"no/such/{me}", f"\udcff\udcfe{me}"]
    sent = 0
    while sent < count:
        identity = rng.choice(names) + rng.choice(["", "/", f"/{rng.randbytes(4).hex()}"])
        if identity.rstrip("/") in REAL:
            identity += f"/{me}"
        name = identity.rpartition("/")[0] or identity
        link = _asking_again(address, identity, key)
        if name not in REAL and "\udcff" not in name:
            link.send(Hello(name, rng.randrange(1 << 40), ("rollout",), PROTOCOL, 0, "fuzz", 4))
        for _ in range(BURST):
            frames = [garbage.frame(rng)]
            if rng.random() < 0.02:
                frames = [garbage.random_bytes(rng, 50) for _ in range(rng.randint(1, 5))]
            elif not _is_harmless(frames[0]):
                frames = [b"\x92"]
            link._send_frames(frames)
            sent += 1
        link.send(Watch(0.0))
        async with asyncio.timeout(30):
            while not await _has_answered(link):
                pass
        link.close()
    return sent


def _asking_again(address: str, identity: str, key: str) -> Link:
    """A frame that is too large costs the connection, and all that came after it."""
    link = Link(address, identity, key, on_back=lambda: link.send(Watch(0.0)))
    return link


async def _has_answered(link: Link) -> bool:
    try:
        return any(isinstance(m, Snapshot) for m in await link.receive())
    except ProtocolError:
        return False


def _is_harmless(data: bytes) -> bool:
    """Who has the key may stop the run or speak for a node: not what is tried here."""
    try:
        message = MESSAGES.decode(data)
    except ProtocolError:
        return True
    match message:
        case Hello(node):
            return node not in REAL
        case Drain(node):
            return node not in REAL
        case Watch(every_s):  # nobody would read what comes
            return not every_s > 0
        case _:
            return True


def puller(holder: str, rng: random.Random, count: int) -> int:
    """Requests for weights: garbage, and well-formed ones with something wrong."""
    host, _, port = holder.rpartition(":")
    for _ in range(count):
        node, ticket = garbage.random_bytes(rng, 255), garbage.random_bytes(rng, 128)
        numbers = [rng.choice([0, 1, 2, 1000, 2**32, 2**63, 2**64 - 1]) for _ in range(3)]
        what, digest = rng.choice([b"m", b"d", b"h", b"?"]), rng.randbytes(32)
        lengths = len(node), len(ticket)
        request = REQUEST.pack(MAGIC, what, digest, *numbers, *lengths) + node + ticket
        match rng.randrange(4):
            case 0:
                request = garbage.random_bytes(rng, 300)
            case 1:
                request = garbage.turned_over(rng, request)
            case _:
                pass
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 3) as sock:
            sock.settimeout(0.5)
            sock.sendall(request)
            if rng.random() < 0.2:
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1000) == b"", "garbage was answered"
    return count


async def coordinator(rng: random.Random, count: int, key: str) -> int:
    """A coordinator that sends garbage to a node's end: messages come out, or ProtocolErrors."""
    router = Router("tcp://127.0.0.1:*", key)
    link = await Link.connect(router.address, "node", key)
    link.send(Heartbeat())
    [(peer, _)] = await router.receive()
    for sent in range(count):
        router._sock.send_multipart([peer.identity.encode(), garbage.frame(rng)])
        if sent % 100 == 0:
            router.send(peer, Drain("end"))
            with contextlib.suppress(ProtocolError):
                await link.receive()
    link.close()
    router.close()
    return count


def main(kind: str, address: str, seed: str, count: str, key_file: str = "") -> None:
    rng, key = random.Random(int(seed)), read_key(Path(key_file)) if key_file else ""
    match kind:
        case "stranger":
            sent = stranger(address, rng, int(count))
        case "wrong_key":
            sent = asyncio.run(wrong_key(address, rng, int(count)))
        case "insider":
            sent = asyncio.run(insider(address, rng, int(count), key))
        case "puller":
            sent = puller(address, rng, int(count))
        case _:
            sent = asyncio.run(coordinator(rng, int(count), key))
    zmq.Context.instance().destroy(linger=0)
    print(sent)


if __name__ == "__main__":
    main(*sys.argv[1:])
