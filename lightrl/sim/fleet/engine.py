"""The rollout engine of one node as a formula: what it decodes, when, and where its time goes.

It gets the time as an argument and returns when to call it again; it knows neither the core nor
other nodes. What a step costs: `inputs/hardware.py`.

All running responses decode in lock step, so one token clock per node gives the progress of each,
and the next finish is the head of a heap. k tokens for each of B responses that hold S tokens of
context take (k steps, each reads the context that the ones before it have made)

    (k * t0 * (1 + B (1 + w v) / half_batch) + kappa * (k S + B k (k - 1) / 2)) / E        seconds

where E tokens come of one forward pass with speculation (window w, v = cost of a verified token
relative to a decoded one); without it w = 0, E = 1. The cost of simulating is proportional to the
number of chunks, not of tokens.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from lightrl.messages.responses import FinishReason, ResponseTokens
from lightrl.sim.inputs.hardware import EngineProfile

INFINITE = math.inf
NEVER = 1 << 62  # tokens
PROMPT_BATCH = 16
FINISHED_SHARE = 5  # as of real engines: a finish waits at most chunk_s / 5


@dataclass(slots=True)
class Attempt:
    """One response at this node. While it runs it holds tokens0 + (clock - since) tokens."""

    response: str
    number: int
    # siblings share the prefill of their prompt
    prompt: str
    prompt_tokens: int
    tokens0: int
    final_tokens: int = 0
    # it ends at the limit, not with a stop token
    truncated: bool = False
    since: int = 0
    sent: int = 0
    # of its admission; -1 = it waits
    order: int = -1
    # tokens whose KV was here at its admission; None: no episode, whose KV is dropped
    num_cached: int | None = None

    def tokens(self, begin: int, end: int, reason: FinishReason | None = None) -> ResponseTokens:
        """Return the message with its tokens from `begin` to `end`."""
        zeros = blank(end - begin)
        cached = None if reason is None else self.num_cached
        return ResponseTokens(self.response, self.number, begin, zeros, zeros, reason, cached)


@lru_cache(maxsize=4096)
def blank(num_tokens: int) -> bytes:
    """Return int32 or float32 zeros: every simulated token is token 0 with logprob 0."""
    return bytes(4 * num_tokens)


@dataclass(slots=True)
class SimEngine:
    """Call `step` at `next_at`; every other call may change `next_at`. `times` sums to the time
    that has passed, times `width`."""

    profile: EngineProfile
    slots: int
    chunk_tokens: int
    now: float
    # False: tokens are sent only when a response has finished
    streams: bool = True
    # a finish is sent immediately with so few running, else with the next chunk
    prompt_batch: int = PROMPT_BATCH
    # a chunk is sent after this many seconds at the latest, a finish after a fifth of that
    chunk_s: float = INFINITE
    # machines that work as one
    width: int = 1
    next_at: float = INFINITE
    # state -> seconds
    times: dict[str, float] = field(default_factory=dict[str, float])
    num_preemptions: int = 0
    # sampled here
    num_tokens: int = 0
    prefilled_tokens: int = 0
    # seconds in which slots were in use, summed over slots
    slot_s: float = 0.0
    # the current state of an engine without work
    idle_label: str = "idle"
    # the current state of a machine that cannot decode: weights, train, ...
    held: str | None = None
    # oldest first
    running: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    waiting: deque[Attempt] = field(default_factory=deque[Attempt])
    # of episodes whose turn has ended: tokens in the KV cache while no other needs the memory and
    # the weights are the same; oldest first
    cached: dict[str, int] = field(default_factory=dict[str, int])
    # tokens that each running response has got here so far
    _clock: int = 0
    # when the newest of them was complete
    _at: float = 0.0
    # tokens in the KV cache
    _context: int = 0
    # clock of the next chunk
    _chunk_at: int = 0
    # finished and not sent
    _finished: list[Attempt] = field(default_factory=list[Attempt])
    # clock at which they are sent at the latest
    _finished_due: int = NEVER
    _ends: list[tuple[int, int, Attempt]] = field(default_factory=list[tuple[int, int, Attempt]])
    _order: int = 0
    # k tokens take _linear k + _square k^2 seconds
    _linear: float = 0.0
    _square: float = 0.0
    _forwards: dict[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]]
    )

    # Calls of the world

    def add(self, now: float, attempts: Iterable[Attempt]) -> None:
        self._advance(now)
        for attempt in attempts:
            attempt.sent = attempt.tokens0
            self.waiting.append(attempt)
        self._admit(now)
        self._plan(now)

    def abort(self, now: float, response: str, number: int) -> None:
        """Abort attempt `number` if it is here; tokens that were not sent are lost."""
        self._advance(now)
        attempt = self.running.get(response)
        if attempt is not None and attempt.number == number:
            self._evict(now, attempt)
            self._admit(now)
        else:
            gone = (response, number)
            self.waiting = deque(a for a in self.waiting if (a.response, a.number) != gone)
            self._finished = [a for a in self._finished if (a.response, a.number) != gone]
        self._plan(now)

    def step(self, now: float) -> list[ResponseTokens]:
        """Return all new tokens if a chunk is due at `next_at`, or the finished responses if they
        are."""
        self._advance(now)
        self._finish(now)
        deltas: list[ResponseTokens] = []
        if self._chunk_at <= self._clock or (self._finished and self._sends_immediately):
            deltas = self._flush()
        elif self._finished_due <= self._clock:
            deltas = self._send_finished()
        self._make_room(now)
        self._admit(now)
        self._plan(now)
        return deltas

    def abort_all(self, now: float) -> list[ResponseTokens]:
        """Abort all responses and return their tokens so far."""
        self._advance(now)
        self._finish(now)
        deltas = self._flush(everything=True)
        for attempt in [*self.running.values(), *self.waiting]:
            held = self._tokens(attempt)
            deltas.append(attempt.tokens(held, held, "abort"))
        self.clear(now)
        return deltas

    def clear(self, now: float) -> None:
        """Drop all responses."""
        self._advance(now)
        for attempt in list(self.running.values()):
            self._evict(now, attempt)
        self.waiting.clear()
        self.cached.clear()
        self._send_finished()  # dropped
        self._plan(now)

    def hold(self, now: float, label: str | None) -> None:
        """Count the time from now on as `label`; None = decoding or idle. Nothing may run."""
        self._advance(now)
        self.held = label

    def set_profile(self, now: float, profile: EngineProfile) -> None:
        self._advance(now)
        self.profile = profile
        self._forwards.clear()
        self._plan(now)

    def account(self, now: float) -> None:
        """Bring `times` up to date."""
        self._advance(now)
        self._plan(now)

    # How time passes

    def _advance(self, now: float) -> None:
        """Move the token clock and `times` to `now`."""
        elapsed = now - self.now
        if elapsed > 0:
            label = "decode" if self.running else self.held or self.idle_label
            self._count(label, elapsed)
            self.slot_s += elapsed * len(self.running)
            self.now = now
        if not self.running or now <= self._at:
            return
        k = self._tokens_in(now - self._at)
        while self._at + self._seconds(k + 1) <= now:
            k += 1
        while k > 0 and self._at + self._seconds(k) > now:
            k -= 1
        if k:
            batch = len(self.running)
            self._at += self._seconds(k)
            self._clock += k
            self._context += k * batch
            self.num_tokens += k * batch
            self._update_rate()

    def _update_rate(self) -> None:
        batch = len(self.running)
        forward = self._forwards.get(batch)
        if forward is None:
            forward = self._forwards[batch] = self.profile.forward(batch)
        seconds, tokens = forward
        self._linear = (seconds + self.profile.context_s * (self._context - batch / 2)) / tokens
        self._square = self.profile.context_s * batch / 2 / tokens

    def _seconds(self, k: int) -> float:
        return k * (self._linear + self._square * k)

    def _tokens_in(self, seconds: float) -> int:
        linear = self._linear
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * self._square * seconds)))

    def _plan(self, now: float) -> None:
        """Set `next_at`: a finish, a chunk, or a full cache."""
        if self._finished and (self._sends_immediately or self._finished_due <= self._clock):
            self.next_at = now
            return
        if not self.running:
            self.next_at = INFINITE
            return
        ends = self._ends
        while ends[0][2].order != ends[0][1]:
            heapq.heappop(ends)  # aborted
        self._update_rate()
        until = min(ends[0][0], self._chunk_at, self._finished_due) - self._clock
        batch = len(self.running)
        if self.profile.kv_tokens and batch > 1:
            until = min(until, max(0, self.profile.kv_tokens - self._context) // batch)
        self.next_at = max(now, self._at + self._seconds(max(0, until)))

    # What runs

    def _tokens(self, attempt: Attempt) -> int:
        if attempt.order < 0:
            return attempt.tokens0
        return attempt.tokens0 + self._clock - attempt.since

    def _finish(self, now: float) -> None:
        """Remove responses that have all their tokens; they are sent with the next chunk."""
        ends, clock = self._ends, self._clock
        while ends and (ends[0][0] <= clock or ends[0][2].order != ends[0][1]):
            _, order, attempt = heapq.heappop(ends)
            if attempt.order == order:
                # of rounding: others left at the same time
                surplus = self._tokens(attempt) - attempt.final_tokens
                self._evict(now, attempt)
                self.num_tokens -= surplus
                attempt.tokens0 -= surplus
                self._finished.append(attempt)
                if attempt.num_cached is not None:
                    self.cached[attempt.response] = attempt.tokens0
                if self._finished_due == NEVER:
                    # the step that ended it counts
                    more = self._steps_in(self.chunk_s / FINISHED_SHARE, NEVER) - 1
                    self._finished_due = clock + more

    @property
    def _sends_immediately(self) -> bool:
        return len(self.running) <= self.prompt_batch

    def _chunk(self) -> int:
        """Return the tokens of each response between two chunks."""
        self._update_rate()
        return self._steps_in(self.chunk_s, self.chunk_tokens)

    def _steps_in(self, seconds: float, most: int) -> int:
        """Return the steps until so many seconds are over, at least one."""
        return max(1, math.ceil(min(most, seconds / self._linear)))

    def _send_finished(self) -> list[ResponseTokens]:
        deltas = [
            a.tokens(a.sent, a.tokens0, "length" if a.truncated else "stop") for a in self._finished
        ]
        self._finished.clear()
        self._finished_due = NEVER
        return deltas

    def _flush(self, everything: bool = False) -> list[ResponseTokens]:
        """Return all tokens that were not sent."""
        deltas = self._send_finished()
        self._chunk_at = self._clock + self._chunk()
        if self.streams or everything:
            for attempt in (*self.running.values(), *self.waiting):
                held = self._tokens(attempt)
                if held > attempt.sent:
                    deltas.append(attempt.tokens(attempt.sent, held))
                    attempt.sent = held
        return deltas

    def _evict(self, now: float, attempt: Attempt) -> None:
        held = self._tokens(attempt)
        del self.running[attempt.response]
        self._context -= attempt.prompt_tokens + held
        attempt.tokens0, attempt.order = held, -1
        if not self.running and self._at > now:  # the rest of the prefill does not happen
            self._count_prefill(now - self._at)
            self._at = now

    def _make_room(self, now: float) -> None:
        """Preempt the youngest while the cache cannot hold one more token of each (as vLLM
        does)."""
        capacity = self.profile.kv_tokens
        while capacity and len(self.running) > 1 and self._context + len(self.running) > capacity:
            youngest = next(reversed(self.running.values()))
            self._evict(now, youngest)
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1

    def _admit(self, now: float) -> None:
        """Start what waits, in order, as slots and cache allow, and prefill its context."""
        capacity, tokens, prompts = self.profile.kv_tokens, 0, set[str]()
        if not self.waiting:
            return
        was_idle = not self.running
        while self.waiting and len(self.running) < self.slots:
            attempt = self.waiting[0]
            context = attempt.prompt_tokens + attempt.tokens0
            fits = self._context + context + len(self.running) + 1 <= capacity
            if capacity and self.running and not fits:
                break
            self.waiting.popleft()
            if attempt.num_cached is not None:
                attempt.num_cached = self.cached.pop(attempt.response, 0)
                tokens += context - attempt.num_cached
            else:
                tokens += attempt.tokens0 if attempt.prompt in prompts else context
            prompts.add(attempt.prompt)
            self._order += 1
            attempt.order, attempt.since = self._order, self._clock
            self.running[attempt.response] = attempt
            self._context += context
            ends = self._clock + attempt.final_tokens - attempt.tokens0
            heapq.heappush(self._ends, (ends, self._order, attempt))
            while capacity and self._context + sum(self.cached.values()) > capacity and self.cached:
                del self.cached[next(iter(self.cached))]
        if tokens:
            seconds = tokens * self.profile.prefill_s
            if was_idle:
                self._at = now
                self._chunk_at = self._clock + self._chunk()
                seconds += self.profile.start_s
            self._at += seconds
            self._count_prefill(seconds)
            self.prefilled_tokens += tokens

    def _count(self, label: str, seconds: float) -> None:
        self.times[label] = self.times.get(label, 0.0) + self.width * seconds

    def _count_prefill(self, seconds: float) -> None:
        """Prefill is part of the time in which responses run, which counts as decode."""
        self._count("prefill", seconds)
        self._count("decode", -seconds)
