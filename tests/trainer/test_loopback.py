"""What torch opens authenticates nobody: no socket of a rank may be reached from another
machine."""

import asyncio
import ipaddress
import os
import socket
from pathlib import Path

import pytest

from lightrl.trainer.batch import micro_batches
from lightrl.trainer.protocol import Accumulate, Done, RankStarted, Save, Saved, Update

DEADLINE_S = 110

pytestmark = [
    pytest.mark.usefixtures("warm_ranks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads sockets from /proc"),
]


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Of "0100007F:1F90", or four such words: each is in the byte order of this machine."""
    words = bytes.fromhex(text.partition(":")[0])
    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    address = ipaddress.ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address


def bound_to(pid: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The local address of each TCP socket of a process."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor) if descriptor.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        found += [address_of(fields[1]) for fields in map(str.split, lines) if fields[9] in inodes]
    return found


def test_no_socket_of_two_ranks_is_open_beyond_loopback(
    start, processes, samples, tmp_path, monkeypatch
):
    """Neither while they join, train a step and save, nor because the environment says so."""
    others = [name for _, name in socket.if_nameindex() if name not in {"lo", "lo0"}]
    up = [n for n in others if Path(f"/sys/class/net/{n}/operstate").read_text().strip() == "up"]
    if up:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", up[0])
    path = tmp_path / "run" / "checkpoints" / "step_1"
    seen = []

    def look(ranks):
        seen.append([bound_to(rank.pid) for rank in ranks])

    async def run():
        async with processes(start(), world=2) as ranks, asyncio.timeout(DEADLINE_S):
            assert all([isinstance(await rank.receive(), RankStarted) for rank in ranks])
            look(ranks)
            tokens = sum(len(s.token_ids) // 4 for s in samples)
            for rank, batches in zip(ranks, micro_batches(samples, 2, 60), strict=True):
                rank.send(Accumulate(0, batches))
                rank.send(Update(0, len(samples), tokens, 1))
            for rank in ranks:
                for _ in range(2):
                    await rank.receive()
            look(ranks)
            for rank in ranks:
                rank.send(Save(1, str(path)))
            assert [await rank.receive() for rank in ranks] == [Done(1)] * 2
            assert await ranks[0].receive() == Saved(str(path))
            look(ranks)

    asyncio.run(run())
    assert all(addresses for sets in seen for addresses in sets)  # gloo has some
    assert all(a.is_loopback for sets in seen for addresses in sets for a in addresses), seen
