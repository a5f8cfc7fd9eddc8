"""Requests of tools to a running coordinator: watch it, drain a node, stop the run. Decides
nothing."""

import os
import time
from collections.abc import AsyncGenerator

from lightrl.errors import PeerUnreachable
from lightrl.messages.nodes import Drain
from lightrl.messages.snapshot import Snapshot, Watch
from lightrl.system.timeouts import patient_timeout
from lightrl.transport.link import Link

ANSWER_S = 3.0  # a live coordinator answers a Watch sooner
RENEW_S = 2.0  # between two Watch messages of a watcher


async def watch(address: str, every_s: float, key: str) -> AsyncGenerator[Snapshot, None]:
    """Yield snapshots of the run at `address`, now and every `every_s` seconds; 0 = just one.

    Raises WrongKey, and PeerUnreachable if the coordinator does not answer or becomes silent.
    """
    link = await Link.connect(address, _name(), key, ANSWER_S)
    renewed_at = -RENEW_S
    try:
        while True:
            if time.monotonic() - renewed_at >= RENEW_S:
                renewed_at = time.monotonic()
                link.send(Watch(every_s))
            for snapshot in await _snapshots(link, address, every_s):
                yield snapshot
            if every_s == 0:
                return
    finally:
        link.close()


async def drain(address: str, node: str, reason: str, key: str) -> None:
    """Ask the coordinator to drain `node`; "*" stops the run. Returns when it has received that."""
    link = await Link.connect(address, _name(), key, ANSWER_S)
    try:
        link.send(Drain(node, reason))
        link.send(Watch(0))
        await _snapshots(link, address, 0)
    finally:
        link.close()


async def _snapshots(link: Link, address: str, every_s: float) -> list[Snapshot]:
    try:
        async with patient_timeout(ANSWER_S + 2 * every_s):
            messages = await link.receive()
    except TimeoutError:
        raise PeerUnreachable(f"{address}: the coordinator does not answer") from None
    return [m for m in messages if isinstance(m, Snapshot)]


def _name() -> str:
    return f"tool-{os.getpid()}"
