"""Follow the progress of a run, also while its coordinator is restarting.

Records when something was observed. Sends nothing but Watch.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos_lib.plan import Phase
from chaos_lib.sharing_plan import SIDES, side
from chaos_lib.weights_plan import ON_NODE, nodes
from lightrl.client import ask
from lightrl.client.address import accepts, listening
from lightrl.errors import LightRLError
from lightrl.keys import KEY_FILE, reachable, read_key
from lightrl.messages.snapshot import NodeRow, Snapshot

EVERY_S = 0.05
SILENT_S = 1.0  # then the connection is made again
AGAIN_S = 0.1


@dataclass
class Mark:
    """The progress of the run at `at`, and the seconds until it proceeded."""

    at: float
    step: int
    tokens: int
    tokens_after_s: float | None = None
    step_after_s: float | None = None


class Watch:
    def __init__(self, run_dir: Path) -> None:
        self.last: Snapshot | None = None
        self._run_dir = run_dir
        self._seen_at = 0.0
        self._changed = asyncio.Event()
        self._marks: list[Mark] = []
        self._pulled: dict[str, int] = {}  # by node: the last version of which it had a part

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(LightRLError, TimeoutError, OSError):
                address = listening(self._run_dir)
                if address is not None and accepts(address):
                    await self._look(reachable(address), read_key(self._run_dir / KEY_FILE))
            await asyncio.sleep(AGAIN_S)

    async def _look(self, address: str, key: str) -> None:
        async with contextlib.aclosing(ask.watch(address, EVERY_S, key)) as snapshots:
            while True:
                async with asyncio.timeout(SILENT_S):
                    snapshot = await anext(snapshots)
                self.last, self._seen_at = snapshot, time.monotonic()
                self._note(snapshot)
                self._changed.set()

    @property
    def is_live(self) -> bool:
        return time.monotonic() - self._seen_at < SILENT_S

    @property
    def phase(self) -> str:
        return phase(self.last) if self.last is not None else "start"

    def mark(self) -> Mark:
        """Begins to watch for progress beyond this moment."""
        last = self.last
        here = (last.step, last.rollout_tokens) if last is not None else (0, 0)
        self._marks.append(Mark(time.monotonic(), *here))
        return self._marks[-1]

    async def until(self, step: int, wanted: Phase) -> None:
        """Returns when `step` steps are done and the run is in that phase, or further."""
        await self._until(lambda last: is_there(last, step, wanted))

    async def until_at(self, step: int, wanted: Phase, target: str) -> None:
        """As `until`, but nothing else than the phase will do: `target`, or any node if that is no
        rollout node, is in it."""
        await self._until(lambda last: self._is_at(last, step, wanted, target))

    async def until_trained(self, step: int, target: str) -> str:
        """Returns when a step is trained after that many, and a group can form with `target`, or
        with any node if that is none, and one more: the name of that one."""
        await self._until(lambda last: bool(self._other(last, step, target)))
        assert self.last is not None
        return self._other(self.last, step, target)

    async def until_published(self) -> None:
        """Returns when there is a newer version than now."""
        version = self.last.policy_version if self.last is not None else None
        await self._until(lambda last: last.policy_version != version)

    def phase_of(self, target: str) -> str:
        """What that node is at, or one of them if it is none; else the run."""
        if self.last is not None and (at := self._side(self.last, target)):
            return at
        rows = self.last.nodes if self.last is not None else ()
        meant = [n for n in rows if n.name == target or target not in nodes()]
        return next(filter(None, map(self._on_node, meant)), self.phase)

    async def _until(self, is_so: Callable[[Snapshot], bool]) -> None:
        while self.last is None or not is_so(self.last):
            self._changed.clear()
            await self._changed.wait()

    async def until_live(self) -> None:
        """Returns when the coordinator answers."""
        while not self.is_live:
            self._changed.clear()
            await self._changed.wait()

    def _is_at(self, last: Snapshot, step: int, wanted: Phase, target: str) -> bool:
        if last.step < step or not self.is_live:
            return False
        meant = [n for n in last.nodes if n.name == target or target not in nodes()]
        if wanted in SIDES:
            return self._side(last, target) == wanted
        if wanted in ON_NODE:
            return any(self._on_node(n) == wanted for n in meant)
        return wanted == "any" or phase(last) == wanted

    def _side(self, last: Snapshot, target: str) -> str:
        return side(last, target, phase(last) == "training")

    def _other(self, last: Snapshot, step: int, target: str) -> str:
        ready = [n.name for n in last.nodes if n.name in nodes() and n.state == "ready"]
        others = [name for name in ready if name != target]
        is_there = target in ready or (target not in nodes() and len(ready) > 1)
        is_now = last.step >= step and self.is_live and phase(last) == "training"
        return others[-1] if is_now and is_there and others else ""

    def _on_node(self, node: NodeRow) -> str:
        """What it is at with the newest version; "" = nothing, or nothing yet."""
        if node.broadcast or node.weights is not None:
            return node.broadcast or "pulling"
        newest = self.last.policy_version if self.last is not None else None
        is_at_it = node.state in ("loading", "updating")
        return "loading" if is_at_it and self._pulled.get(node.name) == newest else ""

    def _note(self, snapshot: Snapshot) -> None:
        for node in snapshot.nodes:
            if node.weights is not None:
                self._pulled[node.name] = node.weights.policy_version
        now = time.monotonic()
        for mark in self._marks:
            if mark.tokens_after_s is None and snapshot.rollout_tokens > mark.tokens:
                mark.tokens_after_s = now - mark.at
            if mark.step_after_s is None and snapshot.step > mark.step:
                mark.step_after_s = now - mark.at


def is_there(last: Snapshot, step: int, wanted: Phase) -> bool:
    return last.step > step or (last.step == step and (wanted == "any" or phase(last) == wanted))


def phase(snapshot: Snapshot) -> str:
    """What the run is at, as far as a snapshot shows it."""
    if snapshot.policy_version is None:
        return "start"
    if snapshot.round_kind == "eval" or snapshot.state == "evaluating":
        return "evaluation"
    if any(n.state == "updating" for n in snapshot.nodes):
        return "publishing"
    if not snapshot.round_kind or snapshot.round_accepted == snapshot.round_needed:
        return "training"
    return "rollout"
