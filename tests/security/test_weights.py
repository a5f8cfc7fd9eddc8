"""Hostile bytes at both ends of a weight pull: at the server's port, and from a source."""

import asyncio
import os
import random
import socket
import struct
from pathlib import Path

import pytest

from lightrl.errors import ProtocolError
from lightrl.messages.weights import WeightsSource
from lightrl.tickets import pull_ticket
from lightrl.weights.serve.request import (
    DATA,
    MAGIC,
    PART,
    REQUEST,
    Holdings,
    Request,
    num_missing,
    unpack,
)
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES
from tests.security import garbage
from tests.support.holder import holder
from tests.support.versions import make_version, pull, serving, source

DEADLINE_S = 100
MAX_GROWTH_BYTES = 64 << 20
NUMBERS = [0, 1, 2, 1000, BUCKET_BYTES, 2**32, 2**63, 2**64 - 1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def a_request(rng: random.Random, digest: bytes = b"", secret: str = "") -> bytes:
    """Well-formed, but for some part of it; with `secret` its ticket is right."""
    what, version = rng.choice([b"m", b"d", b"h", b"?"]), rng.choice([1, *NUMBERS])
    node = garbage.random_bytes(rng, 255) or b"n"
    ticket = garbage.random_bytes(rng, 128)
    if secret:
        ticket = pull_ticket(secret, node.decode(errors="replace"), version).encode()
    digest = rng.choice([digest or bytes(32), rng.randbytes(32)])
    numbers = version, rng.choice(NUMBERS), rng.choice(NUMBERS)
    lengths = len(node), len(ticket)
    return REQUEST.pack(MAGIC, what, digest, *numbers, *lengths) + node + ticket


@pytest.mark.parametrize("num", [20_000, pytest.param(100_000, marks=pytest.mark.e2e)])
def test_any_bytes_are_a_request_or_a_protocol_error(num: int):
    rng, whole = random.Random(1), 0
    for _ in range(num):
        data = a_request(rng)
        if rng.random() < 0.5:
            data = garbage.turned_over(rng, data)
        try:
            while (missing := num_missing(data)) > 0:
                assert missing <= REQUEST.size + 255 + 128
                data += rng.randbytes(missing)
        except ProtocolError:
            continue
        assert isinstance(unpack(data), Request)
        whole += 1
    assert whole > num // 10


def test_hostile_requests_with_and_without_a_ticket_change_nothing(tmp_path):
    """From a node of the run, whose tickets are right, as from strangers."""

    def attack(address: str, digest: bytes, secret: str, seed: int) -> int:
        host, _, port = address.rpartition(":")
        rng, sent = random.Random(seed), 0
        while sent < 5_000:
            with socket.create_connection((host, int(port)), 5) as sock:
                data = [a_request(rng, digest, secret) for _ in range(10)]
                try:
                    sock.sendall(b"".join(data))
                    reset = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                except OSError:
                    pass  # closed at the first of them
                sent += len(data)
        return sent

    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=2)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            digest, address = bytes.fromhex(version.digest), server.addresses[0]
            await asyncio.to_thread(attack, address, digest, server.secret, 0)
            before = resident_bytes()
            attacks = [
                asyncio.to_thread(attack, address, digest, secret, k)
                for k, secret in enumerate(("", "", server.secret, server.secret), 1)
            ]
            await asyncio.gather(*attacks)
            await pull(version, [source(server)], tmp_path / "pulled")
            assert resident_bytes() - before < MAX_GROWTH_BYTES
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_source_that_answers_with_garbage_costs_nothing_but_its_place(tmp_path):
    rng = random.Random(2)
    num_sent = 0

    async def mad(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        match request.what:
            case _ if rng.random() < 0.2:
                writer.write(garbage.random_bytes(rng, 600) or b"?")
            case b"h":
                num_sent += 1
                known = Holdings(
                    rng.randrange(1 << 64), rng.randrange(1 << 6), rng.randrange(1 << 6)
                )
                writer.write(PART + known.pack(6 * BUCKET_BYTES))
                writer.write(PART + bytes([255] * rng.randrange(50_000)))
            case b"m":
                writer.write(DATA + rng.randbytes(rng.choice([1, 100, 100_000])))
            case _:
                writer.write(rng.choice([b"q", b"d", b"n", b"b"]) + rng.randbytes(1000))
        await writer.drain()
        if rng.random() < 0.5:
            writer.close()

    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=6)
        async with (
            holder(mad) as address,
            serving(version, max_bytes_per_s=12e6) as trainer,
            asyncio.timeout(DEADLINE_S),
        ):
            before = resident_bytes()
            madmen = [WeightsSource(f"mad-{k}", (address,), "t") for k in range(4)]
            stats = await pull(version, [*madmen, source(trainer)], tmp_path / "pulled")
            assert stats.by_source["trainer"] > 0
            assert resident_bytes() - before < MAX_GROWTH_BYTES
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())
    assert num_sent >= 4


def test_the_server_has_a_secret_of_its_own_in_every_process():
    async def secrets() -> set[str]:
        return {WeightServer().secret for _ in range(3)}

    assert len(asyncio.run(secrets())) == 3
