"""How long a round takes engines of a kind, by what their steps cost and what their caches hold.

Owns the estimate, no policy. All that run at an engine get a token a step; who does not fit into
its cache waits, and who grew out of it is preempted and computed anew, as vLLM does it. One engine
is played, that which has the longest response: the others have as much to do. What is drawn, sent
or scored meanwhile is left out.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightrl.messages.load import StepCosts

MAX_EVENTS = 20_000  # of the engine that is played; the rest goes on as it went until then
GOLDEN = 0.6180339887498949  # an order in which short and long ones come evenly
PRIOR_MEAN = 0.25  # of the longest response, where no length is known


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Engines that are alike. Example: EngineKind(4, 128, 50_000, StepCosts(0.01, 1e-4))."""

    count: int
    # of each: responses at once; tokens in its KV cache, 0 = all that come
    slots: int
    kv_tokens: int
    costs: StepCosts


def prior_lengths(count: int, longest: int) -> list[int]:
    """Of responses of which nothing is known: exponential, cut at the limit. Longest first."""
    mean = PRIOR_MEAN * longest
    shares = ((k + 0.5) / count for k in range(count))
    return [max(1, min(longest, round(-mean * math.log(share)))) for share in shares]


def round_s(engines: EngineKind, lengths: Sequence[int], prompt_tokens: int) -> float:
    """Seconds until responses of these lengths are done, all of which are there at the start."""
    mine = sorted(lengths, reverse=True)[:: engines.count]
    order = sorted(range(len(mine)), key=lambda k: k * GOLDEN % 1.0)
    return _Play(engines, deque((prompt_tokens, mine[k]) for k in order if mine[k])).seconds()


@dataclass(slots=True)
class _Runs:
    """`until` in tokens of the engine's clock."""

    held: int
    since: int
    until: int


class _Play:
    def __init__(self, engine: EngineKind, waiting: deque[tuple[int, int]]) -> None:
        """`waiting`: (tokens held, tokens to come)."""
        self._engine = engine
        self._waiting = waiting
        self._left = sum(n for _, n in waiting)
        self._running: list[_Runs] = []  # who began last is the last
        self._ends: list[int] = []  # a heap of clocks, also of some that were preempted
        self._clock = self._held = 0
        self._seconds = 0.0

    def seconds(self) -> float:
        whole = self._left
        for _ in range(MAX_EVENTS):
            if not (self._waiting or self._running):
                return self._seconds
            if not self._is_full():
                self._admit()
            self._advance()
        return self._seconds * whole / max(1, whole - self._left)

    def _is_full(self) -> bool:
        """Preempts until each that runs has room for a token; whether that took any."""
        capacity, preempts = self._engine.kv_tokens, False
        while capacity and self._held + len(self._running) > capacity and len(self._running) > 1:
            last = self._running.pop()
            held = last.held + self._clock - last.since
            self._held -= held
            self._waiting.appendleft((held, last.until - self._clock))
            preempts = True
        return preempts

    def _admit(self) -> None:
        engine, running, waiting = self._engine, self._running, self._waiting
        while waiting and len(running) < engine.slots:
            held, left = waiting[0]
            needed = self._held + held + len(running) + 1
            if running and 0 < engine.kv_tokens < needed:
                return
            waiting.popleft()
            running.append(_Runs(held, self._clock, self._clock + left))
            heapq.heappush(self._ends, self._clock + left)
            self._held += held
            self._seconds += engine.costs.prefill_s * held

    def _advance(self) -> None:
        """To the next end, or until the cache is full."""
        costs, batch = self._engine.costs, len(self._running)
        while self._ends[0] <= self._clock:
            heapq.heappop(self._ends)
        num = self._ends[0] - self._clock
        if self._engine.kv_tokens and batch > 1:
            num = min(num, max(1, (self._engine.kv_tokens - self._held) // batch))
        contexts = num * self._held + batch * num * (num - 1) / 2
        self._seconds += num * (costs.base_s + costs.response_s * batch) + costs.token_s * contexts
        self._clock += num
        self._held += num * batch
        self._left -= num * batch
        if self._ends[0] <= self._clock:
            ended = [r for r in self._running if r.until <= self._clock]
            self._held -= sum(r.held + self._clock - r.since for r in ended)
            self._running = [r for r in self._running if r.until > self._clock]
