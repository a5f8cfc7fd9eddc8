"""Pulling weights over real sockets: equality, and every way in which a transfer goes wrong."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightrl.errors import WeightsError
from lightrl.messages.weights import WeightsProgress, WeightsSource
from lightrl.system.addresses import join_address
from lightrl.tickets import pull_ticket
from lightrl.weights.machine.local import partial_path
from lightrl.weights.pull.transfer import Pull
from lightrl.weights.serve.request import ASK_DATA, ASK_MANIFEST, BUSY, DATA, Request
from lightrl.weights.serve.send import IDLE_LIMIT_S
from lightrl.weights.serve.server import MAX_HELD, MAX_OF_A_NODE, WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import VersionFile, read_manifest
from tests.support.relay import EVERYTHING, Relay, address_of, bound_socket
from tests.support.tiers import e2e
from tests.support.versions import NODE, make_version, pull, serving, source, wanted

DEADLINE_S = 60


def flip_bit(path: Path, position: int) -> Path:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    wrong = path.with_name(path.name + ".wrong")
    wrong.write_bytes(data)
    return wrong


def test_a_pulled_version_equals_the_served_one(tmp_path):
    told: list[WeightsProgress] = []

    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=9)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            one = Pull(wanted(version), NODE, tmp_path / "pulled", on_progress=told.append)
            one.add_sources([source(server)])
            stats = await one.run()
        assert stats.num_bytes == version.num_bytes
        assert stats.by_source == {"trainer": version.num_bytes}
        assert stats.peer_bytes == 0
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()
        assert read_manifest(one.file) == one.manifest
        assert not partial_path(tmp_path / "pulled").exists()
        assert {(p.policy_version, p.total_bytes) for p in told} == {(1, version.num_bytes)}

    asyncio.run(scenario())


def test_a_version_of_less_than_a_bucket_and_one_with_a_short_last_bucket(tmp_path):
    async def scenario(num: int, size: int) -> None:
        path = tmp_path / f"v{num}"
        version = make_version(path, num_buckets=num, bucket=size)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            await pull(version, [source(server)], tmp_path / f"pulled{num}")
        assert (tmp_path / f"pulled{num}").read_bytes() == path.read_bytes()

    asyncio.run(scenario(1, 1))
    asyncio.run(scenario(3, BUCKET_BYTES - 192))


def test_several_pullers_at_once_each_get_the_version(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=4)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            pulls = [
                pull(version, [source(server, f"n{k}")], tmp_path / f"p{k}", node=f"n{k}")
                for k in range(6)
            ]
            await asyncio.gather(*pulls)
        for k in range(6):
            assert (tmp_path / f"p{k}").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_bucket_on_a_connection_that_is_cut_is_asked_for_again(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1, bucket=1 << 20)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            relay = Relay(server.addresses[0], lambda n: 300_000 if n < 2 else EVERYTHING)
            async with relay as address:
                sources = [source(server, via=address)]
                stats = await pull(version, sources, tmp_path / "pulled")
        assert relay.num_connections == 3
        assert 500_000 < stats.num_bytes - version.num_bytes < 600_000
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_who_sends_wrong_bytes_is_named_and_asked_no_more(tmp_path):
    bad: list[tuple[str, str]] = []

    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=6)
        wrong = make_wrong(version, range(6))
        async with serving(wrong) as liar, serving(version) as good, asyncio.timeout(DEADLINE_S):
            sources = [source(liar, name="liar"), source(good)]
            stats = await pull(
                version, sources, tmp_path / "pulled", streams=1,
                on_bad=lambda node, reason: bad.append((node, reason)),
            )  # fmt: skip
        [(node, reason)] = bad
        assert node == "liar"
        assert reason.endswith("digest differs")
        assert stats.by_source == {"liar": BUCKET_BYTES, "trainer": version.num_bytes}
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def make_wrong(version: VersionFile, buckets: Iterable[int]) -> VersionFile:
    """The same version as it says, with other bytes."""
    path = Path(version.path)
    wrong = path
    for i in buckets:
        wrong = flip_bit(wrong, i * BUCKET_BYTES + 17)
    return replace(version, path=str(wrong))


def test_a_version_corrupted_everywhere_never_appears_and_its_good_buckets_are_kept(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        async with (
            serving(make_wrong(version, [3])) as server,
            asyncio.timeout(DEADLINE_S),
        ):
            with pytest.raises(WeightsError, match=r"no source .* bucket 3: digest differs"):
                await pull(version, [source(server)], tmp_path / "pulled", streams=1)
        assert not (tmp_path / "pulled").exists()
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            stats = await pull(version, [source(server)], tmp_path / "pulled")
        assert BUCKET_BYTES <= stats.num_bytes < version.num_bytes  # what was missing
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_leftovers_of_another_version_are_replaced(tmp_path):
    async def scenario() -> None:
        make_version(tmp_path / "pulled.part", policy_version=1, num_buckets=6)
        version = make_version(tmp_path / "v2", policy_version=2)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            stats = await pull(version, [source(server, NODE, 2)], tmp_path / "pulled")
        assert stats.num_bytes == version.num_bytes
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v2").read_bytes()

    asyncio.run(scenario())


def test_a_dead_source_is_passed_over(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        with bound_socket() as closed:
            dead = address_of(closed)
            async with serving(version) as good, asyncio.timeout(DEADLINE_S):
                gone = source(good, via=dead, name="gone")
                await pull(version, [gone, source(good)], tmp_path / "pulled")
                with pytest.raises(
                    WeightsError, match=f"nothing arrived for 2 s; last {dead}: .*refused"
                ):
                    await pull(version, [gone], tmp_path / "other", timeout_s=2)
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()
        assert not (tmp_path / "other").exists()

    asyncio.run(scenario())


def test_a_source_that_comes_late_is_waited_for(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        late = bound_socket()
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            sources = [source(server, via=address_of(late))]
            waiting = asyncio.create_task(pull(version, sources, tmp_path / "pulled"))
            with pytest.raises(WeightsError, match="refused"):
                await pull(version, sources, tmp_path / "impatient", timeout_s=0.8)
            assert not waiting.done()
            async with Relay(server.addresses[0], lambda _: EVERYTHING, sock=late):
                await waiting
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_slow_transfer_may_take_longer_than_the_limit_for_silence(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1, bucket=1 << 20)
        async with (
            serving(version, max_bytes_per_s=1e6) as server,
            asyncio.timeout(DEADLINE_S),
        ):
            stats = await pull(version, [source(server)], tmp_path / "pulled", timeout_s=0.6)
        assert stats.num_bytes == 1 << 20
        assert stats.seconds > 0.6

    asyncio.run(scenario())


def test_more_pullers_than_places_all_get_the_version(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        async with serving(version, max_connections=2) as server, asyncio.timeout(DEADLINE_S):
            pulls = [
                pull(
                    version, [source(server, f"n{k}")], tmp_path / f"p{k}",
                    node=f"n{k}", timeout_s=8,
                )
                for k in range(6)
            ]  # fmt: skip
            await asyncio.gather(*pulls)
        for k in range(6):
            assert (tmp_path / f"p{k}").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "kind",
    ["shorter", "stolen", "forged", *e2e(["the secret", "longer", "wrong", "another version's"])],
)
def test_a_wrong_ticket_gets_nothing(tmp_path, kind):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            right = source(server)
            tickets = {
                "the secret": server.secret,
                "shorter": right.ticket[:-1],
                "longer": right.ticket + "0",
                "wrong": "f" * 128,
                "stolen": source(server, "rollout-1").ticket,
                "another version's": source(server, NODE, 2).ticket,
                "forged": pull_ticket("c0ffef" * 6, NODE, 1),
            }
            sources = [replace(right, ticket=tickets[kind])]
            with pytest.raises(WeightsError, match="closed the connection"):
                await pull(version, sources, tmp_path / "pulled")
        assert not (tmp_path / "pulled").exists()

    asyncio.run(scenario())


def test_a_ticket_of_another_holder_or_of_what_is_held_no_more_gets_nothing(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1)
        newer = make_version(tmp_path / "v2", policy_version=2, num_buckets=1)
        async with serving(version) as one, serving(version) as other, asyncio.timeout(DEADLINE_S):
            sources = [source(one, via=other.addresses[0])]
            with pytest.raises(WeightsError, match="closed the connection"):
                await pull(version, sources, tmp_path / "pulled")
            await one.retire(version.digest)
            one.serve(newer)
            with pytest.raises(WeightsError, match="nothing arrived for 1 s"):
                await pull(version, [source(one)], tmp_path / "pulled", timeout_s=1)
            # a ticket for the old version does not get the new one
            asked = replace(newer, policy_version=1)
            with pytest.raises(WeightsError, match="nothing arrived for 1 s"):
                await pull(asked, [source(one)], tmp_path / "pulled", timeout_s=1)

    asyncio.run(scenario())


def test_equal_weights_of_two_versions_are_one_thing_with_two_tickets(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1)
        again = replace(version, policy_version=2)
        async with serving(version, again) as server, asyncio.timeout(DEADLINE_S):
            await pull(version, [source(server)], tmp_path / "one")
            await pull(again, [source(server, NODE, 2)], tmp_path / "two")

    asyncio.run(scenario())


def ask(
    server: WeightServer, version: VersionFile, offset: int, size: int, **changes: Any
) -> bytes:
    ticket = source(server, changes.get("node", NODE), changes.get("policy_version", 1)).ticket
    given: dict[str, Any] = {
        "what": ASK_DATA,
        "digest": bytes.fromhex(version.digest),
        "policy_version": 1,
        "offset": offset,
        "size": size,
        "node": NODE,
        **changes,
    }
    node = given.pop("node").encode()
    return Request(node=node, ticket=ticket.encode(), **given).pack()


@pytest.mark.parametrize(
    "kind",
    ["http", "wraps", "ticket", *e2e(["too long", "the manifest, too long", "no such thing"])],
)
def test_a_strange_request_closes_the_connection_and_the_server_lives_on(tmp_path, kind):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1)
        async with serving(version) as server, asyncio.timeout(IDLE_LIMIT_S / 2):
            size = version.num_bytes
            requests = {
                "http": b"GET / HTTP/1.1\r\nHost: weights\r\n\r\n" + b"x" * 128,
                "too long": ask(server, version, 0, size + 1),
                "wraps": ask(server, version, 2**64 - 8, 16),
                "the manifest, too long": ask(server, version, 0, 1 << 20, what=ASK_MANIFEST),
                "no such thing": ask(server, version, 0, 16, what=b"?"),
                "ticket": ask(server, version, 0, 16)[:-6] + b"\xff" * 6,
            }
            host, _, port = server.addresses[0].rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(requests[kind])
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()
            await pull(version, [source(server)], tmp_path / "pulled")

    asyncio.run(scenario())


def test_what_is_served_may_lose_its_name(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        data = (tmp_path / "v1").read_bytes()
        asked = wanted(version)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            for path in (version.path, version.manifest_path):
                os.unlink(path)
            one = Pull(asked, NODE, tmp_path / "pulled")
            one.add_sources([source(server)])
            await one.run()
        assert (tmp_path / "pulled").read_bytes() == data

    asyncio.run(scenario())


def test_a_bounded_number_of_things_is_served(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1, bucket=64)
        server = WeightServer()
        for k in range(MAX_HELD):
            server.serve(replace(version, digest=f"{k:064x}"))
        with pytest.raises(WeightsError, match="64 versions are served"):
            server.serve(version)
        await server.retire(f"{0:064x}")
        server.serve(version)
        await server.close()

    asyncio.run(scenario())


def test_peers_that_never_read_do_not_keep_others_waiting(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=2)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            host, _, port = server.addresses[0].rpartition(":")
            with contextlib.ExitStack() as stack:
                for k in range(72):
                    sock = stack.enter_context(socket.create_connection((host, int(port))))
                    sock.sendall(ask(server, version, 0, version.num_bytes, node=f"bad-{k}"))
                stats = await pull(version, [source(server)], tmp_path / "pulled")
            # a second until they have stalled, and a busy machine
            assert stats.seconds < IDLE_LIMIT_S / 2

    asyncio.run(scenario())


def test_a_node_has_no_more_than_its_share_of_connections(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            host, _, port = server.addresses[0].rpartition(":")
            opened = []
            for _ in range(MAX_OF_A_NODE + 1):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(ask(server, version, 0, 1))
                opened.append((await reader.read(1), writer))
            assert [sign for sign, _ in opened] == [DATA] * MAX_OF_A_NODE + [BUSY]
            sources = [source(server, "another")]
            await pull(version, sources, tmp_path / "pulled", node="another")
            for _, writer in opened:
                writer.close()

    asyncio.run(scenario())


def test_a_silent_source_costs_no_more_than_the_time_limit(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, never answers
            address = join_address("127.0.0.1", silent.getsockname()[1])
            async with asyncio.timeout(IDLE_LIMIT_S / 2):
                sources = [WeightsSource("silent", (address,), "t")]
                with pytest.raises(WeightsError, match=r"nothing arrived for 0.2 s"):
                    await pull(version, sources, tmp_path / "pulled", timeout_s=0.2)

    asyncio.run(scenario())


def test_a_cancelled_pull_ends_at_once_and_leaves_no_version(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=4)
        async with serving(version) as server, asyncio.timeout(IDLE_LIMIT_S / 2):
            relay = Relay(server.addresses[0], lambda _: 100_000, released=asyncio.Event())
            async with relay as address:
                sources = [source(server, via=address)]
                pulling = asyncio.create_task(pull(version, sources, tmp_path / "pulled"))
                await relay.stalled.wait()
                pulling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pulling
        assert not (tmp_path / "pulled").exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(12))
def test_a_relay_that_closes_while_a_peer_connects_leaves_no_socket_open(turns):
    """A later test would collect it, and fail."""

    async def scenario() -> None:
        with bound_socket() as target:
            target.listen()
            async with Relay(address_of(target), lambda _: EVERYTHING) as address:
                host, _, port = address.rpartition(":")
                with socket.create_connection((host, int(port))):
                    for _ in range(turns):
                        await asyncio.sleep(0)

    asyncio.run(scenario())
    gc.collect()


@pytest.mark.parametrize("turns", range(12))
def test_a_server_that_closes_while_a_peer_connects_leaves_no_socket_open(turns):
    async def scenario() -> None:
        server = WeightServer()
        [address] = await server.start("127.0.0.1")
        host, _, port = address.rpartition(":")
        await asyncio.sleep(0)
        with socket.create_connection((host, int(port))):
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()

    asyncio.run(scenario())
    gc.collect()  # which would find it, and warn


def test_a_server_listens_where_it_is_told_or_says_why_not(tmp_path):
    async def scenario() -> None:
        with bound_socket() as free:
            port = free.getsockname()[1]
        version = make_version(tmp_path / "v1", num_buckets=1)
        first, second = WeightServer(), WeightServer()
        hosts = ("127.0.0.1", "127.0.0.2")
        addresses = (f"127.0.0.1:{port}", f"127.0.0.2:{port}")
        assert await first.start(hosts, port) == addresses == first.addresses
        with pytest.raises(
            WeightsError, match=f"cannot serve weights on 127.0.0.2:{port}: Address already"
        ):
            await second.start(("127.0.0.3", "127.0.0.2"), port)
        first.serve(version)
        for address in addresses:
            await pull(version, [source(first, via=address)], tmp_path / address)
        await pull(version, [source(first)], tmp_path / "both")
        await first.close()
        # at once, whatever has just been closed there
        assert await second.start("127.0.0.1", port)
        await second.close()

    asyncio.run(scenario())


def test_publishing_a_file_that_is_not_the_version_is_refused(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        server = WeightServer()
        os.truncate(tmp_path / "v1", 5)
        with pytest.raises(WeightsError, match="has 5 bytes, not "):
            server.serve(version)
        with pytest.raises(WeightsError, match="nowhere: cannot be served: No such"):
            server.serve(replace(version, path=str(tmp_path / "nowhere")))
        await server.close()

    asyncio.run(scenario())
