"""Pulling weights over real sockets: equality, and every way in which a transfer goes wrong."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lightrl.errors import WeightsError
from lightrl.system.addresses import join_address
from lightrl.tickets import pull_ticket
from lightrl.weights import manifest as m
from lightrl.weights.pull import WeightServer
from lightrl.weights.pull import pull as pull_as
from lightrl.weights.request import BUSY, DATA, Request
from lightrl.weights.serve import IDLE_LIMIT_S, MAX_OF_A_NODE, TURNS_AT_ONCE
from tests.support.versions import BUCKET, NODE, SECRET, TICKET, make_version, pull, serving


def flip_bit(path: Path, position: int) -> Path:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    wrong = path.with_name(path.name + ".wrong")
    wrong.write_bytes(data)
    return wrong


def bound_socket() -> socket.socket:
    """It refuses connections until somebody listens on it."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def address_of(sock: socket.socket) -> str:
    return join_address("127.0.0.1", sock.getsockname()[1])


DEADLINE_S = 60


class Relay:
    """Sits between a puller and a holder; `allow(n)` says how many reply bytes of connection n
    pass."""

    def __init__(
        self,
        target: str,
        allow: Callable[[int], int],
        released: asyncio.Event | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        self._sock = sock  # bound already
        self._target = target
        self._allow = allow
        self._released = released  # None: cut there; else wait for it, then let everything pass
        self.stalled = asyncio.Event()
        self.num_connections = 0

    async def __aenter__(self) -> str:
        self._tasks = set[asyncio.Task[None]]()
        if self._sock is None:
            self._sock = bound_socket()
        self._server = await asyncio.start_server(self._serve, sock=self._sock)
        return address_of(self._sock)

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        left = self._allow(self.num_connections)
        self.num_connections += 1
        host, _, port = self._target.rpartition(":")
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            writer.close()
            return

        async def upstream() -> None:
            while data := await reader.read(1 << 16):
                up_writer.write(data)

        asking = asyncio.create_task(upstream())
        try:
            while data := await up_reader.read(1 << 16):
                passed = data[:left]
                writer.write(passed)
                left -= len(passed)
                if left == 0:
                    self.stalled.set()
                    if self._released is None:
                        break
                    await self._released.wait()
                    writer.write(data[len(passed) :])
                    left = 1 << 62
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            asking.cancel()
            for w in (writer, up_writer):
                w.close()
                with contextlib.suppress(ConnectionError):
                    await w.wait_closed()


def test_a_pulled_version_equals_the_served_one(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=9)
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(20):
            stats = await pull(manifest, [address], SECRET, tmp_path / "pulled")
        assert stats.num_bytes == m.num_bytes(manifest)
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()
        assert sum(1 for _ in m.read_buckets(tmp_path / "pulled", manifest)) == 9
        assert not (tmp_path / "pulled.part").exists()

    asyncio.run(scenario())


def test_several_pullers_at_once_each_get_the_version(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=8)
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(20):
            pulls = [
                pull(manifest, [address], SECRET, tmp_path / f"p{k}", node=f"n{k}")
                for k in range(6)
            ]
            await asyncio.gather(*pulls)
        for k in range(6):
            assert (tmp_path / f"p{k}").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_cut_connection_resumes_where_it_broke_off(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=1, bucket=1 << 20)
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(20):
            relay = Relay(address, lambda n: 300_000 if n < 3 else 1 << 62)
            async with relay as holder:
                stats = await pull(manifest, [holder], SECRET, tmp_path / "pulled")
        assert relay.num_connections == 4
        assert stats.num_bytes == m.num_bytes(manifest)  # no byte twice
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_corrupted_bucket_is_fetched_again_from_another_holder(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1")
        wrong = flip_bit(tmp_path / "v1", position=2 * BUCKET + 17)
        async with (
            serving(manifest, wrong) as bad,
            serving(manifest, tmp_path / "v1") as good,
            asyncio.timeout(20),
        ):
            stats = await pull(manifest, [bad, good], SECRET, tmp_path / "pulled", streams=1)
        assert stats.num_bytes == m.num_bytes(manifest) + BUCKET
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_version_corrupted_everywhere_never_appears_and_its_good_buckets_are_kept(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1")
        wrong = flip_bit(tmp_path / "v1", position=3 * BUCKET)
        async with serving(manifest, wrong) as bad, asyncio.timeout(20):
            with pytest.raises(WeightsError, match="version 1: bucket 3: digest differs"):
                await pull(manifest, [bad], SECRET, tmp_path / "pulled", streams=1)
        assert not (tmp_path / "pulled").exists()
        async with serving(manifest, tmp_path / "v1") as good, asyncio.timeout(20):
            stats = await pull(manifest, [good], SECRET, tmp_path / "pulled")
        assert stats.num_bytes == BUCKET  # only the bucket that was missing
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_leftovers_of_another_version_are_replaced(tmp_path):
    async def scenario() -> None:
        make_version(tmp_path / "pulled.part", policy_version=1, num_buckets=6)
        manifest = make_version(tmp_path / "v2", policy_version=2)
        async with serving(manifest, tmp_path / "v2") as address, asyncio.timeout(20):
            stats = await pull(manifest, [address], SECRET, tmp_path / "pulled")
        assert stats.num_bytes == m.num_bytes(manifest)
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v2").read_bytes()

    asyncio.run(scenario())


def test_a_dead_holder_is_passed_over(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1")
        with bound_socket() as closed:
            dead = address_of(closed)
            async with serving(manifest, tmp_path / "v1") as good, asyncio.timeout(20):
                await pull(manifest, [dead, good], SECRET, tmp_path / "pulled")
                with pytest.raises(
                    WeightsError, match=f"nothing arrived for 2 s; last {dead}: .*refused"
                ):
                    await pull(manifest, [dead], SECRET, tmp_path / "other", timeout_s=2)
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()
        assert not (tmp_path / "other").exists()

    asyncio.run(scenario())


def test_a_holder_that_comes_late_is_waited_for(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1")
        late = bound_socket()
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(20):
            waiting = asyncio.create_task(
                pull(manifest, [address_of(late)], SECRET, tmp_path / "pulled")
            )
            with pytest.raises(WeightsError, match="refused"):
                await pull(
                    manifest, [address_of(late)], SECRET, tmp_path / "impatient", timeout_s=0.8
                )
            assert not waiting.done()
            async with Relay(address, lambda _: 1 << 62, sock=late):
                await waiting
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_slow_transfer_may_take_longer_than_the_limit_for_silence(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=1, bucket=1 << 20)
        async with (
            serving(manifest, tmp_path / "v1") as address,
            Relay(
                address, lambda _: 1 << 16
            ) as holder,  # 16 connections, a pause of 0.05 to 0.1 s after each
            asyncio.timeout(20),
        ):
            stats = await pull(manifest, [holder], SECRET, tmp_path / "pulled", timeout_s=0.6)
        assert stats.num_bytes == 1 << 20
        assert stats.seconds > 0.6

    asyncio.run(scenario())


def test_more_pullers_than_places_all_get_the_version(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1")
        async with (
            serving(manifest, tmp_path / "v1", max_connections=2) as address,
            asyncio.timeout(DEADLINE_S),
        ):
            pulls = [
                pull(manifest, [address], SECRET, tmp_path / f"p{k}", node=f"n{k}", timeout_s=8)
                for k in range(6)
            ]
            await asyncio.gather(*pulls)
        for k in range(6):
            assert (tmp_path / f"p{k}").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("node", "ticket"),
    [
        (NODE, SECRET),
        (NODE, TICKET[:-1]),
        (NODE, TICKET + "0"),
        (NODE, "f" * 128),
        ("rollout-1", TICKET),
        (NODE, pull_ticket(SECRET, "rollout-1", 1)),
        (NODE, pull_ticket(SECRET, NODE, 2)),
        (NODE, pull_ticket("c0ffef" * 6, NODE, 1)),
    ],
    ids=[
        "the secret",
        "shorter",
        "longer",
        "wrong",
        "stolen",
        "another's",
        "another version's",
        "forged",
    ],
)
def test_a_wrong_ticket_gets_nothing(tmp_path, node, ticket):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=1)
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(20):
            with pytest.raises(WeightsError, match="closed the connection"):
                await pull_as(manifest, [address], ticket, tmp_path / "pulled", node=node)
        assert not (tmp_path / "pulled").exists()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: weights\r\n\r\n" + b"x" * 64,
        Request(7, 0, 16, NODE.encode(), TICKET.encode()).pack(),  # never published
        Request(1, 0, BUCKET + 1, NODE.encode(), TICKET.encode()).pack(),  # beyond the end
        Request(1, 2**64 - 8, 16, NODE.encode(), TICKET.encode()).pack(),  # wraps around
        Request(1, 0, 16, NODE.encode(), TICKET.encode()).pack()[:-6] + b"\xff" * 6,
    ],
    ids=["http", "version", "too long", "wraps", "ticket"],
)
def test_a_strange_request_closes_the_connection_and_the_server_lives_on(tmp_path, request_bytes):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=1)
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(IDLE_LIMIT_S / 2):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request_bytes)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()
            await pull(manifest, [address], SECRET, tmp_path / "pulled")

    asyncio.run(scenario())


