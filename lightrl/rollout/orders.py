"""The commands to one engine process, one after the other: load a version, sleep, wake; and the
reports of how that went.

Owns the order of these commands. `weights.py` has the versions, `turns.py` decides which process
has the devices.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightrl.engine.base import EngineFailed, EngineLoaded, EngineSlept, LoadWeights, Sleep, Wake
from lightrl.engine.start import EngineChild
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.message import Message
from lightrl.messages.weights import PublishWeights, WeightsFailed
from lightrl.rollout.broadcast import BroadcastMember
from lightrl.rollout.fetched import Announced, Fetched, are_same, confirmation
from lightrl.rollout.state import EngineChange, EngineState
from lightrl.rollout.turns import Turns
from lightrl.rollout.weights import NodeWeights
from lightrl.system.child import ChildDied
from lightrl.system.timeouts import patient_timeout

if TYPE_CHECKING:
    from lightrl.rollout.agent import RolloutAgent

logger = logging.getLogger(__name__)


class EngineOrders:
    """Sends commands to one engine, and reports how they went. `run` in a task; the engine's
    answers are put into `answers`."""

    def __init__(
        self,
        owner: "RolloutAgent",
        engine: EngineChild,
        weights: NodeWeights,
        member: BroadcastMember,
        turns: Turns,
        send: Callable[[Message], None],
    ) -> None:
        self.answers = asyncio.Queue[EngineLoaded | EngineFailed | EngineSlept]()
        self._owner = owner
        self._engine = engine
        self._weights = weights
        self._member = member
        self._turns = turns
        self._send = send

    async def run(self, started: asyncio.Event) -> None:
        """Once the engine has started: load the newest version that is here, while this node has
        the devices. Raises ChildDied if the engine wakes and cannot load a version."""
        await started.wait()
        while True:
            if self._turns.due.is_set():
                await self._sleep()
            elif not self._turns.ours.is_set():
                await self._turns.ours.wait()
            elif self._weights.is_next.is_set():
                fetched = await self._weights.next()
                try:
                    await self._load(fetched)
                finally:
                    self._weights.loaded()
            else:
                await _either(self._weights.is_next, self._turns.due)

    async def _sleep(self) -> None:
        """Running responses are aborted: the engine sends their last tokens before it sleeps."""
        if self._owner.state is EngineState.ASLEEP:
            self._turns.slept(self._turns.freed_bytes)
            return
        self._engine.send(Sleep())
        self._owner.move(EngineChange.SLEEP_ORDERED)
        answer = await self.answers.get()
        assert isinstance(answer, EngineSlept)
        self._turns.slept(answer.freed_bytes)

    async def _load(self, fetched: Fetched | Announced) -> None:
        """Order the engine to load a version, and report its answer to the coordinator."""
        offer, begun_at = fetched.offer, time.monotonic()
        if self._owner.serves == (offer.policy_version, offer.digest):
            return  # it has come by broadcast after all
        sleeps = self._owner.state is EngineState.ASLEEP
        if isinstance(fetched, Fetched):
            if sleeps:
                self._engine.send(Wake())
            self._engine.send(LoadWeights(fetched.file, offer.canary, fetched.base_file))
        elif not self._member.receive(fetched.file, offer):
            wanted = self._weights.wanted
            if wanted is not None and are_same(wanted, offer):  # else a newer one is on its way
                self._member.fail(offer, "no engine waits for it any more")
            return
        self._owner.move(EngineChange.LOAD_ORDERED)
        answer = await self._answer(offer)
        is_wanted = self._member.answered()
        match answer:
            case EngineLoaded():
                self._turns.loaded(sleeps)
                seconds = time.monotonic() - begun_at
                logger.debug("version %d: %.2f s to load", offer.policy_version, seconds)
                self._send(confirmation(answer, fetched, seconds))
            case EngineFailed(reason, is_dropped=True):
                if is_wanted:
                    self._member.fail(offer, reason)
            case EngineFailed(reason):
                if isinstance(fetched, Fetched):
                    self._weights.reject(fetched)  # the file may be what is wrong
                if sleeps:  # or the engine is: try another one
                    raise ChildDied(f"the engine woke, and {reason}")
                self._send(WeightsFailed(offer.policy_version, reason[:MAX_TEXT]))
            case _:
                raise AssertionError(answer)

    async def _answer(self, offer: PublishWeights) -> EngineLoaded | EngineFailed | EngineSlept:
        """Raises ChildDied if a version that the engine receives by broadcast takes too long."""
        if offer.group is None:
            return await self.answers.get()
        limit_s = self._member.limit_s(offer)
        try:
            async with patient_timeout(limit_s):
                return await self.answers.get()
        except TimeoutError:
            raise ChildDied(f"the engine hangs: no version within {limit_s:g} s") from None


async def _either(*events: asyncio.Event) -> None:
    """Wait until one of these events is set."""
    waits = [asyncio.create_task(event.wait(), name="wait") for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
