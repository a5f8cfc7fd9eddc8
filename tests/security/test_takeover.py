"""A connection that another one of its own identity takes over, and that breaks: the coordinator
lives on."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import zmq
from zmq.utils import z85

from lightrl.keys import coordinator_public_key, join_key, new_key, secret_of
from lightrl.messages.nodes import Heartbeat
from lightrl.transport.router import Router
from lightrl.transport.zeromq import HEARTBEAT_MS
from lightrl.wire import MESSAGES

ROOT = Path(__file__).parents[2]
TIMES = 3
LOAD_S = 0.4  # of messages through both connections, so that the first one's input is stopped


def take_over(port: int, key: str) -> None:
    """What a node does that reconnects while its former connection still stands."""
    secret, context = z85.encode(secret_of(key)), zmq.Context()
    frame = MESSAGES.encode(Heartbeat())

    def connect(identity: str) -> "zmq.Socket[bytes]":
        sock: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        sock.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        sock.set(zmq.CURVE_SECRETKEY, secret)
        sock.set(zmq.CURVE_SERVERKEY, z85.encode(coordinator_public_key(key)))
        sock.set(zmq.IDENTITY, identity.encode())
        sock.set(zmq.SNDHWM, 0)
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.RECONNECT_IVL, -1)
        sock.connect(f"tcp://127.0.0.1:{port}")
        return sock

    for k in range(TIMES):
        first = connect(f"n{k}/x")
        for _ in range(2000):
            first.send(frame)
        second = connect(f"n{k}/x")
        until = time.monotonic() + LOAD_S
        while time.monotonic() < until:
            for _ in range(200):
                first.send(frame)
            second.send(frame)
        first.close(0)
    context.destroy(0)


async def serve() -> None:
    """Until some heartbeats after the last connection has broken."""
    router = Router("tcp://127.0.0.1:*", key := new_key())
    port = int(router.address.rpartition(":")[2])
    client = threading.Thread(target=take_over, args=(port, join_key(key)))
    client.start()

    async def receive() -> None:
        while True:
            await router.receive()

    receiving = asyncio.ensure_future(receive())
    await asyncio.to_thread(client.join)
    await asyncio.sleep(3 * HEARTBEAT_MS / 1000)
    receiving.cancel()
    router.close()


def test_a_connection_that_was_taken_over_and_breaks_does_not_end_the_coordinator():
    command = [sys.executable, "-c", "from tests.security import test_takeover as t; t.run()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def run() -> None:
    asyncio.run(serve())