def test_the_last_two_versions_are_served_even_if_their_files_are_gone(tmp_path):
    async def scenario() -> None:
        server = WeightServer()
        address = await server.start("127.0.0.1")
        manifests = {}
        for version in (1, 2, 3):
            path = tmp_path / f"v{version}"
            manifests[version] = make_version(path, version)
            server.publish(manifests[version], path, f"{version:032x}")
            path.unlink()
        async with asyncio.timeout(20):
            for version in (2, 3):
                await pull(
                    manifests[version], [address], f"{version:032x}", tmp_path / f"p{version}"
                )
                assert list(m.read_buckets(tmp_path / f"p{version}", manifests[version]))
            with pytest.raises(WeightsError, match="no holder"):
                await pull(manifests[1], [address], f"{1:032x}", tmp_path / "p1")
        await server.close()

    asyncio.run(scenario())


def test_a_transfer_under_way_survives_the_retirement_of_its_version(tmp_path):
    async def scenario() -> None:
        server = WeightServer()
        address = await server.start("127.0.0.1")
        # more than sockets buffer
        manifest = make_version(tmp_path / "v1", num_buckets=1, bucket=16 << 20)
        server.publish(manifest, tmp_path / "v1", SECRET)
        released = asyncio.Event()
        relay = Relay(address, lambda _: 1000, released)
        async with asyncio.timeout(20), relay as holder:
            pulling = asyncio.create_task(pull(manifest, [holder], SECRET, tmp_path / "pulled"))
            await relay.stalled.wait()
            for version in (2, 3):
                server.publish(
                    make_version(tmp_path / f"v{version}", version),
                    tmp_path / f"v{version}",
                    TICKET,
                )
            released.set()
            await pulling
        assert relay.num_connections == 1
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()
        await server.close()

    asyncio.run(scenario())


def test_peers_that_never_read_do_not_keep_others_waiting(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=2, bucket=8 << 20)
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(20):
            host, _, port = address.rpartition(":")
            with contextlib.ExitStack() as stack:
                # more than are sent to at once, and than threads
                for k in range(TURNS_AT_ONCE + 8):
                    sock = stack.enter_context(socket.create_connection((host, int(port))))
                    ticket = pull_ticket(SECRET, f"bad-{k}", 1)
                    sock.sendall(
                        Request(1, 0, 16 << 20, f"bad-{k}".encode(), ticket.encode()).pack()
                    )
                stats = await pull(manifest, [address], SECRET, tmp_path / "pulled")
            # a second until they have stalled, and a busy machine
            assert stats.seconds < IDLE_LIMIT_S / 2

    asyncio.run(scenario())


def test_a_node_has_no_more_than_its_share_of_connections(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1")
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(DEADLINE_S):
            host, _, port = address.rpartition(":")
            opened = []
            for _ in range(MAX_OF_A_NODE + 1):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(Request(1, 0, 1, NODE.encode(), TICKET.encode()).pack())
                opened.append((await reader.read(1), writer))
            assert [sign for sign, _ in opened] == [DATA] * MAX_OF_A_NODE + [BUSY]
            await pull(manifest, [address], SECRET, tmp_path / "pulled", node="another")
            for _, writer in opened:
                writer.close()

    asyncio.run(scenario())


def test_a_silent_holder_costs_no_more_than_the_time_limit(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=1)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, never answers
            holder = join_address("127.0.0.1", silent.getsockname()[1])
            async with asyncio.timeout(IDLE_LIMIT_S / 2):
                with pytest.raises(WeightsError, match=r"nothing arrived for 0.2 s"):
                    await pull(manifest, [holder], SECRET, tmp_path / "pulled", timeout_s=0.2)

    asyncio.run(scenario())


def test_a_cancelled_pull_ends_at_once_and_leaves_no_version(tmp_path):
    async def scenario() -> None:
        manifest = make_version(tmp_path / "v1", num_buckets=4)
        async with serving(manifest, tmp_path / "v1") as address, asyncio.timeout(IDLE_LIMIT_S / 2):
            relay = Relay(address, lambda _: 1000, released=asyncio.Event())
            async with relay as holder:
                pulling = asyncio.create_task(pull(manifest, [holder], SECRET, tmp_path / "pulled"))
                await relay.stalled.wait()
                pulling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pulling
        assert not (tmp_path / "pulled").exists()

    asyncio.run(scenario())


def test_a_closing_server_cuts_its_transfers(tmp_path):
    async def scenario() -> None:
        # more than sockets buffer
        manifest = make_version(tmp_path / "v1", num_buckets=1, bucket=16 << 20)
        server = WeightServer()
        address = await server.start("127.0.0.1")
        server.publish(manifest, tmp_path / "v1", SECRET)
        released = asyncio.Event()
        relay = Relay(address, lambda _: 1000, released)
        async with asyncio.timeout(20), relay as holder:
            pulling = asyncio.create_task(pull(manifest, [holder], SECRET, tmp_path / "pulled"))
            await relay.stalled.wait()
            await server.close()
            released.set()
            with pytest.raises(WeightsError, match="no holder"):
                await pulling

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(5))
def test_a_server_that_closes_while_a_peer_connects_leaves_no_socket_open(turns):
    async def scenario() -> None:
        server = WeightServer()
        host, _, port = (await server.start("127.0.0.1")).rpartition(":")
        await asyncio.sleep(0)
        with socket.create_connection((host, int(port))):
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()

    asyncio.run(scenario())
    gc.collect()  # which would find it, and warn


@pytest.mark.parametrize(
    ("holders", "ticket", "reason"),
    [
        ((), TICKET, "nobody holds it"),
        (("host",), TICKET, "host:port"),
        (("a:1",), "", "not a ticket"),
    ],
)
def test_a_senseless_pull_is_refused(tmp_path, holders, ticket, reason):
    manifest = make_version(tmp_path / "v1", num_buckets=1)
    with pytest.raises(WeightsError, match=reason):
        asyncio.run(pull_as(manifest, holders, ticket, tmp_path / "pulled", node=NODE))
    assert not (tmp_path / "pulled.part").exists()


def test_a_server_listens_on_the_port_it_is_told_or_says_why_not(tmp_path):
    async def scenario() -> None:
        with bound_socket() as free:
            port = free.getsockname()[1]
        manifest = make_version(tmp_path / "v1", num_buckets=1)
        first, second = WeightServer(), WeightServer()
        assert await first.start("127.0.0.1", port) == f"127.0.0.1:{port}"
        with pytest.raises(
            WeightsError, match=f"cannot serve weights on 127.0.0.1:{port}: Address already"
        ):
            await second.start("127.0.0.1", port)
        first.publish(manifest, tmp_path / "v1", SECRET)
        await pull(manifest, [f"127.0.0.1:{port}"], SECRET, tmp_path / "pulled")
        await first.close()
        assert await second.start("127.0.0.1", port)  # at once, whatever has just been closed there
        await second.close()

    asyncio.run(scenario())


def test_publishing_a_file_that_is_not_the_version_is_refused(tmp_path):
    manifest = make_version(tmp_path / "v1")
    os.truncate(tmp_path / "v1", 5)
    with pytest.raises(WeightsError, match="has 5 bytes, its manifest says"):
        WeightServer().publish(manifest, tmp_path / "v1", SECRET)
    with pytest.raises(WeightsError, match="cannot be served"):
        WeightServer().publish(manifest, tmp_path / "nowhere", SECRET)
